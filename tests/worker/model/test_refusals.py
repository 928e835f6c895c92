"""What cannot be served is refused at load, in one line that names the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from tests.worker.model.architectures import ARCHITECTURES, ROUTED, WINDOW, Architecture
from tests.worker.model.factories import load, make_tiny_llama
from tests.worker.model.mutations import MUTATIONS
from tests.worker.model.refused import REFUSED, Refused
from tidemill.errors import ModelUnsupported
from tidemill_worker.model import loader, probe
from tidemill_worker.model.architecture import context_length
from tidemill_worker.model.attention import AttentionCall
from tidemill_worker.model.survey import Survey, survey

UNMASKED = [refused for refused in REFUSED.values() if refused.unmasked]


def refusal(folder: Path) -> str:
    """What is said when the model in `folder` is loaded."""
    with pytest.raises(ModelUnsupported) as refused:
        load(folder)
    message = str(refused.value)
    assert message.startswith("model: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("refused", [r for r in REFUSED.values() if r.by_config], ids=lambda r: r.model_type)
def test_what_its_configuration_says_is_enough(refused: Refused, tmp_path: Path) -> None:
    """There are no weights in the folder: nobody waits for them only to be turned away."""
    refused.architecture().config().save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert message.startswith(f"model: architecture {refused.model_type!r} cannot be served: ")
    assert_matches(message, refused.reason)


@pytest.mark.parametrize(
    "refused", [r for r in REFUSED.values() if not r.by_config], ids=lambda r: r.model_type
)
def test_what_its_forward_shows_is_refused(refused: Refused, tmp_path: Path) -> None:
    assert_matches(refusal(refused.architecture().make(tmp_path)), refused.reason)


@pytest.mark.parametrize("refused", UNMASKED, ids=lambda r: r.model_type)
def test_a_silent_configuration_does_not_get_it_past_the_probe(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "check_config", lambda config: None)
    assert refused.unmasked is not None
    assert_matches(refusal(refused.architecture().make(tmp_path)), refused.unmasked)


def assert_matches(message: str, pattern: str) -> None:
    with pytest.raises(ModelUnsupported, match=pattern):
        raise ModelUnsupported(message)


@pytest.mark.parametrize(
    "stored",
    [
        {"model_type": "nobody-knows", "architectures": ["NobodyForCausalLM"]},
        {"model_type": "llama", "architectures": ["StrangeForCausalLM"]},
    ],
)
def test_an_architecture_that_needs_remote_code_is_refused(stored: dict[str, object], tmp_path: Path) -> None:
    stored |= {"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    (tmp_path / "c.py").write_text("raise SystemExit('it was run')")
    assert_matches(refusal(tmp_path), r"needs code from its repository \(auto_map\), which is not run")


def test_code_beside_a_known_architecture_is_neither_needed_nor_run(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    stored = json.loads((folder / "config.json").read_text())
    stored["auto_map"] = {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}
    (folder / "config.json").write_text(json.dumps(stored))
    (folder / "c.py").write_text("raise SystemExit('it was run')")
    load(folder)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_probe_notices_what_the_tests_notice(
    mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same faults as in the tests of agreement, in a model that is being loaded."""
    folder = make_tiny_llama(tmp_path)
    monkeypatch.setattr("tests.worker.model.mutations.runner", probe)
    MUTATIONS[mutation](monkeypatch)
    assert_matches(refusal(folder), r"its logits differ from transformers' own by [^ ]+ of their standard")


def test_a_window_that_the_attention_is_not_told_of_is_refused(tmp_path: Path) -> None:
    """qwen2_moe keeps its windows in masks, which a paged attention has none of."""
    windowed = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    sizes = {**ROUTED, "shared_expert_intermediate_size": 40}
    folder = Architecture("windowed", "qwen2_moe", sizes | windowed).make(tmp_path)
    assert_matches(refusal(folder), "sees 7 keys from position 85 by its mask, but 86 by what it tells its")


def test_a_window_that_only_the_attention_is_told_of_is_refused(tmp_path: Path) -> None:
    """olmoe passes one on that its mask knows nothing of; this one is longer than the probe's prompt."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40}
    folder = Architecture("told", "olmoe", sizes).make(tmp_path)
    assert_matches(refusal(folder), "sees 86 keys from position 85 by its mask, but 40 by what it tells its")


def test_a_window_of_which_a_model_makes_no_use_is_none(tmp_path: Path) -> None:
    """It stays behind in the configuration of a model made from one with windows."""
    load(make_tiny_llama(tmp_path, sliding_window=WINDOW))


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    folder = Architecture("wide", "phimoe", {"num_local_experts": 2, "sliding_window": 256}).make(tmp_path)
    load(folder)


CHANGES: dict[str, Callable[[AttentionCall], AttentionCall]] = {
    "asks its attention for position_bias": lambda call: replace(
        call, keywords={**call.keywords, "position_bias": torch.zeros(1)}
    ),
    "brings an attention mask of its own": lambda call: replace(call, attention_mask=torch.zeros(3, 3)),
    "also looks at the tokens that follow": lambda call: replace(
        call, keywords={**call.keywords, "is_causal": False}
    ),
    "attends to other tokens than those of its input": lambda call: replace(
        call, key=torch.cat([call.key, call.key], dim=2)
    ),
}


@pytest.mark.parametrize("pattern", CHANGES)
def test_what_a_call_asks_beyond_us_is_refused(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Survey.__call__
    monkeypatch.setattr(Survey, "__call__", lambda self, call: answer(self, CHANGES[pattern](call)))
    assert_matches(refusal(make_tiny_llama(tmp_path)), f"LlamaAttention {pattern}")


def test_a_layer_that_attends_twice_has_two_layers_of_the_cache(tmp_path: Path) -> None:
    model = load(ARCHITECTURES["diffllama"].make(tmp_path))
    assert len(survey(model)) == 2 * model.config.num_hidden_layers


def test_a_model_without_a_stated_context_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="states no context length"):
        context_length(PretrainedConfig())

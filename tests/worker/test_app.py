"""Composition: what the settings ask for goes with the model, and the worker names itself once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker.factories import FakeEngine, Place, make_limits, make_tokenizer, opener
from tests.worker.model.factories import make_tiny_llama
from tests.worker.sizes import make_sizing
from tidemill.errors import ConfigurationError
from tidemill_scheduler import RestoreCosts
from tidemill_worker.app import (
    ServedModel,
    _told,
    build_model,
    build_service,
    rehearse,
)
from tidemill_worker.grammar import GrammarCompiler
from tidemill_worker.metrics import Metrics
from tidemill_worker.settings import load_settings


@pytest.mark.parametrize(
    ("setting", "where"), [("kv_cache_memory", "on cpu"), ("swap_space", "of CPU memory")]
)
def test_memory_beyond_the_machine_is_refused(setting: str, where: str, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    flags = {"model": str(folder), "device": "cpu", "served_model_name": "tiny", setting: 1e6}
    with pytest.raises(ConfigurationError, match=rf"^{setting}: cannot take 1000000\.0 GiB {where}$"):
        build_model(load_settings(flags))


def test_two_starts_are_two_workers(place: Place) -> None:
    """A name used again would let a zombie's results pass for its successor's."""
    tokenizer, limits = make_tokenizer(), make_limits()
    model = ServedModel(
        engine=FakeEngine(),  # type: ignore[arg-type]  # does without a model
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer, limits.end_of_text),
        limits=limits,
        sizing=make_sizing(load_settings({"max_num_seqs": 5})),
        fingerprint="f",
        device="cpu",
        dtype="float32",
    )
    services = [build_service(load_settings(), model, opener(place), Metrics("tiny")) for _ in range(2)]
    names = {service._name for service in services}
    assert len(names) == 2
    assert all(service._config.capacity == 5 + 8 for service in services)


def test_a_rehearsal_leaves_the_engine_empty() -> None:
    engine = FakeEngine()
    rehearse(engine, make_tokenizer())  # type: ignore[arg-type]
    assert engine.seen == ["rehearsal"]
    assert not engine.has_unfinished


def test_a_model_is_built_from_its_folder(tmp_path: Path) -> None:
    """Given a checkpoint of another type, when it is served on CPU, then in float32, with 1 GiB of cache."""
    folder = make_tiny_llama(tmp_path, dtype="bfloat16")
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    settings = load_settings({"model": str(folder), "device": "cpu", "served_model_name": "tiny"})

    model = build_model(settings)

    assert (model.device, model.dtype) == ("cpu", "float32")
    bytes_per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, width, float32
    config = model.engine.scheduler.config
    assert config.num_blocks == model.sizing.num_blocks == 2**30 // (16 * bytes_per_token)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.num_swap_blocks) == (64, 512, 0)
    assert model.limits.max_model_len == 512
    assert model.engine.stats().generation_tokens == 0
    model.engine.scheduler.check_integrity()


def test_a_swap_space_is_built_and_measured(tmp_path: Path) -> None:
    """What restoring costs is known before the first job, and not what the scheduler would assume."""
    folder = make_tiny_llama(tmp_path)
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    flags = {"model": str(folder), "device": "cpu", "served_model_name": "tiny", "swap_space": 0.25}

    model = build_model(load_settings(flags | {"kv_cache_memory": 0.01}))

    engine = model.engine
    assert engine.scheduler.config.num_swap_blocks == 2**28 // (16 * 3 * 2 * 2 * 16 * 4)
    assert model.sizing.swap_tokens == 16 * engine.scheduler.config.num_swap_blocks
    assert engine.runner.costs != RestoreCosts()


def test_a_start_says_what_was_chosen_and_why() -> None:
    told = _told(make_sizing(load_settings({"swap_space": 0})).choices)
    assert told == {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "swap_space": 0.0,
        "reasons": "max_num_seqs: the most on CPU; the KV cache has room for 91 sequences of 256 tokens;"
        " max_num_batched_tokens: the default on CPU; swap_space: as it was set",
    }

"""Composition: what the settings ask for goes with the model, and the worker names itself once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.worker.factories import FakeEngine, Place, make_limits, make_stats, make_tokenizer, opener
from tests.worker.model.factories import make_tiny_llama
from tidemill.errors import ConfigurationError
from tidemill_worker.app import (
    HealthProbe,
    ServedModel,
    build_model,
    build_service,
    rehearse,
    scheduler_config,
)
from tidemill_worker.grammar import GrammarCompiler
from tidemill_worker.held import HeldJobs
from tidemill_worker.metrics import Metrics
from tidemill_worker.settings import load_settings


def test_the_context_defaults_to_the_models() -> None:
    config = scheduler_config(load_settings(), context=2048, num_blocks=100)
    assert (config.max_model_len, config.block_size, config.max_num_seqs) == (2048, 16, 64)
    config = scheduler_config(load_settings({"max_model_len": 512}), context=2048, num_blocks=100)
    assert config.max_model_len == 512


@pytest.mark.parametrize(
    ("flags", "num_blocks", "named"),
    [
        ({"max_model_len": 4096}, 100, "max_model_len=4096: the model's context is 2048"),
        ({"kv_cache_memory": 0.001}, 0, "kv_cache_memory: not even one block of 16 tokens"),
        ({"enable_chunked_prefill": False}, 100, "max_num_batched_tokens is 512"),
    ],
)
def test_settings_that_do_not_go_with_the_model_are_named(
    flags: dict[str, object], num_blocks: int, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{named}"):
        scheduler_config(load_settings(flags), context=2048, num_blocks=num_blocks)


def test_a_cache_larger_than_the_machine_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    flags = {"model": str(folder), "device": "cpu", "served_model_name": "tiny", "kv_cache_memory": 1e6}
    with pytest.raises(ConfigurationError, match=r"^kv_cache_memory: cannot take 1000000\.0 GiB on cpu$"):
        build_model(load_settings(flags))


def test_two_starts_are_two_workers(place: Place) -> None:
    """A name used again would let a zombie's results pass for its successor's."""
    tokenizer, limits = make_tokenizer(), make_limits()
    model = ServedModel(
        engine=FakeEngine(),  # type: ignore[arg-type]  # does without a model
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer, limits.end_of_text),
        limits=limits,
        fingerprint="f",
        device="cpu",
        dtype="float32",
    )
    services = [build_service(load_settings(), model, opener(place), Metrics("tiny")) for _ in range(2)]
    names = {service._config.worker for service in services}
    assert len(names) == 2
    assert all(service._config.capacity == 64 + 8 for service in services)


@pytest.mark.parametrize(
    ("stuck", "ok", "engine"), [(0.0, True, "alive"), (119.0, True, "alive"), (121.0, False, "hangs")]
)
def test_a_worker_whose_work_does_not_move_is_not_healthy(stuck: float, ok: bool, engine: str) -> None:
    """Not to be left running with health 200 (vllm#45414)."""
    thread = SimpleNamespace(stuck_seconds=stuck, is_alive=True, stats=make_stats(num_waiting=5))
    probe = HealthProbe()
    probe.service = SimpleNamespace(engine=thread, held=HeldJobs())  # type: ignore[assignment]
    health = probe()
    assert (health.ok, health.details["engine"], health.details["waiting"]) == (ok, engine, 5)


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
    assert model.engine.scheduler.config.num_blocks == 2**30 // (16 * bytes_per_token)
    assert model.limits.max_model_len == 512
    assert model.engine.stats().generation_tokens == 0
    model.engine.scheduler.check_integrity()

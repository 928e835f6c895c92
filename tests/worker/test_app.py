"""Composition: what the settings ask for goes with the model, and the worker names itself once."""

from __future__ import annotations

import pytest

from tests.worker.factories import FakeEngine, Place, make_limits, make_tokenizer, opener
from tidemill.errors import ConfigurationError
from tidemill_worker.app import ServedModel, build_service, scheduler_config
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
        ({"kv_cache_memory": 0.001}, 0, "kv_cache_memory=0.001"),
        ({"enable_chunked_prefill": False}, 100, "max_num_batched_tokens is 512"),
    ],
)
def test_settings_that_do_not_go_with_the_model_are_named(
    flags: dict[str, object], num_blocks: int, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{named}"):
        scheduler_config(load_settings(flags), context=2048, num_blocks=num_blocks)


def test_two_starts_are_two_workers(place: Place) -> None:
    """A name used again would let a zombie's results pass for its successor's."""
    model = ServedModel(FakeEngine(), make_tokenizer(), make_limits(), "f")  # type: ignore[arg-type]
    services = [build_service(load_settings(), model, opener(place), Metrics("tiny")) for _ in range(2)]
    names = {service._config.worker for service in services}
    assert len(names) == 2
    assert all(service._config.capacity == 64 + 8 for service in services)

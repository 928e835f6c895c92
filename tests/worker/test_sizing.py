"""Sizes of a worker: what is set is kept, what is left open is chosen, what cannot be is named."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.worker.sizes import SMOLLM2, make_sizing
from tidemill.errors import ConfigurationError
from tidemill_scheduler import PreemptionMode, SchedulerConfig
from tidemill_worker.settings import load_settings
from tidemill_worker.sizing import (
    ON_CPU,
    ON_GPU,
    Defaults,
    kv_cache_memory,
    scheduler_config,
    sequences_in,
    size,
)


def test_an_ordinary_worker_on_cpu_has_64_places() -> None:
    """1 GiB for SmolLM2, as every benchmark has it."""
    sizing = make_sizing(context=8192)
    assert (sizing.num_blocks, sizing.kv_tokens) == (1456, 23_296)
    assert (sizing.max_num_seqs.value, sizing.max_num_batched_tokens.value) == (64, 512)
    assert (sizing.num_swap_blocks, sizing.swap_space.value) == (0, 0.0)
    assert sizing.max_model_len == 8192


@pytest.mark.parametrize(
    ("num_blocks", "mean_length", "most", "why"),
    [
        (160, 256, 10, "the KV cache has room for 10 sequences of 256 tokens"),
        (160, 257, 10, "the KV cache has room for 10 sequences of 257 tokens"),
        (160, 258, 9, "the KV cache has room for 9 sequences of 258 tokens"),
        (3, 256, 1, "the KV cache has room for 0 sequences of 256 tokens"),
        (1456, 16, 64, "the most on CPU; the KV cache has room for 1456 sequences of 16 tokens"),
        (1456, 9999, 11, "the KV cache has room for 11 sequences of 2048 tokens"),
    ],
)
def test_places_are_for_as_many_ordinary_sequences_as_fit(
    num_blocks: int, mean_length: int, most: int, why: str
) -> None:
    choice = make_sizing(num_blocks=num_blocks, mean_length=mean_length).max_num_seqs
    assert (choice.value, choice.reason) == (most, why)


def test_a_gpu_has_more_of_everything() -> None:
    sizing = make_sizing(num_blocks=100_000, defaults=ON_GPU)
    assert (sizing.max_num_seqs.value, sizing.max_num_batched_tokens.value) == (256, 2048)
    assert (sizing.swap_space.value, sizing.num_swap_blocks) == (4.0, 2**32 // SMOLLM2.bytes_per_block)
    assert sizing.swap_tokens == 16 * sizing.num_swap_blocks


def test_what_is_set_is_kept() -> None:
    flags = {"max_num_seqs": 1000, "max_num_batched_tokens": 1001, "swap_space": 0.5, "max_model_len": 100}
    sizing = make_sizing(load_settings(flags), num_blocks=1, defaults=ON_GPU)
    assert {name: choice.value for name, choice in sizing.choices.items()} | {"max_model_len": 100} == flags
    assert {choice.reason for choice in sizing.choices.values()} == {"as it was set"}
    assert sizing.max_model_len == 100


@pytest.mark.parametrize(
    ("flags", "expected", "why"),
    [
        ({"max_num_seqs": 700}, (700, 700), "each of max_num_seqs sequences needs its token"),
        ({"max_num_batched_tokens": 20}, (20, 20), "max_num_batched_tokens has a token for no more"),
        ({"enable_chunked_prefill": False}, (64, 64 + 2048), "a prompt of up to 2048 its own"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 2050},
            (2, 2050),
            "has a token for no more",
        ),
    ],
)
def test_what_is_chosen_goes_with_what_is_set(
    flags: dict[str, object], expected: tuple[int, int], why: str
) -> None:
    sizing = make_sizing(load_settings(flags))
    seqs, tokens = sizing.max_num_seqs, sizing.max_num_batched_tokens
    assert (seqs.value, tokens.value) == expected
    assert why in f"{seqs.reason}; {tokens.reason}"


def test_the_sizes_reach_the_scheduler() -> None:
    settings = load_settings({"preemption_mode": "swap", "swap_space": 0.5, "enable_prefix_caching": False})
    sizing = make_sizing(settings, num_blocks=100)
    config = scheduler_config(settings, sizing)
    assert (config.num_blocks, config.num_swap_blocks) == (100, sizing.num_swap_blocks)
    assert (config.max_model_len, config.block_size) == (2048, 16)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (6, 512)
    assert config.preemption_mode is PreemptionMode.SWAP
    assert not config.enable_prefix_caching


@given(
    num_blocks=st.integers(1, 5000),
    context=st.integers(2, 10_000),
    mean_length=st.integers(2, 10_000),
    seqs=st.none() | st.integers(1, 2000),
    beyond_context=st.none() | st.integers(-100, 100) | st.integers(-10_000, 5_000),
    chunked=st.booleans(),
    defaults=st.sampled_from([ON_CPU, ON_GPU]),
)
def test_the_scheduler_takes_what_is_chosen_and_refuses_what_was_set_too_small(
    num_blocks: int,
    context: int,
    mean_length: int,
    seqs: int | None,
    beyond_context: int | None,
    chunked: bool,
    defaults: Defaults,
) -> None:
    tokens = None if beyond_context is None else max(1, context + beyond_context)
    assume(tokens is None or tokens >= (seqs or 1))
    settings = load_settings(
        {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "enable_chunked_prefill": chunked}
    )
    sizing = make_sizing(
        settings, num_blocks=num_blocks, context=context, mean_length=mean_length, defaults=defaults
    )
    if chunked or tokens is None or tokens >= context + (seqs or 1):
        config = scheduler_config(settings, sizing)
        assert config.max_total_tokens == sizing.longest_sequence.value
    else:
        with pytest.raises(ConfigurationError, match=f"^max_num_batched_tokens is {tokens}, must"):
            scheduler_config(settings, sizing)


@pytest.mark.parametrize(
    ("flags", "choice", "why"),
    [
        ({}, 4.0, "the default on a GPU"),
        ({"preemption_mode": "recompute"}, 0.0, "preemption_mode=recompute has no use for it"),
        ({"preemption_mode": "recompute", "swap_space": 0}, 0.0, "as it was set"),
        ({"preemption_mode": "swap", "swap_space": 1}, 1.0, "as it was set"),
        ({"swap_space": 0}, 0.0, "as it was set"),
    ],
)
def test_the_swap_space_goes_with_the_preemption_mode(
    flags: dict[str, object], choice: float, why: str
) -> None:
    swap_space = make_sizing(load_settings(flags), defaults=ON_GPU).swap_space
    assert swap_space.value == choice
    assert swap_space.reason.startswith(why)


@pytest.mark.parametrize(
    ("flags", "memory", "message"),
    [
        ({"max_model_len": 4096}, 2**30, "max_model_len=4096: the model's context is 2048 tokens"),
        (
            {},
            2**19,
            r"kv_cache_memory: not even one block of 16 tokens \(0\.703 MiB\) fits in 0\.5 MiB; give it more",
        ),
        ({"swap_space": 0.0005}, 2**30, r"swap_space: not even one block of 16 tokens .* in 0\.512 MiB$"),
        ({"preemption_mode": "swap"}, 2**30, "preemption_mode=swap: there is no swap space; set swap_space"),
        (
            {"preemption_mode": "recompute", "swap_space": 0.5},
            2**30,
            r"swap_space=0\.5: preemption_mode=recompute has no use for it; leave one of them out$",
        ),
    ],
)
def test_what_cannot_be_is_named(flags: dict[str, object], memory: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        size(load_settings(flags), SMOLLM2, context=2048, kv_cache_memory=memory, defaults=ON_CPU)


@pytest.mark.parametrize("length", [2, 16, 17, 18, 33, 34])
def test_the_scheduler_has_room_for_a_sequence_of_which_one_fits(length: int) -> None:
    """The last token is never computed, so it needs no slot."""
    blocks = next(count for count in range(1, 9) if sequences_in(count, length, block_size=16))
    longest = SchedulerConfig(num_blocks=blocks, max_model_len=999).max_total_tokens
    assert longest - 16 < length <= longest


def test_the_longest_sequence_is_bounded_by_the_model_or_by_memory() -> None:
    assert make_sizing(num_blocks=128).longest_sequence.value == 2048
    short = make_sizing(num_blocks=127).longest_sequence
    assert short.value == 127 * 16 + 1
    assert "no room for the 2048 tokens" in short.reason


def test_the_kv_cache_has_its_memory_from_the_settings_or_its_share_of_a_gpu() -> None:
    assert kv_cache_memory(load_settings(), ON_CPU) == 2**30
    assert kv_cache_memory(load_settings(), ON_GPU) is None
    assert kv_cache_memory(load_settings({"kv_cache_memory": 0.5}), ON_GPU) == 2**29


def test_the_arithmetic_needs_no_torch() -> None:
    code = "import sys, tidemill_worker.sizing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

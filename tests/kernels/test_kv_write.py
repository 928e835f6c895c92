"""KV write on CPU: each row lands in its slot, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.factories import guarded, guards_hold
from tidemill_kernels.kv_write import kv_write, kv_write_reference

SHAPES = [(3, 64, 16), (1, 16, 8), (8, 128, 32), (2, 80, 16), (3, 13, 5), (1, 1, 1)]


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), SHAPES)
def test_rows_land_in_their_slots(num_kv_heads: int, head_dim: int, block_size: int) -> None:
    # Given a cache of NaN, and slots in no order
    cache = guarded((7, 3, 2, num_kv_heads, block_size, head_dim))
    slots = torch.randperm(7 * block_size)[: 4 * block_size]
    key, value = torch.randn(2, len(slots), num_kv_heads, head_dim)
    expected = cache.clone()
    kv_write_reference(key, value, expected, 1, slots)
    # When the rows are written
    kv_write(key, value, cache, 1, slots)
    # Then the cache is as by the definition, NaN where nothing was written
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
    assert guards_hold(cache)


def test_the_reference_by_hand() -> None:
    cache = torch.zeros(2, 2, 2, 1, 4, 1)
    kv_write_reference(torch.full((1, 1, 1), 5.0), torch.full((1, 1, 1), 6.0), cache, 1, torch.tensor([6]))
    assert cache.nonzero().tolist() == [[1, 1, 0, 0, 2, 0], [1, 1, 1, 0, 2, 0]]
    assert cache[1, 1, :, 0, 2, 0].tolist() == [5.0, 6.0]


def test_nothing_to_write() -> None:
    cache = torch.zeros(1, 1, 2, 1, 4, 8)
    kv_write(torch.ones(0, 1, 8), torch.ones(0, 1, 8), cache, 0, torch.zeros(0, dtype=torch.int64))
    assert not cache.any()


def test_a_cache_of_more_than_2_31_floats() -> None:
    num_blocks = 2**31 // (2 * 16 * 64) + 2
    cache = torch.empty(num_blocks, 1, 2, 1, 16, 64)
    key, value = torch.randn(2, 1, 1, 64)
    kv_write(key, value, cache, 0, torch.tensor([num_blocks * 16 - 1]))
    assert torch.equal(cache[-1, 0, 0, 0, 15], key[0, 0])
    assert torch.equal(cache[-1, 0, 1, 0, 15], value[0, 0])


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"key": torch.zeros(2, 3, 64).half()}, TypeError, "takes float32"),
        ({"value": torch.zeros(2, 3, 64).half()}, TypeError, "value torch.float16"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, TypeError, "int64"),
        ({"key": torch.zeros(2, 64, 3).transpose(1, 2)}, ValueError, "not contiguous"),
        ({"value": torch.zeros(2, 3, 32)}, ValueError, "do not fit"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, ValueError, "do not fit"),
        ({"layer": 2}, ValueError, "layer 2 of a cache of 2 layers"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, torch.Tensor], error: type[Exception], reason: str
) -> None:
    arguments = {
        "key": torch.zeros(2, 3, 64),
        "value": torch.zeros(2, 3, 64),
        "kv_cache": torch.zeros(4, 2, 2, 3, 16, 64),
        "layer": 0,
        "slots": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(error, match=reason):
        kv_write(**(arguments | change))  # type: ignore[arg-type]

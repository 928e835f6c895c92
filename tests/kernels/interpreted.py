"""Runs the Triton kernels under Triton's interpreter, on CPU, and reports how far off they are.

A program of its own, because the interpreter must be chosen before triton is first imported:
`TRITON_INTERPRET=1 python -m tests.kernels.interpreted` prints one JSON object. The interpreter
multiplies bfloat16 matrices wrongly (triton 3.7.1), so that type is left to the compiled checks.
"""

from __future__ import annotations

import json

import torch

from tests.kernels.factories import Batch, Model, guarded, guards_hold, make_batch, make_tokens
from tidemill_kernels import kv_write_triton, paged_attention_triton
from tidemill_kernels.kv_write import kv_write_reference
from tidemill_kernels.paged_attention import paged_attention_reference

ATTENTION = {
    "smollm2": (Model(9, 3, 64), 16, torch.float32),
    "half": (Model(9, 3, 64), 16, torch.float16),
    "one-head": (Model(1, 1, 16), 8, torch.float32),
    "group-1": (Model(4, 4, 32), 16, torch.float16),
    "group-4": (Model(4, 1, 64), 32, torch.float32),
    "group-8": (Model(8, 1, 128), 16, torch.float16),
    "group-20": (Model(20, 1, 16), 16, torch.float32),
    "width-80": (Model(6, 2, 80), 16, torch.float32),
    "width-13": (Model(2, 1, 13), 5, torch.float32),
    "block-1": (Model(2, 2, 16), 1, torch.float32),
    "block-100": (Model(2, 1, 32), 100, torch.float32),
    "window": (Model(4, 2, 32, window=20), 16, torch.float32),
    "window-1": (Model(3, 1, 16, window=1), 16, torch.float32),
    "window-64": (Model(2, 1, 64, window=64), 16, torch.float32),
    "window-unfilled": (Model(2, 1, 16, window=2**40), 16, torch.float32),
    "softcap": (Model(4, 2, 32, softcap=1.5), 16, torch.float32),
    "softcap-tiny": (Model(4, 2, 32, softcap=1e-3), 16, torch.float32),
    "softcap-large": (Model(4, 2, 32, softcap=1e4), 16, torch.float32),
    "sinks": (Model(4, 2, 32, has_sinks=True), 16, torch.float32),
    "all": (Model(6, 2, 80, window=33, softcap=0.7, has_sinks=True), 16, torch.float32),
    "all-group-71": (Model(71, 1, 16, window=33, softcap=0.7, has_sinks=True), 16, torch.float32),
    "all-half": (Model(8, 1, 64, window=33, softcap=0.7, has_sinks=True), 16, torch.float16),
}
WRITES = {
    "smollm2": (Model(9, 3, 64), 16, torch.float32),
    "half": (Model(8, 8, 128), 32, torch.float16),
    "bfloat": (Model(4, 2, 64), 8, torch.bfloat16),
    "width-13": (Model(2, 3, 13), 5, torch.float32),
}
SPANS = [(0, 1), (15, 16), (63, 65), (129, 130), (0, 19), (50, 67), (9, 9), (140, 147)]


def mixed_batch(model: Model, block_size: int, dtype: torch.dtype) -> Batch:
    parts = [
        (make_tokens(stop, model, seed=seed, dtype=dtype), start, stop)
        for seed, (start, stop) in enumerate(SPANS)
    ]
    return make_batch(parts, model, block_size=block_size)


def attend(batch: Batch) -> torch.Tensor:
    out = guarded(batch.query.shape, batch.query.dtype)
    paged_attention_triton.paged_attention(*batch.tensors, **batch.options, out=out)
    assert guards_hold(out)
    return out


def attention_error(model: Model, block_size: int, dtype: torch.dtype) -> float:
    """Greatest distance from the definition; NaN if anything was read that should not be."""
    batch = mixed_batch(model, block_size, dtype)
    expected = paged_attention_reference(*batch.tensors, **batch.options)
    return float((attend(batch).double() - expected).abs().max())


def far_attention_error() -> float:
    """The same with a cache of more than 2**31 elements, of which the last block is used."""
    model = Model(1, 1, 64, num_layers=1)
    num_blocks = 2**31 // (2 * 16 * 64) + 2
    near = make_batch([(make_tokens(16, model, dtype=torch.float16), 15, 16)], model)
    kv_cache = torch.empty(num_blocks, 1, 2, 1, 16, 64, dtype=torch.float16)
    kv_cache[-1] = near.kv_cache[int(near.block_tables[0, 0])]
    table = torch.full((1, 1), num_blocks - 1, dtype=torch.int32)
    far = near.with_(kv_cache=kv_cache, block_tables=table)
    return float((attend(far) - attend(near)).abs().max())


def writes_right(model: Model, block_size: int, dtype: torch.dtype) -> bool:
    cache = guarded((7, 3, 2, model.num_kv_heads, block_size, model.head_dim), dtype)
    slots = torch.randperm(7 * block_size)[: 4 * block_size]
    rows = torch.randn(2, len(slots), model.num_kv_heads, model.head_dim)
    key, value = rows.to(dtype)
    expected = cache.clone()
    kv_write_reference(key, value, expected, 1, slots)
    kv_write_triton.kv_write(key, value, cache, 1, slots)
    same = torch.equal(cache.nan_to_num(9e4), expected.nan_to_num(9e4))
    return same and guards_hold(cache)


def far_write_right() -> bool:
    num_blocks = 2**31 // (2 * 16 * 64) + 2
    cache = torch.empty(num_blocks, 1, 2, 1, 16, 64, dtype=torch.float16)
    key, value = torch.randn(2, 1, 1, 64).half()
    kv_write_triton.kv_write(key, value, cache, 0, torch.tensor([num_blocks * 16 - 1]))
    return torch.equal(cache[-1, 0, :, 0, 15], torch.cat([key[0], value[0]]))


def main() -> None:
    attention = {name: attention_error(*case) for name, case in ATTENTION.items()}
    writes = {name: writes_right(*case) for name, case in WRITES.items()}
    attention["far"], writes["far"] = far_attention_error(), far_write_right()
    print(json.dumps({"attention": attention, "writes": writes}))


if __name__ == "__main__":
    main()

"""The CUDA kernels on the GPU at hand: right numbers first, then how near to its limits they run.

    python benchmarks/gpu_kernels.py [--quick] [--json PATH]

Every kernel is compared with its definition in double precision; a wrong number ends the program
with exit code 1. Then decode is timed against the bandwidth of a plain copy on the same GPU (it
reads each key and value once, so bandwidth is its floor), prefill in floating-point operations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tidemill_kernels.kv_write import kv_write, kv_write_reference
from tidemill_kernels.paged_attention import paged_attention, paged_attention_reference

BLOCK_SIZE = 16
# Rounding of the inputs is not counted: the definition starts from the rounded ones.
TOLERANCES = {torch.float16: 3e-3, torch.bfloat16: 2.5e-2, torch.float32: 1e-5}


@dataclass(frozen=True)
class Model:
    """The shape of a model's attention; few layers stand for all of them."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 4
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def options(self, device: str) -> dict[str, Any]:
        """The keywords of paged attention."""
        return {
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": torch.linspace(-4, 4, self.num_heads, device=device) if self.has_sinks else None,
        }

    def keys_seen(self, rows: int, context: int) -> int:
        """By the last `rows` rows of a context, all together."""
        window = self.window or context
        return sum(min(position + 1, window) for position in range(context - rows, context))


MODELS = [
    Model("smollm2", 9, 3, 64),
    Model("llama8b", 32, 8, 128),
    Model("phi2", 32, 32, 80),
    Model("falcon7b", 71, 1, 64),
    Model("gemma2", 8, 4, 256, window=4096, softcap=50.0),
    Model("gpt_oss", 64, 8, 64, window=128, has_sinks=True),
]
# Their windows and caps show at the lengths that are checked.
OPTIONS_CHECKED = [
    Model("window", 32, 8, 128, window=20),
    Model("softcap", 8, 4, 256, softcap=0.5),
    Model("sinks", 64, 8, 64, has_sinks=True),
    Model("all", 9, 3, 64, window=33, softcap=0.5, has_sinks=True),
]
# (sequences, tokens of context, rows of each)
CHECKED = [(1, 1, 1), (3, 37, 37), (7, 300, 1), (2, 129, 65), (5, 48, 17)]
DECODES = [(32, 300), (256, 1024), (64, 4096)]
PREFILL = (4, 2048, 2048)


@dataclass(frozen=True)
class Batch:
    """Sequences of equal length, their blocks shuffled over the cache."""

    model: Model
    dtype: torch.dtype
    sequences: int
    context: int
    rows: int
    device: str

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query, KV cache, query starts, context lengths, block tables."""
        model, options = self.model, {"device": self.device, "dtype": self.dtype}
        blocks = -(-self.context // BLOCK_SIZE)
        order = torch.randperm(self.sequences * blocks, dtype=torch.int32, device=self.device)
        shape = (model.num_layers, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
        cache = torch.randn(self.sequences * blocks, *shape, **options)
        query = torch.randn(self.sequences * self.rows, model.num_heads, model.head_dim, **options)
        starts = torch.arange(self.sequences + 1, dtype=torch.int32, device=self.device) * self.rows
        lengths = torch.full((self.sequences,), self.context, dtype=torch.int32, device=self.device)
        return query, cache, starts, lengths, order.view(self.sequences, blocks)

    def attend(self, tensors: tuple[Tensor, ...], layer: int, out: Tensor | None = None) -> Tensor:
        query, cache, starts, lengths, tables = tensors
        options = self.model.options(self.device)
        return paged_attention(query, cache, layer, starts, lengths, tables, **options, out=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, fewer repeats")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device and a CUDA build of torch")
    models = MODELS[:1] if arguments.quick else MODELS
    repeats = 5 if arguments.quick else 20

    figures = check_numbers(models + OPTIONS_CHECKED, list(TOLERANCES), "cuda")
    copy = copy_bandwidth(repeats)
    figures["copy_gb_per_s"] = copy / 1e9
    for model in models:
        figures |= time_model(model, copy, repeats)
    print_table(figures)
    settings = {"gpu": torch.cuda.get_device_name(), "quick": arguments.quick, "repeats": repeats}
    report(figures, settings=settings, path=arguments.json)


def check_numbers(models: list[Model], dtypes: list[torch.dtype], device: str) -> dict[str, float]:
    """Greatest error of each kernel by type; ends the program if one is out of bounds."""
    figures = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        worst = max(attention_error(Batch(m, dtype, *case, device)) for m in models for case in CHECKED)
        if not worst <= TOLERANCES[dtype]:
            sys.exit(f"attention in {name} is off by {worst}, more than {TOLERANCES[dtype]}")
        if not all(write_is_right(model, dtype, device) for model in models):
            sys.exit(f"KV write in {name} differs from its definition")
        figures[f"attention_error_{name}"] = worst
    return figures


def attention_error(batch: Batch) -> float:
    torch.manual_seed(0)
    query, cache, starts, lengths, tables = tensors = batch.tensors()
    layer = batch.model.num_layers - 1
    options = batch.model.options(batch.device)
    exact = paged_attention_reference(query, cache, layer, starts, lengths, tables, **options)
    return float((batch.attend(tensors, layer).double() - exact).abs().max())


def write_is_right(model: Model, dtype: torch.dtype, device: str) -> bool:
    torch.manual_seed(0)
    shape = (9, model.num_layers, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    cache = torch.randn(shape, device=device).to(dtype)
    slots = torch.randperm(9 * BLOCK_SIZE, device=device)[:50]
    key, value = torch.randn(2, 50, model.num_kv_heads, model.head_dim, device=device).to(dtype)
    expected = cache.clone()
    kv_write_reference(key, value, expected, 1, slots)
    kv_write(key, value, cache, 1, slots)
    return torch.equal(cache, expected)


def time_model(model: Model, copy: float, repeats: int) -> dict[str, float]:
    """Decode and prefill in half precision, as bandwidth and as operations per second."""
    figures = {}
    for sequences, context in DECODES:
        batch = Batch(model, torch.float16, sequences, context, 1, "cuda")
        seconds = time_attention(batch, repeats)
        size = sequences * model.keys_seen(1, context) * 2 * model.num_kv_heads * model.head_dim * 2
        figures[f"decode_over_copy_{model.name}_{sequences}x{context}"] = size / seconds / copy
    sequences, context, rows = PREFILL
    seconds = time_attention(Batch(model, torch.float16, sequences, context, rows, "cuda"), repeats)
    pairs = sequences * model.keys_seen(rows, context) * model.num_heads
    figures[f"prefill_tflops_{model.name}"] = 4 * pairs * model.head_dim / seconds / 1e12
    return figures


def time_attention(batch: Batch, repeats: int) -> float:
    """Seconds per layer; all layers in turn, so that the caches of the GPU do not hold the keys."""
    tensors = batch.tensors()
    out = torch.empty_like(tensors[0])

    def all_layers() -> None:
        for layer in range(batch.model.num_layers):
            batch.attend(tensors, layer, out)

    return device_seconds(all_layers, repeats) / batch.model.num_layers


def copy_bandwidth(repeats: int) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / device_seconds(lambda: target.copy_(source), repeats)


def device_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time on the device, after a warm-up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def print_table(figures: dict[str, float]) -> None:
    table = Table("figure", "value", title=f"Kernels on {torch.cuda.get_device_name()}")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)


if __name__ == "__main__":
    main()

"""The Triton kernels become good machine code for the GPUs we name, checked without having one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
ATTENTION_POINTERS = {
    "query_ptr": None,
    "kv_cache_ptr": None,
    "query_starts_ptr": "i32",
    "context_lens_ptr": "i32",
    "block_tables_ptr": "i32",
    "out_ptr": None,
    "sinks_ptr": "fp32",
}
ATTENTION_NUMBERS = {
    "scale": "fp32",
    "softcap": "fp32",
    "window": "i32",
    "num_sequences": "i32",
    "max_blocks": "i32",
    "num_layers": "i32",
    "layer": "i32",
}
OPTIONS = ("sinks_ptr", "softcap", "window")


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel."""

    ptx: str
    shared: int
    registers: int
    stack: int
    local: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))


Compile = Callable[..., Compiled]


@pytest.fixture(scope="module")
def compile_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Compiles to machine code, with pointers aligned to 16 bytes, as torch's are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    folder: Path = tmp_path_factory.mktemp("triton")
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def compile_(
        kernel: Any, pointers: dict[str, str], numbers: dict[str, str], constants: dict[str, Any], target: int
    ) -> Compiled:
        options = {key: constants[key] for key in ("num_warps", "num_stages") if key in constants}
        types = {name: "*" + type_ for name, type_ in pointers.items()} | numbers
        types |= {name: "constexpr" for name in constants}
        places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
        source = ASTSource(
            fn=kernel,
            signature={name: types[name] for name in places},
            constexprs={places[name]: constants[name] for name in places if name in constants},
            attrs={places[name]: [["tt.divisibility", 16]] for name in pointers if name not in constants},
        )
        result = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(result.asm["cubin"])
        usage = subprocess.run(
            [disassembler, "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        resources = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        return Compiled(
            ptx=result.asm["ptx"],
            shared=result.metadata.shared,
            registers=resources["REG"],
            stack=resources["STACK"],
            local=resources["LOCAL"],
        )

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield compile_


def compile_attention(
    compile_kernel: Compile,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    target: int,
    options: Sequence[str] = (),
) -> Compiled:
    """For (heads, KV heads, head_dim), with the options named and without the others."""
    from tidemill_kernels.paged_attention_triton import attention_kernel, launch_constants

    num_heads, num_kv_heads, head_dim = shape
    kv_cache = torch.empty(1, 1, 2, num_kv_heads, 16, head_dim, dtype=dtype)
    return compile_kernel(
        attention_kernel,
        {name: type_ or TYPES[dtype] for name, type_ in ATTENTION_POINTERS.items()},
        ATTENTION_NUMBERS,
        launch_constants(num_heads, kv_cache) | {name: None for name in OPTIONS if name not in options},
        target,
    )


def assert_good(compiled: Compiled, dtype: torch.dtype, target: int) -> None:
    # Nothing is spilled, and it fits.
    assert (compiled.stack, compiled.local) == (0, 0)
    assert compiled.shared <= SHARED_LIMITS[target]
    # Products run on the tensor cores.
    kind = {"fp16": "f16.f16", "bf16": "bf16.bf16", "fp32": "tf32.tf32"}[TYPES[dtype]]
    assert compiled.count(rf"mma\.sync\.aligned\.m16n8k\d+\.row\.col\.f32\.{kind}\.f32") >= 16
    # Keys and values come in 16 bytes at a time, while the products run; so does the query.
    assert compiled.count(r"cp\.async\.c[ag]\.shared\.global \[[^,]+\], \[[^,]+\], (?:0x10|16)") >= 8
    assert compiled.count(r"ld\.global\.v4\.b32") >= 1
    assert compiled.count(r"st\.global\.v[24]\.b32") >= 1


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("dtype", TYPES, ids=TYPES.get)
@pytest.mark.parametrize("shape", [(9, 3, 64), (32, 8, 128), (32, 32, 80), (8, 1, 256)])
def test_attention(
    compile_kernel: Compile, shape: tuple[int, int, int], dtype: torch.dtype, target: int
) -> None:
    assert_good(compile_attention(compile_kernel, shape, dtype, target), dtype, target)


@pytest.mark.parametrize("target", SHARED_LIMITS)
@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        ((64, 8, 64), ("window", "sinks_ptr"), torch.bfloat16),
        ((8, 4, 256), ("window", "softcap"), torch.bfloat16),
        ((8, 4, 256), ("window", "softcap"), torch.float32),
        ((32, 8, 128), OPTIONS, torch.float16),
        ((32, 8, 128), OPTIONS, torch.float32),
    ],
    ids=["gpt_oss", "gemma2", "gemma2-fp32", "all", "all-fp32"],
)
def test_attention_with_options(
    compile_kernel: Compile,
    shape: tuple[int, int, int],
    options: Sequence[str],
    dtype: torch.dtype,
    target: int,
) -> None:
    assert_good(compile_attention(compile_kernel, shape, dtype, target, options), dtype, target)


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_many_query_heads_of_one_kv_head(compile_kernel: Compile, target: int) -> None:
    compiled = compile_attention(compile_kernel, (71, 1, 64), torch.float16, target)
    assert (compiled.stack, compiled.local) == (0, 0)
    assert compiled.shared <= SHARED_LIMITS[target]
    assert compiled.count(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma") >= 4


def test_what_a_model_does_without_costs_nothing(compile_kernel: Compile) -> None:
    plain = compile_attention(compile_kernel, (9, 3, 64), torch.float16, 80)
    capped = compile_attention(compile_kernel, (9, 3, 64), torch.float16, 80, ("softcap",))
    exponentials, divisions = r"ex2\.approx", r"div\.full"
    assert 0 < plain.count(exponentials) < capped.count(exponentials)
    assert 0 < plain.count(divisions) < capped.count(divisions)
    # Nor does the kernel without options take their arguments.
    with_all = compile_attention(compile_kernel, (9, 3, 64), torch.float16, 80, OPTIONS)
    assert with_all.count(r"\.param \.") == plain.count(r"\.param \.") + len(OPTIONS)


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("dtype", TYPES, ids=TYPES.get)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 64), (8, 128), (32, 80)])
def test_kv_write(
    compile_kernel: Compile, num_kv_heads: int, head_dim: int, dtype: torch.dtype, target: int
) -> None:
    from tidemill_kernels.kv_write_triton import launch_constants, write_kernel

    kv_cache = torch.empty(1, 1, 2, num_kv_heads, 16, head_dim, dtype=dtype)
    compiled = compile_kernel(
        write_kernel,
        {name: TYPES[dtype] for name in ("key_ptr", "value_ptr", "kv_cache_ptr")} | {"slots_ptr": "i64"},
        {"num_layers": "i32", "layer": "i32"},
        launch_constants(kv_cache),
        target,
    )
    assert (compiled.stack, compiled.local) == (0, 0)
    assert compiled.count(r"st\.global\.v[24]\.b32") >= 2
    assert compiled.count(r"st\.global\.b(8|16|32) ") == 0

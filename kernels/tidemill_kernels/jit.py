"""numba's decorators with types, and the two things its language lacks: raw addresses and atomics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Generator = Callable[[Any, ir.IRBuilder, Any, tuple[ir.Value, ...]], ir.Value | None]


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile at the first call, without the GIL and without checks; kept on disk.

    For functions that call nothing of ours: the copy on disk is renewed only when their own file
    has changed.
    """
    return cast(Callable[P, R], _kept(njit, nogil=True)(function))


class Native(Protocol):
    """A function that C can call at `address`, for as long as this object lives."""

    @property
    def address(self) -> int: ...


def compile_native(signature: Any, function: Callable[..., object]) -> Native:
    """Compile now, as a function that C can call; kept on disk.

    What `function` is made of besides its own file must be named by a `digest` that it captures.
    """
    return cast(Native, _kept(cfunc, signature)(function))


def _kept(decorator: Any, *args: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """The decorator with its copies on disk, or without them where no folder can be written."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return decorator(*args, cache=True, error_model="numpy", **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            return decorator(*args, error_model="numpy", **options)(function)

    return decorate


def part(function: Callable[P, R]) -> Callable[P, R]:
    """Compile as a part of each compiled function that calls it."""
    return cast(Callable[P, R], njit(error_model="numpy")(function))


def emitted(function: Callable[Concatenate[Any, P], tuple[Any, Generator]]) -> Callable[P, Any]:
    """An instruction of our own: `function` gives its signature and the generator of its code."""
    return cast(Callable[P, Any], intrinsic(function))


def digest(*modules: ModuleType) -> int:
    """A number that changes with the source of the modules.

    A function that captures it is compiled anew when one of them has changed: numba's copy on disk
    is filed under the captured values.
    """
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    return int.from_bytes(hashlib.blake2b(sources, digest_size=7).digest())


@emitted
def pointer(typing_context: Any, address: Any, item: Any) -> tuple[Any, Generator]:
    """The integer `address` as a pointer to items of the type `item`."""
    signature = types.CPointer(item.dtype)(address, item)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, generate


@emitted
def take(typing_context: Any, counter: Any) -> tuple[Any, Generator]:
    """Add one to the integer at `counter`, which threads share; returns what it was."""
    signature = types.int64(counter)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return signature, generate

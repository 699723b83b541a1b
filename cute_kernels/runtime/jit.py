"""Compiling CuTe kernels without data, from fake tensors whose sizes and strides are symbols.

One compiled function serves every length. It takes torch tensors and runs on torch's current stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

import cutlass
import cutlass.cute as cute
import torch

from cute_kernels.runtime import disk_cache
from cute_kernels.runtime.compiling import once
from cute_kernels.runtime.device import VECTOR_BYTES, positional
from cute_kernels.runtime.replay import launch

P = ParamSpec("P")

CUTE_DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
    torch.int8: cutlass.Int8,
}

VECTOR = VECTOR_BYTES // 2
"""16-bit elements of one memory access."""
FLOATS = VECTOR_BYTES // 4
"""fp32 numbers of one memory access."""

OPTIONS = "--enable-tvm-ffi"

COMPILED: list[str] = []
"""Kernels that this process has compiled, in order; FlashAttention-4's by their stage (fa4/launch.py)."""

SLOW = 3.0
"""Seconds of compiling after which a message says so."""

REMEMBERING: list[Any] = []
"""Functions decorated with `compiled_once`, of all imported modules."""


class Kernel(NamedTuple):
    """A compiled kernel."""

    compiled: Any
    start: Callable[..., None]
    """As `run`, of which a recording knows nothing (replay.py)."""

    def run(self, *arguments: Any) -> None:
        """Launch with torch tensors and numbers, without the stream."""
        launch(self.start, *arguments)


_LOG = logging.getLogger("nsa_kernels")
_spent = 0.0
"""Seconds that this process has compiled for."""


@contextmanager
def told_if_slow() -> Iterator[None]:
    """Around a compilation, with COMPILING held: logs one line when all of them have taken more than SLOW seconds."""
    global _spent
    where = disk_cache.folder()
    kept = f"keeps them in {where} (0 turns that off)" if where else "is 0: they are not kept for later processes"
    begin, before = time.monotonic(), _spent
    try:
        yield
    finally:
        _spent += time.monotonic() - begin
        if before <= SLOW < _spent:
            _LOG.warning("compiling CUDA kernels, up to a minute; %s %s", disk_cache.VARIABLE, kept)


def compile_kernel(kernel: Callable[..., Any], *arguments: Any) -> Kernel:
    """Compile a `cute.jit` callable whose last parameter is the stream."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    with told_if_slow():
        compiled = cute.compile(kernel, *arguments, stream, options=OPTIONS)
    COMPILED.append(type(kernel).__name__)
    return Kernel(compiled, positional(compiled))


def compiled_once(build: Callable[P, Kernel]) -> Callable[P, Kernel]:
    """Remember what a function compiles for its arguments: in this process, and on disk unless disk_cache.py is off.

    Threads that call it at once wait for one of them. `repr` of the arguments must tell them apart.
    """

    @once
    @wraps(build)
    def remembered(*arguments: P.args, **keywords: P.kwargs) -> Kernel:
        where = disk_cache.folder()
        if where is None:
            return build(*arguments, **keywords)
        asked = f"{build.__module__}.{build.__qualname__} {arguments!r} {sorted(keywords.items())!r}"
        key = disk_cache.key_of(asked, options=OPTIONS)
        compiled = disk_cache.load_or_make(where, key, lambda: build(*arguments, **keywords).compiled)
        return Kernel(compiled, positional(compiled))

    REMEMBERING.append(remembered)
    return remembered


def num_compiled() -> int:
    """Kernels that this process has compiled or loaded from disk. A call that raises the number has waited for one."""
    return sum(function.cache_info().currsize for function in REMEMBERING)


def fake(dtype: torch.dtype, *shape: Any, aligned: bool = True) -> Any:
    """A tensor to compile with: None in `shape` is any size; any strides (64 bits), the last dimension contiguous.

    `aligned`: the tensor starts, and each row starts, at a multiple of VECTOR_BYTES.
    """
    element = CUTE_DTYPES[dtype]
    divisor = VECTOR_BYTES * 8 // element.width if aligned else 1
    sizes = tuple(cute.sym_int() if size is None else size for size in shape)
    strides = (*(cute.sym_int64(divisibility=divisor) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(element, sizes, stride=strides, assumed_align=divisor * element.width // 8)

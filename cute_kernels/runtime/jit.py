"""Compiling CuTe kernels without data, from fake tensors whose sizes and strides are symbols.

One compiled function serves every length. It accepts torch tensors and runs on torch's current stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, wraps
from typing import Any, ParamSpec, cast

import cutlass
import cutlass.cute as cute
import torch

from cute_kernels.runtime import disk_cache
from cute_kernels.runtime.compiling import COMPILING
from cute_kernels.runtime.device import VECTOR_BYTES, positional
from cute_kernels.runtime.launches import THREAD

P = ParamSpec("P")

CUTE_DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
    torch.int8: cutlass.Int8,
}

VECTOR = VECTOR_BYTES // 2
"""16-bit elements per memory access."""
FLOATS = VECTOR_BYTES // 4
"""fp32 elements per memory access."""

OPTIONS = "--enable-tvm-ffi"

COMPILED: list[str] = []
"""Kernels that this process has compiled, in order."""

SLOW = 3.0
"""Seconds of compiling after which a message is logged."""

REMEMBERING: list[Any] = []
"""Functions decorated with `compiled_once`, in all imported modules."""

_KERNELS: list[Kernel] = []
"""All kernels that these functions have returned."""


class Kernel:
    """A kernel, compiled or loaded from disk when it is first launched."""

    def __init__(self, build: Callable[..., Any], arguments: tuple[Any, ...] = (), keywords: Any = None) -> None:
        """Args: build: compiles the kernel from arguments and keywords, whose `repr` must identify it."""
        self.build, self.arguments, self.keywords = build, arguments, keywords or {}

    @property
    def name(self) -> str:
        """Name, the same in every process."""
        build = self.build
        return f"{build.__module__}.{build.__qualname__} {self.arguments!r} {sorted(self.keywords.items())!r}"

    @cached_property
    def compiled(self) -> Any:
        with COMPILING:
            return self.__dict__.get("compiled") or self._compile()

    def _compile(self) -> Any:
        def make() -> Any:
            return self.build(*self.arguments, **self.keywords)

        where = disk_cache.folder()
        if where is None:
            return make()
        return disk_cache.load_or_make(where, disk_cache.key_of(self.name, options=OPTIONS), make)

    @cached_property
    def start(self) -> Callable[..., None]:
        """Like `run`, but bypass listeners to this thread's launches."""
        return positional(self.compiled)

    def run(self, *arguments: Any) -> None:
        """Launch with torch tensors and numbers, without the stream."""
        listener = THREAD.listener
        if listener is None:
            self.start(*arguments)
        else:
            listener.launch(self, arguments)

    def compile_ahead(self) -> None:
        """Compile now, for launches by calls of other lengths, so that they need not wait."""
        listener = THREAD.listener
        if listener is None:
            _ = self.start
        else:
            listener.compile_ahead(self)


_LOG = logging.getLogger("nsa_kernels")
_spent = 0.0
"""Seconds that this process has spent compiling."""


@contextmanager
def told_if_slow() -> Iterator[None]:
    """Wrap a compilation, with COMPILING held: log one line when all of them together exceed SLOW seconds."""
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


def compile_kernel(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """Compile a `cute.jit` callable whose last parameter is the stream."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    with told_if_slow():
        compiled = cute.compile(kernel, *arguments, stream, options=OPTIONS)
    COMPILED.append(type(kernel).__name__)
    return compiled


def compiled_once(build: Callable[P, Any]) -> Callable[P, Kernel]:
    """Decorate `compile` of a kernel's class to return a `Kernel`, the same one for the same arguments.

    It is compiled when it is first launched, once per process, whichever threads launch it, and stored on disk unless
    disk_cache.py is off. The arguments must differ in `repr`. A compilation that raises is not cached: the next launch
    tries again.
    """

    @cache
    @wraps(build)
    def remembered(*arguments: P.args, **keywords: P.kwargs) -> Kernel:
        kernel = Kernel(build, arguments, keywords)
        _KERNELS.append(kernel)
        return kernel

    remembered.build = build  # type: ignore[attr-defined]
    REMEMBERING.append(remembered)
    return cast("Callable[P, Kernel]", remembered)


def num_compiled() -> int:
    """Number of kernels that this process has compiled or loaded. A call that increases it has waited for one."""
    return sum("compiled" in vars(kernel) for kernel in list(_KERNELS))


def fake(dtype: torch.dtype, *shape: Any, aligned: bool = True) -> Any:
    """A tensor to compile with: None in `shape` is any size; any strides (64 bits), the last dimension contiguous.

    If `aligned`, the tensor and each of its rows start at a multiple of VECTOR_BYTES.
    """
    element = CUTE_DTYPES[dtype]
    divisor = VECTOR_BYTES * 8 // element.width if aligned else 1
    sizes = tuple(cute.sym_int() if size is None else size for size in shape)
    strides = (*(cute.sym_int64(divisibility=divisor) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(element, sizes, stride=strides, assumed_align=divisor * element.width // 8)


def fake_heads(dtype: torch.dtype, *dims: int) -> list[Any]:
    """Tensors [B, N, H, D] to compile with, one for each D of `dims`."""
    return [fake(dtype, None, None, None, dim) for dim in dims]


def fake_stats(count: int) -> list[Any]:
    """fp32 tensors [B, H, N] to compile with, such as lse and delta."""
    return [fake(torch.float32, None, None, None, aligned=False) for _ in range(count)]

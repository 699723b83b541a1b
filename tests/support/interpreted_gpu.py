"""A GPU that interprets: cute_kernels' and FlashAttention-4's host code and kernels run on CPU tensors.

All Python is real, and so are the kernels that it chooses: their host side and their PTX (tests/ptx/).
Only what asks a driver is answered here: capability, multiprocessors, whether a tensor is on a GPU, and whether there
is one, so that `nsa(..., backend="cute")` takes CPU tensors. Launches run one after the other, so side streams do
nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from cute_kernels import support
from cute_kernels.runtime.device import TARGET_VARIABLE, compute_capability, has_warpgroups, multiprocessors
from tests.ptx.compiled import LATE, Schedule
from tests.support.interpreted_kernels import interpret_kernels

MODULES = ("backward", "block_sparse", "decoding", "forward", "neighborhood", "select.block_max")
"""Of cute_kernels, which import all others."""


class Gpu(NamedTuple):
    target: str
    """CuTe DSL's name of the architecture."""
    multiprocessors: int


GPUS = {"sm_90": Gpu("sm_90a", 132), "sm_100": Gpu("sm_100a", 148)}


@contextmanager
def interpreted_gpu(arch: str, schedule: Schedule = LATE) -> Iterator[None]:
    """Inside, calls with CPU tensors run as on a GPU of GPUS."""
    gpu = GPUS[arch]
    for name in MODULES:
        importlib.import_module(f"cute_kernels.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TARGET_VARIABLE, gpu.target)
        patch.setattr(Tensor, "is_cuda", True)
        patch.setattr(support, "_machine_problem", lambda call, *, given=False: None)
        _replace(patch, has_warpgroups, lambda _: arch == "sm_90")
        _replace(patch, multiprocessors, lambda _: gpu.multiprocessors)
        ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "cute_kernels"]
        interpret_kernels(patch, ours, gpu.target, schedule)
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    """What cute_kernels remembers of a device."""
    compute_capability.cache_clear()
    sys.modules["cute_kernels.decoding"].plan.cache_clear()


def _replace(patch: pytest.MonkeyPatch, old: Any, new: Any) -> None:
    """In every module of cute_kernels that has it."""
    for module_name, module in [*sys.modules.items()]:
        if module is not None and module_name.partition(".")[0] == "cute_kernels":
            for name in [name for name, value in vars(module).items() if value is old]:
                patch.setattr(module, name, new)


def interpreted(values: Iterable[Any], *names: str) -> Callable[[Any], Any]:
    """Parameters of a test with the fixture `interpreted` (tests/cute/conftest.py): its own, and those of `names`."""
    mark = pytest.mark.parametrize(", ".join(["interpreted", *names]), values, indirect=["interpreted"])
    return lambda test: pytest.mark.usefixtures("interpreted")(mark(test))

"""A GPU that interprets: cute_kernels' and FlashAttention-4's host code and kernels run on CPU tensors.

All Python is real, and so are the kernels that it chooses: their host side and their PTX (tests/support/ptx/).
Only what asks a driver is answered here: capability, multiprocessors, whether a tensor is on a GPU, and whether there
is one, so that `nsa(..., backend="cute")` takes CPU tensors. Launches run one after the other, so side streams do
nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels import decoding, support
from cute_kernels.runtime.device import TARGET_VARIABLE, compute_capability, has_warpgroups, multiprocessors
from tests.support.ptx.compiled import LATE, Artefacts, Interpreted, Schedule, compiling, interpret_kernels, kept

MODULES = ("backward", "decoding", "forward", "neighborhood")
"""Of cute_kernels, which import all others."""
CACHES = ("_flash_attn_fwd", "_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert")
"""Functions of FlashAttention-4 that keep compiled kernels."""


class Gpu(NamedTuple):
    target: str
    """CuTe DSL's name of the architecture."""
    capability: int
    multiprocessors: int


GPUS = {"sm_90": Gpu("sm_90a", 90, 132), "sm_100": Gpu("sm_100a", 100, 148)}


@contextmanager
def interpreted_gpu(arch: str, schedule: Schedule = LATE) -> Iterator[None]:
    """Inside, calls with CPU tensors run as on a GPU of GPUS."""
    gpu = GPUS[arch]
    for name in MODULES:
        importlib.import_module(f"cute_kernels.{name}")
    with pytest.MonkeyPatch.context() as patch:
        _answer_for_the_driver(patch, gpu)
        ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "cute_kernels"]
        interpret_kernels(patch, ours, gpu.target, schedule)
        fa4 = _Fa4(gpu, schedule)
        fa4.replace_caches(patch)
        _forget()
        try:
            with compiling(gpu.target, fa4.compile):
                yield
        finally:
            _forget()


def _forget() -> None:
    """What cute_kernels remembers of a device."""
    compute_capability.cache_clear()
    decoding.plan.cache_clear()


def _answer_for_the_driver(patch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    patch.setenv(TARGET_VARIABLE, gpu.target)
    patch.setenv("FLASH_ATTENTION_NUM_SMS", str(gpu.multiprocessors))
    patch.setattr(Tensor, "is_cuda", True)
    patch.setattr(support, "_machine_problem", lambda call, *, given=False: None)
    _replace(patch, "cute_kernels", has_warpgroups, lambda _: gpu.capability == 90)
    _replace(patch, "cute_kernels", multiprocessors, lambda _: gpu.multiprocessors)


def _replace(patch: pytest.MonkeyPatch, package: str, old: Any, new: Any) -> None:
    """In every module of a package that has it."""
    for module_name, module in [*sys.modules.items()]:
        if module is not None and module_name.partition(".")[0] == package:
            for name in [name for name, value in vars(module).items() if value is old]:
                patch.setattr(module, name, new)


class _Fa4:
    """FlashAttention-4's caches: its Python looks a kernel up, and compiles it where PTX_CACHE does not have it."""

    def __init__(self, gpu: Gpu, schedule: Schedule) -> None:
        self.gpu, self.schedule = gpu, schedule
        self.asked = ""
        """The kernel that was not known, which is compiled next."""

    def replace_caches(self, patch: pytest.MonkeyPatch) -> None:
        import cutlass.utils
        from flash_attn.cute import cute_dsl_utils, interface, tile_scheduler, utils

        from cute_kernels.fa4 import launch

        for name in CACHES:
            patch.setattr(getattr(interface, name), "compile_cache", _Cache(self, name))
        for name in ("_FORWARD", "_BACKWARD"):
            patch.setattr(launch, name, {})
        patch.setattr(interface, "_get_device_arch", lambda: self.gpu.capability)
        for module in (cutlass.utils, cutlass.utils.hardware_info, tile_scheduler):
            patch.setattr(module, "HardwareInfo", self.hardware)
        for module in (cute_dsl_utils, utils):
            patch.setattr(module, "from_dlpack", _from_gpu(module.from_dlpack))

    def hardware(self, device_id: int = 0) -> _Hardware:
        return _Hardware(self.gpu)

    def compile(self, make: Callable[[], Artefacts]) -> Interpreted:
        """In place of cute.compile."""
        from flash_attn.cute import cute_dsl_utils

        cute_dsl_utils.get_max_active_clusters.cache_clear()
        facts = (self.gpu, _versions(), self.asked)
        if not self.asked or " at 0x" in self.asked:
            raise ValueError(f"no name that lasts for what FlashAttention-4 compiles: {self.asked!r}")
        key, self.asked = hashlib.sha256(repr(facts).encode()).hexdigest(), ""
        return Interpreted(kept(key, make), self.schedule)


class _Cache:
    def __init__(self, fa4: _Fa4, name: str) -> None:
        self.fa4, self.name = fa4, name
        self.cache: dict[Any, Any] = {}

    def __contains__(self, key: Any) -> bool:
        if key not in self.cache:
            self.fa4.asked = f"{self.name} {key!r}"
        return key in self.cache

    def __getitem__(self, key: Any) -> Any:
        return self.cache[key]

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.cache[key] = kernel


class _Hardware:
    """In place of cutlass.utils.HardwareInfo."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def get_device_multiprocessor_count(self) -> int:
        return self.gpu.multiprocessors

    def get_max_active_clusters(self, cluster_size: int) -> int:
        return self.gpu.multiprocessors // cluster_size


def _from_gpu(from_dlpack: Callable[..., Any]) -> Callable[..., Any]:
    """CuTe DSL's view of a tensor like the given one on a GPU, which it compiles for."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def view(x: Tensor, **how: Any) -> Any:
        with FakeTensorMode():
            like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        return from_dlpack(like, **how)

    return view


@cache
def _versions() -> tuple[object, ...]:
    """What FlashAttention-4's kernels depend on beside its own keys, in which sources of mask_mods are hashed."""
    from flash_attn.cute.cache_utils import _compute_source_fingerprint

    from cute_kernels.fa4 import interface
    from cute_kernels.runtime import disk_cache

    masks = hashlib.sha256(Path(interface.__file__).read_bytes()).hexdigest()
    return _compute_source_fingerprint(), masks, sorted(disk_cache._versions().items())

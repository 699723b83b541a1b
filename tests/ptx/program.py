"""A kernel as it runs: its instructions, decoded when they are first reached, and launches of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

# Families of instructions register what they decode
from tests.ptx import arithmetic, bulk, mbarrier, memory, tcgen05, warp_mma, warps, wgmma  # noqa: F401
from tests.ptx.cluster import Cluster
from tests.ptx.decode import Run, decode
from tests.ptx.launch import Launch
from tests.ptx.listing import Listing
from tests.ptx.memory import Storage
from tests.ptx.observer import Observer
from tests.ptx.registers import Made

SHARED_BYTES = 227 << 10


class Program(Listing):
    """A kernel."""

    def __init__(self, ptx: str) -> None:
        super().__init__(ptx)
        self.code = Made(self._decode)
        """By index, what runs an instruction."""

    def _decode(self, at: int) -> Run:
        if at >= len(self.instructions):
            raise RuntimeError("threads run past the last instruction")
        return decode(self, self.instructions[at])

    def launch(
        self,
        launch: Launch,
        tensors: Sequence[Tensor | None],
        late: bool = True,
        ahead: slice = slice(0),
        observer: Observer | None = None,
    ) -> None:
        """Args: all tensors that the kernel may use; when operations end; the threads of a CTA that go ahead."""
        self.check(launch)
        clusters = [n // of for n, of in zip(launch.grid, launch.cluster, strict=True)]
        cluster = Cluster(self, launch, storages_of(tensors), late, ahead, observer or Observer())
        for place in np.ndindex(*clusters[::-1]):
            cluster.run(place[::-1])

    def check(self, launch: Launch) -> None:
        """Raises ValueError for a launch that is not this kernel's, or that a driver refuses."""
        if launch.kernel != self.name:
            raise ValueError(f"a launch of {launch.kernel}, not of {self.name}")
        if launch.block != self.block:
            raise ValueError(f"a block of {launch.block} threads, the kernel requires {self.block}")
        sizes = [len(argument) for argument in launch.arguments]
        if sizes != self.parameter_sizes:
            raise ValueError(f"arguments of {sizes} bytes, the kernel's parameters have {self.parameter_sizes}")
        if not 0 <= launch.shared_bytes <= SHARED_BYTES:
            raise ValueError(f"shared_bytes is {launch.shared_bytes}, at most {SHARED_BYTES}")
        if min(launch.grid) < 1 or any(n % of for n, of in zip(launch.grid, launch.cluster, strict=True)):
            raise ValueError(f"a grid of {launch.grid} in clusters of {launch.cluster}")
        for tensor_map in launch.tensor_maps:
            tensor_map.check()


def storages_of(tensors: Sequence[Tensor | None]) -> list[Storage]:
    """The memory of tensors, each once."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x is not None and x.numel() > 0}
    return [
        Storage(start, np.ctypeslib.as_array((ctypes.c_uint8 * s.nbytes()).from_address(start)))
        for start, s in found.items()
    ]

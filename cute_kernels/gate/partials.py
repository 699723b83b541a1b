"""Sums of fp32 partials written by several CTAs, in a fixed order: bitwise reproducible.

    sum[i] = sum_p partials[p, i]

A CTA sums 128 elements. Each of its warps reads every WARPS-th partial, a 16-byte vector per lane; then the first warp
sums the results of all warps.

Floor: every partial is read once. 32 of the gates' projection, 8 heads of 128: 0.4 MB. PyTorch's sum would do as well,
but may allocate, which launches of a CUDA graph must not (runtime/graphs.py).

Limits: a multiple of 4 elements.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, range_constexpr
from torch import Tensor

from cute_kernels.mma.warp import LANES
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import FLOATS, Kernel, compile_kernel, compiled_once, fake

WARPS = 8

UNROLLED = 4
"""Number of partials that a thread loads together."""


class AddPartials:
    """Sum of 128 elements per CTA."""

    @staticmethod
    @compiled_once
    def compile() -> Kernel:
        return compile_kernel(AddPartials(), fake(torch.float32, None, None), fake(torch.float32, None))

    @cute.jit
    def __call__(
        self,
        mPartials: cute.Tensor,  # fp32 [partials, numbers]
        mSum: cute.Tensor,  # fp32 [numbers]
        stream: Any,
    ):
        self.kernel(mPartials, mSum).launch(
            grid=[cute.ceil_div(mSum.shape[0], LANES * FLOATS), 1, 1], block=[WARPS * LANES, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mPartials: cute.Tensor, mSum: cute.Tensor):
        cta, _, _ = cute.arch.block_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        column = cta * LANES + lane  # index of the lane's vector
        exists = column < mSum.shape[0] // FLOATS
        rSum = cute.make_rmem_tensor(FLOATS, Float32)
        rPartial = cute.make_rmem_tensor(FLOATS, Float32)
        rSum.fill(0.0)
        if exists:
            for p in cutlass.range(warp, mPartials.shape[0], WARPS, unroll=UNROLLED):
                cute.autovec_copy(cute.local_tile(mPartials[p, None], (FLOATS,), (column,)), rPartial)
                rSum.store(rSum.load() + rPartial.load())
        smem = SmemAllocator()
        sSums = smem.allocate_tensor(Float32, cute.make_layout((FLOATS, LANES, WARPS)), 16)
        cute.autovec_copy(rSum, sSums[None, lane, warp])
        cute.arch.sync_threads()
        if (warp == 0) & exists:
            for i in range_constexpr(1, WARPS):
                cute.autovec_copy(sSums[None, lane, i], rPartial)
                rSum.store(rSum.load() + rPartial.load())
            cute.autovec_copy(rSum, cute.local_tile(mSum, (FLOATS,), (column,)))


def sum_partials(partials: Tensor) -> Tensor:
    """Sum fp32 partials `[partials,...]` over the first dimension; each contiguous, with at least one element."""
    if len(partials) == 1:
        return partials[0]
    rows = partials.flatten(1)
    total = torch.empty((rows.shape[1],), dtype=torch.float32, device=partials.device)
    AddPartials.compile().run(rows, total)
    return total.view(partials.shape[1:])

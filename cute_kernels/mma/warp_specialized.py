"""Warp specialization on Hopper: a producer warpgroup that issues TMA, and two consumer warpgroups that issue WGMMA.

Warpgroup 0 is the producer and releases registers; warpgroups 1 and 2 are the consumers and acquire them. Pipelines
between them are those of wgmma.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

from cute_kernels.mma.mma_sync import QUAD
from cute_kernels.mma.warp import LANES
from cute_kernels.mma.wgmma import WARPGROUP_THREADS

CONSUMERS = 2
"""Number of consumer warpgroups; one more warpgroup is the producer."""

THREADS = (CONSUMERS + 1) * WARPGROUP_THREADS
WARPGROUP_WARPS = WARPGROUP_THREADS // LANES

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
"""Registers per thread."""


class Consumer(NamedTuple):
    """Thread of a consumer warpgroup."""

    warpgroup: Int32
    """0 ... CONSUMERS - 1."""
    thread: Int32
    """Index in its warpgroup."""
    warp: Int32
    """Index in the CTA."""


def consumer_of(thread: Int32, warp: Int32) -> Consumer:
    """Args: thread, warp: indices in the CTA."""
    return Consumer(warp // WARPGROUP_WARPS - 1, thread % WARPGROUP_THREADS, warp)


@cute.jit
def accumulator_row(consumer: Consumer, r: cutlass.Constexpr[int]) -> Int32:
    """Index of the r-th of the thread's two rows in its warpgroup's tile."""
    return consumer.warp % WARPGROUP_WARPS * 16 + 8 * r + cute.arch.lane_idx() // QUAD


def producer_state(stages: int) -> Any:
    """Initial pipeline state of a producer: all stages are empty."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int) -> Any:
    """Initial pipeline state of a consumer: no stage is full."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)

"""Warp specialization on Hopper: a producer warpgroup that issues TMA, and two consumer warpgroups that issue WGMMA.

Warpgroup 0 is the producer and gives registers back; warpgroups 1 and 2 are the consumers and take them. Pipelines
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
"""Consumer warpgroups; one more warpgroup is the producer."""

THREADS = (CONSUMERS + 1) * WARPGROUP_THREADS
WARPGROUP_WARPS = WARPGROUP_THREADS // LANES

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
"""Of a thread."""


class Consumer(NamedTuple):
    """A thread of the consumers."""

    warpgroup: Int32
    """0 ... CONSUMERS - 1."""
    thread: Int32
    """Of its warpgroup."""
    warp: Int32
    """Of the CTA."""


def consumer_of(thread: Int32, warp: Int32) -> Consumer:
    """Args: thread and warp of the CTA."""
    return Consumer(warp // WARPGROUP_WARPS - 1, thread % WARPGROUP_THREADS, warp)


@cute.jit
def accumulator_row(consumer: Consumer, r: cutlass.Constexpr[int]) -> Int32:
    """The r-th of the thread's two rows of its warpgroup's tile."""
    return consumer.warp % WARPGROUP_WARPS * 16 + 8 * r + cute.arch.lane_idx() // QUAD


def producer_state(stages: int) -> Any:
    """Where a producer begins: all stages are empty."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int) -> Any:
    """Where a consumer begins: no stage is full."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)

"""Small kernels written by hand, for tests of the machine itself."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.ptx.launch import MAP_BYTES, Launch, TensorMap, blob
from tests.ptx.observer import Observer
from tests.ptx.program import SHARED_BYTES, Program

KERNEL = """
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel(
{parameters}
)
.reqntid {threads}, 1, 1
{{
    .reg .pred %p<16>;
    .reg .b16 %rs<16>;
    .reg .b32 %r<600>;
    .reg .b64 %rd<64>;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, smem;
    ld.param.b64 %rd0, [kernel_param_0];
    mad.lo.s32 %r3, %r1, {threads}, %r0;
    mul.wide.s32 %rd1, %r3, {row};
    add.s64 %rd2, %rd0, %rd1;
    {body}
    ret;
}}
"""
"""%r0 is the thread, %r1 the CTA, %r2 shared memory, %rd2 the thread's row of the result."""
WAIT = """
    {{
        .reg .pred P1;
        LAB_WAIT:
        mbarrier.try_wait.parity.shared.b64 P1, [%r10{at}], {parity}, 10000000;
        @P1 bra.uni DONE;
        bra.uni LAB_WAIT;
        DONE:
    }}
"""
KINDS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def wait(parity: int, at: str = "") -> str:
    """For a phase of the mbarrier at %r10."""
    return WAIT.format(parity=parity, at=at)


class Mapped(NamedTuple):
    """A tensor that a kernel copies by TMA."""

    tensor: Tensor
    box: tuple[int, ...]
    """The last dimension of the tensor first."""
    swizzle: int = 0

    @property
    def map(self) -> TensorMap:
        x = self.tensor
        strides = tuple(n * x.element_size() for n in x.stride()[::-1])
        return TensorMap(
            x.data_ptr(), x.element_size(), KINDS[x.dtype], tuple(x.shape[::-1]), strides, self.box, self.swizzle
        )


def program(body: str, parameters: Sequence[str] = (".u64",), threads: int = 32, columns: int = 1) -> Program:
    """Args: `parameters`, types, or sizes in bytes."""
    declared = [
        f".param .align 64 .b8 kernel_param_{i}[{kind}]" if kind.isdigit() else f".param {kind} kernel_param_{i}"
        for i, kind in enumerate(parameters)
    ]
    text = KERNEL.format(parameters=",\n".join(declared), threads=threads, row=4 * columns, body=body)
    return Program(text)


def run(
    body: str,
    *given: Tensor | Mapped,
    columns: int = 1,
    threads: int = 32,
    cluster: int = 1,
    late: bool = True,
    observer: Observer | None = None,
) -> Tensor:
    """What each thread of a cluster has stored in its row: int32 `[threads, columns]`, at first -1.

    Args:
        given: parameters from the second on: addresses of tensors, and tensor maps.
    """
    out = torch.full((cluster * threads, columns), -1, dtype=torch.int32)
    arguments, maps, kinds, tensors = [struct.pack("<Q", out.data_ptr())], [], [".u64"], [out]
    for x in given:
        if isinstance(x, Mapped):
            arguments.append(blob(len(maps)))
            maps.append(x.map)
            kinds.append(str(MAP_BYTES))
        else:
            arguments.append(struct.pack("<Q", x.data_ptr()))
            kinds.append(".u64")
        tensors.append(x.tensor if isinstance(x, Mapped) else x)
    launch = Launch("kernel", arguments, (cluster, 1, 1), (threads, 1, 1), (cluster, 1, 1), SHARED_BYTES, maps)
    program(body, kinds, threads, columns).launch(launch, tensors, late, observer=observer)
    return out

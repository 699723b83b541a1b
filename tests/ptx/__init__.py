"""An interpreter of PTX for tests: executes compiled CUDA kernels on a CPU and finds races (README.md).

    with compiling(arch, lambda make: Interpreted(make())):    # of CuTe DSL: its host side by host.py, its PTX
        cute.compile(function, ...)(tensors, numbers)
    Program(ptx).launch(Launch, tensors)                       # any kernel

Clusters of CTAs run one after the other. Of a CTA's threads those with the lowest program counter run together, in
NumPy, so that threads which diverge meet again as on a GPU; barriers make them wait for each other. Where warps have
different roles, some may go ahead of the others as far as barriers let them (`ahead`). An asynchronous operation ends
as late as it may, when it is waited for, or at once (`late`): a kernel must be right both ways. Modules of cp.async,
WGMMA, TMA and tcgen05 say what late means for each. A register holds what an instruction last wrote, at first 0xAB in
each byte; shared memory and TMEM begin as NaN in every type.

Errors are raised for accesses outside the tensors that a kernel was given, misaligned accesses, two lanes that write
different values to one address together, shuffles from lanes that do not take part, instructions of a warp or of one
thread that others run, TMEM that is not allocated, not freed or another quarter's, mbarriers with more arrivals than
they count, threads that wait for each other, and reads of unwritten global memory (whole words that hold the NaN with
which PyTorch fills `torch.empty`, as it does in tests and under torch.use_deterministic_algorithms). An `Observer` adds
checks of its own: `Order` finds races.

Instructions, modifiers and descriptors that are not implemented raise NotImplementedError.

Limits of use: an instrument for tests of kernels meant for NVIDIA GPUs, never a way to run them elsewhere, and no part
of the package. It reads PTX and IR that CuTe DSL writes by its documented options alone. NVIDIA's binaries are neither
disassembled nor replaced, and no output is translated for another platform. Of the NVIDIA Software License Agreement
that comes with nvidia-cutlass-dsl 4.8.1, section 2, "You may not":

    "2.3. Reverse engineer, decompile, or disassemble the Software components provided in binary form, nor attempt in
    any other manner to obtain source code of such Software;"
    "2.10. Replace any NVIDIA software components in the Software that are governed by this Agreement with other
    software that implements NVIDIA APIs;"
    "2.11. Reverse engineer, decompile or disassemble any portion of the output generated using Software elements for
    the purpose of translating such output artifacts to target a non-NVIDIA platform;"
"""

from tests.ptx.compiled import Interpreted, Launched, Schedule, compiling
from tests.ptx.host import launches_of
from tests.ptx.launch import Launch, TensorMap
from tests.ptx.observer import Observer, Operation, Region
from tests.ptx.order import Order
from tests.ptx.program import Program
from tests.ptx.values import bf16_bits, bf16_numbers, product

__all__ = [
    "Interpreted",
    "Launch",
    "Launched",
    "Observer",
    "Operation",
    "Order",
    "Program",
    "Region",
    "Schedule",
    "TensorMap",
    "bf16_bits",
    "bf16_numbers",
    "compiling",
    "launches_of",
    "product",
]

"""A machine that runs the PTX of CuTe kernels where no GPU is: for tests.

    interpret(compiled function)(tensors, numbers)      a kernel of ours: its host side by host.py, its PTX
    Program(ptx).launch(Launch, tensors)                any kernel

One cluster of CTAs after the other. Of a CTA's threads those with the lowest program counter run together, in NumPy;
threads that diverge so meet again as on a GPU, and wait for each other at barriers. Where warps have different parts,
some may go ahead of all others as far as barriers let them (`ahead`). What is asynchronous ends as late as it may, when
somebody waits for it, or at once: a kernel must bear both (`late`; which modules say what that means for cp.async,
WGMMA, TMA and tcgen05). Registers hold what an instruction last wrote, at first 0xAB in each byte; shared memory and
TMEM begin as NaN in every type.

Found are: accesses outside of the tensors that a kernel was given, misaligned ones, two lanes that write different
values to one address together, shuffles from lanes that do not take part, instructions of a warp or of one thread that
others run, reads of global memory that nobody wrote, by the NaN that `torch.empty` holds in tests, TMEM that is not
allocated, not freed or another quarter's, mbarriers with more arrivals than they count, and threads that wait for each
other. With an `Observer`, whatever it looks for: races, in order.py. Not found: what ptxas makes of all this.

Instructions, modifiers and descriptors that are not here raise NotImplementedError.

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

from tests.support.ptx.compiled import PTX_CACHE, Launched, Schedule, interpret, interpret_kernels
from tests.support.ptx.host import launches_of
from tests.support.ptx.launch import Launch
from tests.support.ptx.observer import Observer, Operation, Region
from tests.support.ptx.order import Order
from tests.support.ptx.program import Program
from tests.support.ptx.tensor_map import TensorMap
from tests.support.ptx.values import bf16_bits, bf16_numbers, product

__all__ = [
    "PTX_CACHE",
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
    "interpret",
    "interpret_kernels",
    "launches_of",
    "product",
]

"""The kernels as an NPU would get them: lowered by triton-ascend, executed as Linalg on a CPU (docs/ascend_proof.md).

test_<op>.py               launches of public calls, every specialisation, executed against fp64 and gated
test_harness.py            the harness itself, on demo.py, and on its planted defects

proof.py                   the interface: lower, execute, compile_ptx
gates.py, liveness.py      what a plan, a grid and Linalg must satisfy
description.py             a launch as JSON, for a process with another Triton: triton_child.py
native.py, native.c        Linalg to a shared object
execution.py               its run on the launch's tensors under guard pages, in guarded_child.py
children.py, toolchain.py  those processes; where the toolchain is
"""

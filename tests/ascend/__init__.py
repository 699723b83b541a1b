"""Tests of ascend_kernels: planners and launches on the CPU, and the kernels in four ways.

    test_<op>.py           planners, chunks, recorded launches; marked `cuda`: on a GPU
    test_compiled.py       the kernels compiled for GPUs and executed instruction by instruction (compiled.py);
                           test_nsa.py, too
    lowered/               the kernels lowered by triton-ascend and executed as Linalg, marked `ascend`
                           (docs/ascend_proof.md)
    interpreted.py         the kernels in Triton's interpreter, on CPU tensors. TRITON_INTERPRET must be set before
                           Triton is imported, so test_launch.py runs this file in a process of its own
    test_far.py            past 2^31 elements, on a GPU
    test_launch.py         recording launches

Cases and oracles that these share are in tests/support: neighborhood_cases, band_cases, backward_cases, residual_cases.
"""

"""Tests of ascend_kernels: planners and launches on the CPU, and the kernels in three ways.

    test_<op>.py           planners, chunks, recorded launches; starts interpreted_<op>.py; marked `cuda`: on a GPU
    interpreted_<op>.py    the kernels in Triton's interpreter, on CPU tensors. TRITON_INTERPRET must be set before
                           Triton is imported, so a test_*.py runs each of these files in a process of its own
    test_far.py            past 2^31 elements, on a GPU
    test_launch.py         recording launches
    lowered/               the kernels lowered by triton-ascend and executed as Linalg, marked `ascend`
                           (docs/ascend_proof.md)

tests/nsa/test_neighborhood_attention.py starts interpreted_flash.py, and tests/nsa/test_attention_residual.py
interpreted_residual.py. Cases and oracles that these share are in tests/support: neighborhood_cases, band_cases,
backward_cases, residual_cases.
"""

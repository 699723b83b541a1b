"""Triton kernels for Ascend NPUs and NVIDIA GPUs: neighborhood attention and attention residual.

The same source serves both. For NPUs, triton-ascend lowers the kernels, and tests execute the resulting Linalg on a CPU
(docs/ascend_proof.md); they have never run on an NPU. For NVIDIA GPUs upstream Triton compiles them; they have run on
an H200.

    device.py       memories and cores of a device
    layout.py       which tensors kernels read and write as they are; copies of others
    launch.py       launching, recording and repeating launches
    support.py      whether a machine can run Triton kernels at all

    neighborhood/   neighborhood attention: flash, through its band of probabilities, and dense
    residual/       attention residual

Importing this package needs torch alone, its kernels Triton: builds of torch for CUDA bring it, the `npu` extra brings
the one for NPUs.
"""

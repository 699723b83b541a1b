"""Triton kernels: NSA for NVIDIA GPUs, neighborhood attention and attention residual for Ascend NPUs and NVIDIA GPUs.

For NVIDIA GPUs upstream Triton compiles them; they have run on an H200. For NPUs triton-ascend lowers the same source
of neighborhood attention and attention residual, and tests execute the resulting Linalg on a CPU
(docs/ascend_proof.md); they have never run on an NPU.

    device.py       memories and cores of a device
    layout.py       layouts that kernels read and write directly; copies of other tensors
    launch.py       launching, recording and repeating launches
    support.py      requirements of all Triton kernels on machine and dtype

    neighborhood/   neighborhood attention: flash, through its band of probabilities, and dense
    residual/       attention residual
    nsa/            NSA, attention to given blocks, selection by an indexer

Importing this package needs only torch; its kernels need Triton, which CUDA builds of torch include and the `npu` extra
installs for NPUs.
"""

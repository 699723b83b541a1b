"""Kernels in Triton, for Ascend NPUs and for NVIDIA GPUs.

Importing this package needs torch alone. Its modules need Triton: builds of torch for CUDA bring it, the `npu` extra
brings the one for NPUs.
"""

"""Neighborhood attention in Triton: for Ascend NPUs, and for NVIDIA GPUs.

algorithms.py choice of kernels for a call: the backend's entry flash.py banded flash attention: out and LSE; dq, dk, dv
band.py launchers of band_kernels.py: attention that stores its probabilities `[B,H,N,K]` dense_backward.py gradients
from probabilities of all pairs `[B,H,N,N]` backward.py gradients from given probabilities: band or dense, in chunks

windows.py addressing of residue classes and windows, shared by all kernels tiling.py tiles and grids of each kernel
support.py limits of the kernels reference.py the definition, in eager PyTorch
"""

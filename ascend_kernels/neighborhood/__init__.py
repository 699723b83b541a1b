"""Neighborhood attention in Triton: for Ascend NPUs, and for NVIDIA GPUs.

algorithms.py       which kernels a call runs: the backend's entry
flash.py            banded flash attention: out and LSE; dq, dk, dv
band.py             launchers of band_kernels.py: the same with its probabilities `[B,H,N,K]` kept
dense_backward.py   gradients from probabilities of all pairs `[B,H,N,N]`
backward.py         gradients from given probabilities: band or dense, in chunks

windows.py          residue classes and windows, as all kernels address them
tiling.py           tiles and grids of each kernel
support.py          which calls the kernels take
reference.py        the definition, in eager PyTorch
"""

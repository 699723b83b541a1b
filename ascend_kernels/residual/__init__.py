"""Attention residual in Triton: for Ascend NPUs, and for NVIDIA GPUs.

launchers.py    forward and backward: the backend's entry
whole_rows.py   kernels for rows that are one tile; the math
tiled.py        kernels for longer rows
rows.py addressing and loading of a token's rows

tiling.py       tiles and grids of each kernel
support.py limits of the kernels reference.py the definition, in eager PyTorch
"""

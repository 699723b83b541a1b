"""Tiles in shared memory and products of them.

mma_sync          by warps
wgmma             by warpgroups, with TMA, on Hopper
warp_specialized  the roles of a producer and two consumer warpgroups
warp              what lanes of a warp do together
smem              how much shared memory there is
"""

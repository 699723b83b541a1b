"""Shared-memory tiles and matrix products of them.

mma_sync          products by warps
wgmma             products by warpgroups, with TMA, on Hopper
warp_specialized  roles of a producer and two consumer warpgroups
warp              operations across the lanes of a warp
smem              shared memory capacity
"""

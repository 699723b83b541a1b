"""Tiles in shared memory and products of them: by warps (mma.sync) and by warpgroups (WGMMA)."""

"""Shared memory of an SM, on Hopper and on Blackwell."""

SM_SMEM_BYTES = 228 << 10
CTA_SMEM_BYTES = 227 << 10
"""The most that one CTA can have."""

RESERVED_SMEM_BYTES = 1 << 10
"""What each CTA takes besides its own."""

SMEM_CARVEOUT = 100
"""Percent of an SM's memory for shared memory; without it the compiler asks a GPU."""

"""Shared memory of an SM, on Hopper and on Blackwell."""

SM_SMEM_BYTES = 228 << 10
CTA_SMEM_BYTES = 227 << 10
"""Maximum shared memory per CTA."""

RESERVED_SMEM_BYTES = 1 << 10
"""Additional shared memory reserved for each CTA by the system."""

SMEM_CARVEOUT = 100
"""Percentage of an SM's memory used as shared memory; without it the compiler queries a GPU."""

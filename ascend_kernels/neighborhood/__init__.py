"""Neighborhood attention in Triton: for Ascend NPUs, and for NVIDIA GPUs."""

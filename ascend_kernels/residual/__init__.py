"""Attention residual in Triton: for Ascend NPUs, and for NVIDIA GPUs."""

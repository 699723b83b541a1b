"""Kernels for NVIDIA GPUs in CuTe DSL. Importing this package needs torch alone; its modules need the `cuda` extra."""

"""Kernels for Ascend NPUs in Triton. Importing this package needs torch alone; its modules need the `npu` extra."""

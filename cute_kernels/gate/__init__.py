"""Gating of NSA's three branches, out = sum_b g_b o_b: forward, backward, and the sums of the branches' gradients.

forward.py also has what attention kernels share that gate o_slc while it is in registers.
"""

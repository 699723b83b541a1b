"""Gating of NSA's three branches, out = sum_b g_b o_b: forward, backward, and the sums of the branches' gradients.

forward   the gated sum, and what attention kernels share that gate o_slc while it is in registers
backward  gradients of gates and branches
sums      dq, dk and dv of the branches added up
partials  sums of what CTAs have written
"""

"""Gating of NSA's three branches, out = sum_b g_b o_b: forward, backward, and the sums of the branches' gradients.

forward   the gated sum, and its parts for attention kernels that gate o_slc while it is in registers
backward  gradients of gates and branches
sums      sums of the branches' dq, dk and dv
partials  sums of partials written by several CTAs
"""

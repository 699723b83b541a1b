"""Kernels for NVIDIA GPUs in CuTe DSL. Importing this package needs torch alone; its modules need the `cuda` extra.

    forward, backward   NSA: pool, select, attend three times, gate
    plan                what both start from: aligned inputs, options and sizes, chunks
    neighborhood        neighborhood attention
    support             whether a call can run, for dispatch

    fa4                 attention through FlashAttention-4
    attend              attention of selected blocks and of the window
    select, gate        selection of blocks; gated sum of the branches, and sums of gradients
    lists               block lists and worklists
    pool                pooled keys and values, packed documents
    mma                 MMA of warps and warpgroups
    runtime             compiling, replay of calls, streams, device
    limits              constants that support checks and kernels rely on

Each imports only those below it (tests/tools/test_imports.py).
"""

"""Kernels for NVIDIA GPUs in CuTe DSL. Importing this package needs torch alone; its modules need the `cuda` extra.

    forward, backward   NSA: pool, select, attend three times, gate
    decoding, prefill   NSA with a cache: steps of few queries; prompts
    block_sparse        attention to given blocks, and their choice by the best score
    neighborhood        neighborhood attention
    call                what forward and backward start from: aligned inputs, their plan, chunks
    plan                which kernels run a call of NSA, or why none can
    support             whether a call can run, for dispatch
    refusals            limits that several ops share

    fa4                 attention through FlashAttention-4
    decode              the kernels of a decoding step
    attend              attention of the branches, forward and backward, where FlashAttention-4 does not compute it
    select, gate        selection of blocks; gated sum of the branches, and sums of gradients
    lists               block lists and worklists
    pool                pooled keys and values, packed documents
    mma                 MMA of warps and warpgroups
    runtime             compiling, replay of calls, streams, device
    limits              constants that support checks and kernels rely on

Each imports only those below it (tests/tools/test_imports.py has the order).
"""

"""Attention of the branches and its backward, where FlashAttention-4 does not compute it.

Token mode, forward
    kv_outer             partials of each block for the rows that selected it, and their combine
    query_outer          the union of the blocks of a tile of rows
    forced               forced blocks, with the combine and the gate
    window_combine       the window, forced blocks, combine and gate in one, on Hopper
    combine              the combine alone, or with the gate
    checks               arguments that they all refuse

Backward
    kv_outer_backward    selected blocks in token mode
    selected_backward    selected blocks in tile mode, and chosen blocks of compressed entries
    compressed_backward  compressed entries
    window_backward      the window, with the selected blocks inside it
    window_dq_combine    its dq, the selected branch's combine and the sum of dq in one, on Hopper
    row_dots             do . o of each row
    row_statistics       lse and do . o as FlashAttention-4's backward reads them

What they share
    backward_tiles       BackwardDQ and BackwardDKV, on Hopper
    warp_rows            rows of a warp against keys in shared memory
    views                tensors by key/value heads, tokens by blocks
    combine_rows         the combine of a row, and its gates
    combine_splits       sums over the splits of a block
"""

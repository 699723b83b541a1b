"""Forward and backward of attention for the branches that FlashAttention-4 does not compute.

Token mode, forward
    kv_outer             partials of each block for the rows that selected it, and their combination
    query_outer          the union of the blocks of a tile of rows
    forced               forced blocks, combined and gated in the same kernel
    window_combine       window, forced blocks, combine and gate in one kernel, on Hopper
    combine              combine alone, or followed by the gate
    checks               argument checks shared by all of them

Backward
    kv_outer_backward    selected blocks in token mode
    selected_backward    selected blocks in tile mode, and chosen blocks of compressed entries
    compressed_backward  compressed entries
    window_backward      window, with the selected blocks inside it
    window_dq_combine    dq of the window, combine of the selected branch and sum of dq in one kernel, on Hopper
    row_dots             do . o of each row
    row_statistics       lse and do . o in the layout that FlashAttention-4's backward reads

Shared
    backward_tiles       BackwardDQ and BackwardDKV, the Hopper base classes
    warp_rows            rows of a warp against keys in shared memory
    views                tensors viewed by key/value head, tokens by block
    combine_rows         combine of a row, and its gates
    combine_splits       sums over the splits of a block
"""

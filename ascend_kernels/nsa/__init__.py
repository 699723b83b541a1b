"""NSA in Triton: portable kernels for NVIDIA GPUs of compute capability 8.0 or newer.

    forward.py, backward.py     the steps of a call
    block_sparse.py, indexer.py attention to given blocks, and the choice of blocks by an indexer
    layout.py                   every call as a pack of documents, in small tables on the device
    pool.py                     compressed entries, mean queries of tiles
    interval.py                 attention to an interval of keys: compressed branch, window
    scores.py, topk.py          selection of blocks
    selected.py, kv_outer.py    attention to selected blocks, by rows or by blocks (lists.py)
    gate.py                     gated sum of the branches
    attention.py                one step of attention on tiles
    tiling.py                   tile sizes by dtype, head dim and shared memory
    support.py                  limits

Shapes are those of a pack: rows `[rows,heads,D]`, statistics `[heads,rows]`, lists of blocks `[heads,lists,k]`.
"""

"""A step of decoding: few queries of each sequence, whose keys and entries lie in pages (docs/decoding.md).

    tile_sums.py   SumQueries        tile mode: the mean of the tile's queries up to each token
    append.py      AppendPages       new keys and values into their pages, and the entries that they complete
    score.py       ScoreEntries      compressed attention, split over the entries, and what they add to a block's score
    choose.py      ChooseBlocks      the best blocks of each token, in parts
    blocks.py      AttendBlocks      attention to the selected blocks and to the window, in parts
    combine.py     CombineBranches   the partials of the three branches added up and gated
    tile_sums.py   KeepSums          tile mode: sums for the next step, when the step ends

cache.py has the tensors of a cache as kernels take them, pages.py finds tokens and entries in them, tiles.py attends to
tiles of them, splits.py divides tiles among CTAs, and gather.py copies a prompt's pages for the kernels of prefill.py.

Five launches with fixed grids, in tile mode seven or eight: lengths are read on the device, so one CUDA graph serves
all of them.

Each starts while the one before still runs (programmatic dependent launch), and every CTA waits for that one's end with
`griddepcontrol.wait` before it ends itself, so a kernel that has waited has waited for all before it. AppendPages waits
first and lets the others start after that: whatever came before the step is complete when they begin, and so is what
SumQueries has written. Before they wait they may read that, and what no kernel of the step writes: queries, lengths,
the block table, and pages of tokens and entries that were there before. What they write before they wait must be memory
that nothing of the step has read yet.
"""

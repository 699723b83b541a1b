"""One step of decoding: few queries per sequence, whose keys and entries are stored in pages (docs/decoding.md).

    tile_sums.py   SumQueries        tile mode: mean of the tile's queries up to each token
    append.py      AppendPages       write new keys and values to their pages, and the entries that they complete
    score.py       ScoreEntries      compressed attention, split over the entries, and each block's share of the scores
    choose.py      ChooseBlocks      best blocks of each token, in parts
    blocks.py      AttendBlocks      attention to the selected blocks and to the window, in parts
    combine.py     CombineBranches   sum of the three branches' partials, gated
    tile_sums.py   KeepSums          tile mode: sums for the next step, when the step ends

cache.py defines the tensors of a cache, pages.py locates tokens and entries in its pages, tiles.py attends to tiles of
them, splits.py divides tiles among CTAs, and gather.py copies a prompt's pages for the kernels of prefill.py.

Five launches with fixed grids, seven or eight in tile mode: lengths are read on the device, so one CUDA graph serves
every length.

Each launch starts while the previous one still runs (programmatic dependent launch), and every CTA waits for the end of
that one with `griddepcontrol.wait` before it ends itself; a kernel that has waited has thus waited for all earlier
ones.
AppendPages waits first and only then lets the others start: everything before the step, including the output of
SumQueries, is complete when they start. Before waiting they may read that, and anything that no kernel of the step
writes: queries, lengths, the block table, and pages of earlier tokens and entries. Before waiting they may write only
memory that no kernel of the step has read yet.
"""

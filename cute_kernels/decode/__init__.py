"""A step of decoding: few queries of each sequence, whose keys and entries lie in pages (docs/decoding.md).

    append.py   AppendPages       new keys and values into their pages, and the entries that they complete
    score.py    ScoreEntries      compressed attention, split over the entries, and what they add to each block's score
    choose.py   ChooseBlocks      the best blocks of each token, in parts
    blocks.py   AttendBlocks      attention to the selected blocks and to the window, in parts
    combine.py  CombineBranches   the partials of the three branches added up and gated

Five launches with fixed grids: lengths are read on the device, so one CUDA graph serves all of them.
"""

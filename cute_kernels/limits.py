"""Limits that support.py checks before a call is launched, and that kernels rely on. Imports nothing."""

SELECT_UNIT = 64
"""select_block_size is a multiple of this, in tile mode."""

TOKEN_SELECT_SIZES = (64, 128, 192, 256)
"""select_block_size in token mode."""

MAX_SIZE = 1 << 30
"""Tokens of a tile or a block: the kernels' int32 holds sums of two."""

MAX_BLOCKS = 1024
"""Selected blocks of a tile."""

MAX_TOKEN_BLOCKS = 256
"""Selected blocks of a token, in token mode."""

MAX_ENTRIES = 128
"""Compressed entries over one select block, which one step of select/tile.py covers."""

MAX_TOKEN_ENTRIES = 256
"""The same for a step of select/token.py."""

MAX_TOKEN_GROUP = 64
"""Query heads of a key/value head, in token mode."""

INDEXER_BLOCKS = (64, 128)
"""Tokens of a block that select/block_max.py scores."""

MAX_INDEXER_BLOCKS = 64
"""Blocks of a token that it selects."""

MAX_INDEXER_GROUP = 128
"""Heads that share keys there."""

MAX_GRID = 65535
"""Heads, and sequences or residue classes, of a call: the y and z dimensions of a grid."""

MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**127
"""softmax_scale: it, and its product with log2(e), are normal numbers of fp32."""

MAX_TILE = 256
"""Query rows of FlashAttention-4's largest tile."""

MAX_LIST_WIDTH = 128
"""Keys of the widest block in FlashAttention-4's block lists."""

MAX_DECODE_QUERIES = 8
"""New tokens of a sequence that one step of decoding takes."""

MIN_PREFILL_QUERIES = 64
"""New tokens of a sequence from which on its pages are gathered once, and take the steps of a whole call."""

DECODE_KEYS = 64
"""Keys or compressed entries of a tile of decode/tiles.py."""

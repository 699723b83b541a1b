"""Limits that support.py checks before a launch, and that kernels rely on. Imports nothing."""

TILE = 64
"""Keys, and rows, of the tiles of our attention kernels."""

SELECT_UNIT = TILE
"""In tile mode select_block_size must be a multiple of this."""

TOKEN_SELECT_SIZES = (64, 128, 192, 256)
"""Supported select_block_size in token mode."""

MAX_SIZE = 1 << 30
"""Maximum tokens per tile or block: the kernels' int32 holds sums of two."""

MAX_BLOCKS = 1024
"""Maximum selected blocks per tile."""

MAX_TOKEN_BLOCKS = 256
"""Maximum selected blocks per token, in token mode."""

MAX_ENTRIES = 128
"""Maximum compressed entries that overlap a select block, covered by one step of select/tile.py."""

MAX_TOKEN_ENTRIES = 256
"""The same for one step of select/token.py."""

MAX_TOKEN_GROUP = 64
"""Maximum query heads per key/value head, in token mode."""

INDEXER_BLOCKS = (64, 128)
"""Supported tokens per block in select/block_max.py."""

MAX_INDEXER_BLOCKS = 64
"""Maximum blocks per token that it selects."""

MAX_INDEXER_GROUP = 128
"""Maximum heads that share keys in select/block_max.py."""

MAX_GRID = 65535
"""Maximum heads, and sequences or residue classes, per call: the y and z dimensions of a grid."""

MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**127
"""Range of softmax_scale: it, and its product with log2(e), must be normal fp32 numbers."""

MAX_TILE = 256
"""Query rows of FlashAttention-4's largest tile."""

MAX_LIST_WIDTH = 128
"""Keys of the widest block in FlashAttention-4's block lists."""

MAX_DECODE_QUERIES = 8
"""Maximum new tokens per sequence in one step of decoding."""

MIN_PREFILL_QUERIES = 64
"""Minimum new tokens per sequence for a prefill: pages are gathered once, followed by the steps of a whole call."""

DECODE_KEYS = 64
"""Keys or compressed entries per tile of decode/tiles.py."""

MIN_QUERY_OUTER_GROUP = 64
"""Smallest G for which query-outer is faster than KV-outer whatever tokens select (docs/experiments.md)."""

QUERY_OUTER_ROWS = 128
"""Query rows, tokens x G, of a work tile of attend/query_outer.py."""

MAX_QUERY_OUTER_TOKENS = 32
"""Maximum tokens of such a tile: one bit each."""

MAX_QUERY_OUTER_SLOTS = 4096
"""Maximum slots of such a tile, which shared memory holds."""

MAX_FORCED_KEYS = 256
"""Maximum keys of the forced blocks of a token in attend/forced.py."""

WINDOW_COMBINE_GROUPS = (8, 16, 32)
"""Supported query heads per key/value head in attend/window_combine.py."""

MAX_COMBINED_SLOTS = 32
"""Maximum selected blocks per token there: one bit each."""

MAX_COMBINED_WINDOW = 2048
"""Maximum window there."""

MAX_COMBINED_PARTIALS = 32
"""Maximum partials of a row of dq in attend/window_dq_combine.py: one bit each."""


def query_outer_tokens(group: int) -> int:
    """Tokens of a work tile of attend/query_outer.py. Args: group: G."""
    return min(MAX_QUERY_OUTER_TOKENS, QUERY_OUTER_ROWS // group)

"""Facts of a call on which checks and plans depend: rows of its tiles, whether it runs as a pack, its backward.

support.py refuses by these facts and plan.py plans by them. Needs torch alone.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from cute_kernels.fa4.rules import Rules
from cute_kernels.limits import SELECT_UNIT


def tile_rows(config: Any, rules: Any) -> int:
    """Query rows of a tile: those that select together, in token mode of attention. Documents begin at multiples."""
    return int(rules.rows if config.token_mode else config.q_tile_size)


def runs_as_pack(inputs: Any, config: Any, *, training: bool) -> bool:
    """True if a call of NSA runs the steps of packed documents.

    So do, beside what `is_pack`, sequences that continue a tile, to be trained: documents begin inside a tile, while
    lists of rows without documents are of tiles that begin.
    """
    return is_pack(inputs) or (training and bool(inputs.q.numel() > 0) and continues_tile(inputs, config))


def is_pack(inputs: Any) -> bool:
    """True for packed documents, and for sequences of one length whose starts only the device knows."""
    return bool(inputs.packed or (isinstance(inputs.q_start, Tensor) and inputs.q.shape[0] > 0))


def pack_sizes(inputs: Any) -> tuple[int, int, int]:
    """Queries, tokens and documents of what runs as a pack."""
    docs = inputs.cu_seqlens.shape[0] - 1 if inputs.packed else inputs.q.shape[0]
    return math.prod(inputs.q.shape[:-2]), math.prod(inputs.k.shape[:-2]), docs


def continues_tile(inputs: Any, config: Any) -> bool:
    """True if the first query, which the host knows, is not the first of its tile."""
    return not config.token_mode and bool(inputs.first_token % config.q_tile_size != 0)


def has_atomic_free_backward(rules: Rules, dim: int, v_dim: int) -> bool:
    """True if backward has kernels without atomics: attend/selected_, window_ and compressed_backward.py."""
    return SELECT_UNIT in rules.backward_widths and dim == v_dim

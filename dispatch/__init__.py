"""All ops in one module: `dispatch.nsa(...)` and others, routed to a backend by `resolve`; `explain` gives the reasons.

`python -m dispatch` prints what runs on this machine. Importing this package needs only torch: the functions of nsa,
which chooses implementations through `resolve` and so imports this package, are loaded by name at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dispatch.impl import Call, Impl
from dispatch.registry import BackendError, Verdict, explain, resolve

if TYPE_CHECKING:  # FUNCTIONS for type checkers, which do not run __getattr__
    from nsa.api import nsa as nsa
    from nsa.api import nsa_forward as nsa_forward
    from nsa.api import nsa_forward_aux as nsa_forward_aux
    from nsa.block_sparse.api import block_sparse_attention as block_sparse_attention
    from nsa.decoding.api import nsa_with_cache as nsa_with_cache
    from nsa.indexer.api import indexer_kl_loss as indexer_kl_loss
    from nsa.indexer.api import top_blocks_by_max as top_blocks_by_max
    from nsa.neighborhood.api import neighborhood_attention as neighborhood_attention
    from nsa.neighborhood.api import neighborhood_attention_backward as neighborhood_attention_backward
    from nsa.neighborhood.api import neighborhood_attention_forward as neighborhood_attention_forward
    from nsa.residual.api import attention_residual as attention_residual

OPS = {
    "nsa": "nsa.api:nsa",
    "nsa_with_cache": "nsa.decoding.api:nsa_with_cache",
    "block_sparse_attention": "nsa.block_sparse.api:block_sparse_attention",
    "top_blocks_by_max": "nsa.indexer.api:top_blocks_by_max",
    "indexer_kl_loss": "nsa.indexer.api:indexer_kl_loss",
    "neighborhood_attention": "nsa.neighborhood.api:neighborhood_attention",
    "neighborhood_attention_backward": "nsa.neighborhood.api:neighborhood_attention_backward",
    "attention_residual": "nsa.residual.api:attention_residual",
}
"""The public function of each op in the table."""

FUNCTIONS = {
    **OPS,
    "nsa_forward": "nsa.api:nsa_forward",
    "nsa_forward_aux": "nsa.api:nsa_forward_aux",
    "neighborhood_attention_forward": "nsa.neighborhood.api:neighborhood_attention_forward",
}
"""All public functions."""

__all__ = ["BackendError", "Call", "Impl", "Verdict", "explain", "resolve", *FUNCTIONS]


def __dir__() -> list[str]:
    return [*globals(), *FUNCTIONS]


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module 'dispatch' has no attribute {name!r}")
    module, _, attribute = FUNCTIONS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)

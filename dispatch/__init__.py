"""Every op on every device: `dispatch.nsa(...)`, routed by `resolve`, whose choice `explain` explains.

`python -m dispatch` prints what runs on this machine. Importing this package needs torch alone.
"""

from __future__ import annotations

import importlib
from typing import Any

from dispatch.impl import Call, Impl
from dispatch.registry import BackendError, Verdict, explain, resolve

OPS = {
    "nsa": "nsa.api:nsa",
    "nsa_with_cache": "nsa.decoding.api:nsa_with_cache",
    "block_sparse_attention": "nsa.block_sparse.api:block_sparse_attention",
    "top_blocks_by_max": "nsa.indexer.api:top_blocks_by_max",
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
"""All public functions; imported on first use, since their modules import this one."""

__all__ = ["BackendError", "Call", "Impl", "Verdict", "explain", "resolve", *FUNCTIONS]


def __dir__() -> list[str]:
    return [*globals(), *FUNCTIONS]


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module 'dispatch' has no attribute {name!r}")
    module, _, attribute = FUNCTIONS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)

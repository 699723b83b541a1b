"""Block-sparse attention: each token attends to blocks of keys that the caller names."""

from nsa.block_sparse.api import block_sparse_attention

__all__ = ["block_sparse_attention"]

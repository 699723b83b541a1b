"""Block-sparse attention: each token attends to blocks of keys chosen by the caller."""

from nsa.block_sparse.api import block_sparse_attention

__all__ = ["block_sparse_attention"]

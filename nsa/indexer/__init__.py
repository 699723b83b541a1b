"""Indexers for block-sparse attention: small heads that select each token's blocks, and the loss that trains them."""

from nsa.indexer.api import indexer_kl_loss, top_blocks_by_max

__all__ = ["indexer_kl_loss", "top_blocks_by_max"]

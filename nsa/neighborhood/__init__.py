"""Neighborhood attention: each token attends to the `kernel_size` tokens around it."""

from nsa.neighborhood.api import (
    neighborhood_attention,
    neighborhood_attention_backward,
    neighborhood_attention_forward,
)
from nsa.neighborhood.backward_cache import BackwardCache
from nsa.neighborhood.module import NeighborhoodAttention, NeighborhoodAttentionLayer

__all__ = [
    "BackwardCache",
    "NeighborhoodAttention",
    "NeighborhoodAttentionLayer",
    "neighborhood_attention",
    "neighborhood_attention_backward",
    "neighborhood_attention_forward",
]

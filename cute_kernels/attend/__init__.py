"""Attention of the branches and its backward, where FlashAttention-4 does not compute it."""

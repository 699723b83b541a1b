"""Tokens to blocks.

compress    mean pooling: compressed keys and values, mean queries of tiles
documents   the layout of packed documents that all later kernels work on
"""

"""Tokens to blocks: mean pooling, and the layout of packed documents.

compress    mean pooling: compressed keys and values, mean queries of tiles
documents   layout of packed documents that all later kernels work on
"""

"""Tokens to blocks: mean pooling, and the layout of packed documents that all later kernels work on."""

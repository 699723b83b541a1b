"""Selections as lists: of key blocks by query tile, of query tiles by key block, and of work for KV-outer kernels."""

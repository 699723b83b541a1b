"""Decoding: a paged cache of keys, values and compressed entries, and NSA of new tokens against it."""

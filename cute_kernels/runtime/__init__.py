"""Compiling kernels, keeping them, and what they run on. Knows nothing of attention."""

"""Context parallelism on torch.distributed: sequences divided among ranks, for NSA and neighborhood attention."""

from nsa.distributed.context import ContextParallel

__all__ = ["ContextParallel"]

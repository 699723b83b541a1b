"""Context and tensor parallelism on torch.distributed: sequences or heads divided among ranks."""

from nsa.distributed.context import ContextParallel
from nsa.distributed.headwise import HeadwiseParallel

__all__ = ["ContextParallel", "HeadwiseParallel"]

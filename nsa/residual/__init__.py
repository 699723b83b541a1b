"""Attention residual: a layer's input as a mixture of the outputs of all blocks before it."""

from nsa.residual.api import attention_residual
from nsa.residual.module import AttentionResidual

__all__ = ["AttentionResidual", "attention_residual"]

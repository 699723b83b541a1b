"""Attention residual: a layer's input is a softmax-weighted mixture of the outputs of all earlier blocks."""

from nsa.residual.api import attention_residual
from nsa.residual.module import AttentionResidual

__all__ = ["AttentionResidual", "attention_residual"]

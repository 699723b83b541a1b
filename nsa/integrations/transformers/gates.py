"""BranchGates: the weights of a layer's three branches, initially close to dense attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nsa.integrations.transformers.options import check_gate_init, check_gates, logit


class BranchGates(nn.Module):
    """gates = sigmoid(bias + projection), per token, head and branch.

    The bias starts at the logits of `nsa_gate_init` and the projection at 0, so that a converted model starts with
    these gates everywhere.

    Args:
        config: config of the model; `nsa_gates` selects the projected input. "hidden": the layer's input, as in the
            paper. "query": the head's rotated query. "learned": none.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.source = check_gates(config.nsa_gates)
        self.init = check_gate_init(config.nsa_gate_init)
        heads = config.num_attention_heads
        self.bias = nn.Parameter(torch.empty(heads, 3))
        self.hidden_proj = nn.Linear(config.hidden_size, heads * 3, bias=False) if self.source == "hidden" else None
        self.query_proj: nn.Parameter | None = None
        if self.source == "query":
            self.query_proj = nn.Parameter(torch.empty(heads, 3, config.head_dim))
        with torch.no_grad():
            for name, value in self.initial_values().items():
                self.get_parameter(name).copy_(value)

    def initial_values(self) -> dict[str, Tensor]:
        """Initial value of each parameter, by name."""
        values = {name: torch.zeros(parameter.shape) for name, parameter in self.named_parameters()}
        values["bias"] = torch.tensor([logit(gate) for gate in self.init]).expand(values["bias"].shape)
        return values

    def forward(self, hidden_states: Tensor, q: Tensor) -> Tensor:
        """Gates `[B,N,H,3]` in fp32 (fp64 for fp64), from hidden_states `[B,N,hidden_size]` and q `[B,N,H,D]`."""
        logits = self.bias.to(torch.promote_types(self.bias.dtype, torch.float32))
        if self.hidden_proj is not None:
            logits = logits + self.hidden_proj(hidden_states).unflatten(-1, self.bias.shape)
        if self.query_proj is not None:
            logits = logits + torch.einsum("bnhd,hcd->bnhc", q, self.query_proj.to(q.dtype))
        return torch.sigmoid(logits).expand(*q.shape[:-1], 3)

    def extra_repr(self) -> str:
        return f"source={self.source!r}, init={self.init}"

"""NeighborhoodAttention: projections around the function. NeighborhoodAttentionLayer: norm and residual around that."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from nsa.common.checks import check_choice, check_eps
from nsa.common.layers import RotaryHook, apply_rope, check_input, check_rope, head_sizes, refuse_unsupported
from nsa.neighborhood.api import neighborhood_attention
from nsa.neighborhood.validate import ALGORITHMS, Window


class NeighborhoodAttention(nn.Module):
    """Self-attention of each token to the `kernel_size` tokens around it.

    Projections are named as in NSAttention and Llama: q_proj, k_proj, v_proj, o_proj.

    Args:
        hidden_size: width of the input and output.
        num_heads: H. num_kv_heads: H_kv, a divisor of H; None: H.
        kernel_size, dilation, softmax_scale, boundary, causal, algorithm, backend: as in `neighborhood_attention`.
        head_dim: D; None: hidden_size // num_heads.
        bias: whether the projections have one, o_proj included.
        dropout: share of the output's elements that are zeroed in training, behind o_proj. Probabilities are never
            dropped: no kernel keeps them.
        rope: hook `(tensor [B,N,heads,D], position_embeddings) -> tensor`, applied to queries and keys; it keeps the
            dtype, which under autocast is not that of the parameters.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        kernel_size: int = 7,
        dilation: int = 1,
        softmax_scale: float | None = None,
        boundary: str = "truncate",
        causal: bool = False,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        rope: RotaryHook | None = None,
        algorithm: str = "auto",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.num_kv_heads, self.head_dim = head_sizes(hidden_size, num_heads, num_kv_heads, head_dim)
        self.window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
        check_choice("algorithm", algorithm, ALGORITHMS)
        check_rope(rope)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
            raise TypeError(f"dropout must be a number, got {dropout!r}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be from 0 to 1, got {dropout}")
        self.rope, self.algorithm, self.backend = rope, algorithm, backend

        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias, **place)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias, **place)
        self.v_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias, **place)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias, **place)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **others: Any) -> Tensor:
        """Attend within each sequence.

        Args:
            hidden_states: `[B,N,hidden_size]`, in the weights' dtype, under autocast also in another one that it casts.
            position_embeddings: handed to the `rope` hook as it is.
            others: refused as in NSAttention.

        Returns:
            Same shape and dtype as `hidden_states`; under autocast, its dtype.

        Raises:
            TypeError, ValueError: `hidden_states` of another layout, width, dtype or device; an argument of `others`.
            TypeError: `position_embeddings` without a `rope` hook to use them.
            TypeError, ValueError: a `rope` hook that changes dtype or shape.
        """
        instead_of_mask = "attend to each document in a call of its own instead of padding them"
        refuse_unsupported(others, causal=self.window.causal, instead_of_mask=instead_of_mask)
        check_input(hidden_states, self.hidden_size, self.q_proj, packed=None)
        q = self._rotate(self._heads(self.q_proj(hidden_states)), position_embeddings)
        k = self._rotate(self._heads(self.k_proj(hidden_states)), position_embeddings)
        v = self._heads(self.v_proj(hidden_states))
        window = self.window  # spelled out: Dynamo of torch 2.6 and 2.7 cannot trace asdict
        out = neighborhood_attention(
            q,
            k,
            v,
            kernel_size=window.kernel_size,
            dilation=window.dilation,
            softmax_scale=window.softmax_scale,
            boundary=window.boundary,
            causal=window.causal,
            algorithm=self.algorithm,
            backend=self.backend,
        )
        result: Tensor = self.dropout(self.o_proj(out.flatten(-2)))
        return result

    def extra_repr(self) -> str:
        options = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, **asdict(self.window)}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    def _heads(self, projected: Tensor) -> Tensor:
        split: Tensor = projected.unflatten(-1, (projected.shape[-1] // self.head_dim, self.head_dim))
        return split

    def _rotate(self, tensor: Tensor, position_embeddings: Any) -> Tensor:
        return apply_rope(self.rope, tensor, position_embeddings)


class NeighborhoodAttentionLayer(nn.Module):
    """`x + attention(layer_norm(x))`: NeighborhoodAttention as the first half of a pre-norm transformer block.

    It does what LigerFusedNeighborhoodAttentionLayer of Liger-Kernel does; docs/neighborhood_attention.md says how to
    load the weights of that one.

    Args:
        hidden_size, num_heads, num_kv_heads: as in NeighborhoodAttention.
        norm_eps: what LayerNorm adds to the variance.
        attention: any other option of NeighborhoodAttention, such as `kernel_size`; `dropout` zeroes elements of what
            is added to x.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention = NeighborhoodAttention(hidden_size, num_heads, num_kv_heads, **place, **attention)
        check_eps(norm_eps, "norm_eps")
        self.layer_norm = nn.LayerNorm(hidden_size, eps=norm_eps, **place)

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None) -> Tensor:
        """Add to each token what it gathers from its neighborhood.

        Args:
            hidden_states: `[B,N,hidden_size]`.
            position_embeddings: handed to the `rope` hook as it is.

        Returns:
            Same shape and dtype as `hidden_states`, under autocast too.

        Raises:
            ValueError: `hidden_states` of another layout.
            TypeError, ValueError: as NeighborhoodAttention.
        """
        check_input(hidden_states, self.attention.hidden_size, self.attention.q_proj, packed=None)
        added = self.attention(self.layer_norm(hidden_states), position_embeddings)
        result: Tensor = hidden_states + added.to(hidden_states.dtype)
        return result

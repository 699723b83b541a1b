"""NSAttention: an attention layer of a transformer block, with projections and gates around `nsa`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nsa.api import nsa, nsa_forward_aux
from nsa.common.layers import RotaryHook, apply_rope, check_input, check_rope, head_sizes, refuse_unsupported
from nsa.compression import LinearCompression
from nsa.config import NSAConfig, check_options
from nsa.inputs import NSAAux


class NSAttention(nn.Module):
    """Self-attention by NSA: a layer of a transformer block, which gives one tensor.

    Projections are named as in Llama (q_proj, k_proj, v_proj, o_proj), so such a layer's weights load with
    `strict=False`. Always causal unless `config` says otherwise. There is no attention mask, pack documents instead of
    padding them; and no cache of keys and values to generate with.

    Args:
        hidden_size: width of the input and output.
        num_heads: H. num_kv_heads: H_kv, a divisor of H; None: H.
        head_dim: D; None: hidden_size // num_heads. v_head_dim: D_v; None: D.
        config: what NSA computes; None: `NSAConfig()`.
        gate: "x": sigmoid(linear(x)), as in the paper. "q": sigmoid(q . w) per head, on the rotated q.
            None: a third each.
        compress: "linear": learned maps from blocks to compressed keys and values (LinearCompression), in place of the
            config's means. compress_proj: learned projections of those means, the identity at first.
        separate_kv: own key and value projections for each branch, as in the paper.
        bias: whether q, k and v projections have one.
        rope: hook `(tensor [...,heads,D], position_embeddings) -> tensor`, applied to queries and each branch's keys;
            it keeps the dtype, which under autocast is not that of the parameters.
        backend: as in `nsa`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        config: NSAConfig | None = None,
        gate: Literal["x", "q"] | None = "x",
        compress: Literal["linear"] | None = None,
        compress_proj: bool = False,
        separate_kv: bool = False,
        bias: bool = False,
        rope: RotaryHook | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads, head_dim = head_sizes(hidden_size, num_heads, num_kv_heads, head_dim, v_head_dim)
        check_options(config, {})
        check_rope(rope)
        if gate not in ("x", "q", None):
            raise ValueError(f"gate must be 'x', 'q' or None, got {gate!r}")
        if compress not in ("linear", None):
            raise ValueError(f"compress must be 'linear' or None, got {compress!r}")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim is None else v_head_dim
        self.config = NSAConfig() if config is None else config
        self.gate, self.rope, self.backend = gate, rope, backend

        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias, **place)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=bias, **place)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.v_head_dim, bias=bias, **place)
        self.o_proj = nn.Linear(num_heads * self.v_head_dim, hidden_size, bias=False, **place)
        self.branch_proj = nn.ModuleDict()
        if separate_kv:
            for branch in ("slc", "win"):
                self.branch_proj[f"k_{branch}"] = nn.Linear(hidden_size, self.k_proj.out_features, bias=bias, **place)
                self.branch_proj[f"v_{branch}"] = nn.Linear(hidden_size, self.v_proj.out_features, bias=bias, **place)
        self.gate_proj = nn.Linear(hidden_size, num_heads * 3, bias=True, **place) if gate == "x" else None
        self.gate_proj_weight: nn.Parameter | None = None
        self.compress = nn.ModuleDict()
        if compress is not None:
            if compress_proj or self.config.compress != "mean":
                other = "compress_proj" if compress_proj else f"a config that compresses by {self.config.compress!r}"
                raise ValueError(f"compress={compress!r} leaves nothing to {other}, got both")
            for name, dim in (("k", self.head_dim), ("v", self.v_head_dim)):
                self.compress[name] = LinearCompression(num_kv_heads, self.config.compress_block_size, dim, **place)
        self.w_k_compress: nn.Parameter | None = None
        self.w_v_compress: nn.Parameter | None = None
        if gate == "q":
            self.gate_proj_weight = nn.Parameter(torch.empty(num_heads, 3, self.head_dim, **place))
        if compress_proj:
            self.w_k_compress = nn.Parameter(torch.empty(num_kv_heads, self.head_dim, self.head_dim, **place))
            self.w_v_compress = nn.Parameter(torch.empty(num_kv_heads, self.v_head_dim, self.v_head_dim, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin anew with what is not in a submodule: every gate 1/2, means projected to themselves.

        Layers made on the meta device need it behind `to_empty`, as nn.Linear does.
        """
        with torch.no_grad():
            if self.gate_proj_weight is not None:
                self.gate_proj_weight.zero_()
            for weight in (self.w_k_compress, self.w_v_compress):
                if weight is not None:
                    weight.zero_()
                    weight.diagonal(dim1=-2, dim2=-1).fill_(1.0)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Attend within each sequence, or within each packed document.

        Args:
            hidden_states: `[B,N,hidden_size]`; packed `[T,hidden_size]` with `cu_seqlens` int32 `[B+1]`. In the
                weights' dtype, under autocast also in another one that it casts.
            position_embeddings: handed to the `rope` hook as it is.
            cu_seqlens, max_seqlen: as in `nsa`.
            others: `attention_mask`, `past_key_values`, `position_ids` and others that attention layers elsewhere take
                are refused, unless they are None or ask for what this layer does anyway.

        Returns:
            Same shape and dtype as `hidden_states`; under autocast, its dtype.

        Raises:
            TypeError, ValueError: `hidden_states` of another layout, width, dtype or device; an argument of `others`.
            TypeError: `position_embeddings` without a `rope` hook to use them.
            TypeError, ValueError: a `rope` hook that changes dtype or shape; as `nsa`.
            dispatch.BackendError: as `nsa`.
        """
        self._check(hidden_states, cu_seqlens, others)
        given = self._given(hidden_states, position_embeddings)
        projected: Tensor = self.o_proj(nsa(**given, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen).flatten(-2))
        return projected

    def forward_aux(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, NSAAux]:
        """`forward` without a graph, and everything computed on the way, such as what was selected (NSAAux)."""
        self._check(hidden_states, cu_seqlens, others)
        with torch.no_grad():
            given = self._given(hidden_states, position_embeddings)
            out, aux = nsa_forward_aux(**given, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
            return self.o_proj(out.flatten(-2)), aux

    def _check(self, hidden_states: Tensor, cu_seqlens: Tensor | None, others: Mapping[str, Any]) -> None:
        instead_of_mask = "pack documents with cu_seqlens instead of padding them"
        refuse_unsupported(others, causal=self.config.causal, instead_of_mask=instead_of_mask)
        check_input(hidden_states, self.hidden_size, self.q_proj, packed=cu_seqlens is not None)

    def _given(self, hidden_states: Tensor, position_embeddings: Any) -> dict[str, Any]:
        """Arguments of `nsa`."""
        q = self._rotate(self._heads(self.q_proj(hidden_states), self.num_heads), position_embeddings)
        k = self._rotate(self._heads(self.k_proj(hidden_states), self.num_kv_heads), position_embeddings)
        v = self._heads(self.v_proj(hidden_states), self.num_kv_heads)
        branches = {}
        for name, project in self.branch_proj.items():
            branch = self._heads(project(hidden_states), self.num_kv_heads)
            branches[name] = self._rotate(branch, position_embeddings) if name.startswith("k") else branch
        gates = None
        if self.gate_proj is not None:
            gates = torch.sigmoid(self.gate_proj(hidden_states)).unflatten(-1, (self.num_heads, 3))
        return {
            "q": q,
            "k": k,
            "v": v,
            **branches,
            "w_k_compress": None if self.w_k_compress is None else self.w_k_compress.to(q.dtype),
            "w_v_compress": None if self.w_v_compress is None else self.w_v_compress.to(v.dtype),
            "gate_proj_weight": self.gate_proj_weight,
            "gates": gates,
            "config": self._config(),
            "backend": self.backend,
        }

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, gate={self.gate!r}, config={self.config}"

    def _config(self) -> NSAConfig:
        if not self.compress:
            return self.config
        return replace(self.config, compress=(self.compress["k"], self.compress["v"]))

    def _heads(self, projected: Tensor, heads: int) -> Tensor:
        split: Tensor = projected.unflatten(-1, (heads, projected.shape[-1] // heads))
        return split

    def _rotate(self, tensor: Tensor, position_embeddings: Any) -> Tensor:
        return apply_rope(self.rope, tensor, position_embeddings)

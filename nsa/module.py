"""NSAttention: an attention layer of a transformer block, with projections and gates around `nsa`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from nsa.api import nsa, nsa_forward_aux
from nsa.common.keywords import PACK
from nsa.common.layers import (
    RotaryHook,
    apply_rope,
    check_context_parallel,
    check_input,
    check_rope,
    head_sizes,
    refuse_unsupported,
    split_heads,
    weight_properties,
)
from nsa.common.parameters import identity_like, local_part, set_values
from nsa.common.replace import replace
from nsa.compression import LinearCompression
from nsa.config import NSAConfig, check_options
from nsa.decoding.api import nsa_with_cache
from nsa.decoding.cache import NSACache
from nsa.decoding.table import PageTable
from nsa.inputs import NSAAux

if TYPE_CHECKING:
    from nsa.distributed.context import ContextParallel


class NSAttention(nn.Module):
    """Self-attention by NSA (arXiv 2502.11089): an attention layer with projections and gates around `nsa`.

    Projections are named as in Llama (q_proj, k_proj, v_proj, o_proj), so weights of such a layer load with
    `strict=False`. Causal unless `config` says otherwise; autoregressive token by token with `NSAConfig.paper()`. There
    is no attention mask: pack documents instead of padding them. `new_cache` creates a cache for generation.

    Args:
        hidden_size: width of the input and output.
        num_heads: H, query heads.
        num_kv_heads: H_kv, key/value heads, a divisor of H. Default: None, which means H.
        head_dim: D, head dim of queries and keys. Default: None, which means hidden_size // num_heads.
        v_head_dim: D_v, head dim of values. Default: None, which means D.
        config: the options of NSA. Modules in its `compress` become submodules of the layer, `compress.k` and
            `compress.v`. Default: None, which means `NSAConfig()`.
        gate: source of the gates. "x": sigmoid(linear(hidden_states)), as in the paper. "q": sigmoid(q . w) per head,
            with the rotated q. None: each branch weighs 1/3. Default: "x".
        compress: "linear": learned maps from blocks to compressed keys and values (LinearCompression) instead of the
            config's `compress`. Default: None, which means the config's.
        compress_proj: learned projections of the pooled means, initially the identity. Default: False.
        separate_kv: separate key and value projections for each branch, as in the paper. Default: False.
        bias: add a bias to the q, k and v projections. Default: False.
        rope: rotary hook `(tensor [...,heads,D], position_embeddings) -> tensor`, applied to queries and to each
            branch's keys; must keep shape and dtype, which under autocast differs from the parameters'. Default: None.
        context_parallel: a nsa.distributed.ContextParallel that divides sequences: inputs and outputs of `forward` are
            this rank's tokens, and position_embeddings must be those of its `positions`. Default: None.
        backend: as in `nsa`. Default: None.
        device: device of the parameters, as in nn.Linear. Default: None.
        dtype: dtype of the parameters, as in nn.Linear. Default: None.

    Raises:
        TypeError: naming an argument of the wrong type, what was expected and what came.
        ValueError: naming an argument out of range, what was expected and what came.

    Examples:
        >>> import torch
        >>> from nsa import NSAConfig, NSAttention
        >>> layer = NSAttention(hidden_size=64, num_heads=4, num_kv_heads=2, config=NSAConfig.paper(window_size=32))
        >>> layer(torch.randn(1, 100, 64)).shape
        torch.Size([1, 100, 64])
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
        context_parallel: ContextParallel | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads, head_dim = head_sizes(hidden_size, num_heads, num_kv_heads, head_dim, v_head_dim)
        check_options(config, {})
        check_rope(rope)
        check_context_parallel(context_parallel, "nsa")
        if gate not in ("x", "q", None):
            raise ValueError(f"gate must be 'x', 'q' or None, got {gate!r}")
        if compress not in ("linear", None):
            raise ValueError(f"compress must be 'linear' or None, got {compress!r}")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim is None else v_head_dim
        self.config = NSAConfig() if config is None else config
        self.gate, self.rope, self.backend = gate, rope, backend
        self.context_parallel = context_parallel

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias, **factory)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=bias, **factory)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.v_head_dim, bias=bias, **factory)
        self.o_proj = nn.Linear(num_heads * self.v_head_dim, hidden_size, bias=False, **factory)
        self.branch_proj = nn.ModuleDict()
        if separate_kv:
            for branch in ("slc", "win"):
                self.branch_proj[f"k_{branch}"] = nn.Linear(hidden_size, self.k_proj.out_features, bias=bias, **factory)
                self.branch_proj[f"v_{branch}"] = nn.Linear(hidden_size, self.v_proj.out_features, bias=bias, **factory)
        self.gate_proj = nn.Linear(hidden_size, num_heads * 3, bias=True, **factory) if gate == "x" else None
        self.gate_proj_weight: nn.Parameter | None = None
        given = zip("kv", self.config.pools, strict=True)
        self.compress = nn.ModuleDict({name: pool for name, pool in given if isinstance(pool, nn.Module)})
        if compress is not None:
            if compress_proj or self.config.compress != "mean":
                other = "compress_proj" if compress_proj else f"a config that compresses by {self.config.compress!r}"
                raise ValueError(f"compress={compress!r} leaves nothing to {other}, got both")
            for name, dim in (("k", self.head_dim), ("v", self.v_head_dim)):
                self.compress[name] = LinearCompression(num_kv_heads, self.config.compress_block_size, dim, **factory)
        self.w_k_compress: nn.Parameter | None = None
        self.w_v_compress: nn.Parameter | None = None
        if gate == "q":
            self.gate_proj_weight = nn.Parameter(torch.empty(num_heads, 3, self.head_dim, **factory))
        if compress_proj:
            self.w_k_compress = nn.Parameter(torch.empty(num_kv_heads, self.head_dim, self.head_dim, **factory))
            self.w_v_compress = nn.Parameter(torch.empty(num_kv_heads, self.v_head_dim, self.v_head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the layer's own parameters: gates to 1/2, projections of means to the identity.

        Call it after `to_empty` on layers created on the meta device, as for nn.Linear.
        """
        if self.gate_proj_weight is not None:
            nn.init.zeros_(self.gate_proj_weight)
        for weight in (self.w_k_compress, self.w_v_compress):
            if weight is not None:
                set_values(weight, identity_like(weight))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: NSACache | None = None,
        counts: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Attend within each sequence or packed document; with a cache, append new tokens to sequences.

        Args:
            hidden_states: `[B,N,hidden_size]`; packed `[T,hidden_size]` with `cu_seqlens`. In the weights' dtype, or
                under autocast any dtype that it casts. With `context_parallel`, this rank's tokens.
            position_embeddings: passed to the `rope` hook; with a cache, those of `cache.table.positions(N)`.
                Default: None.
            cu_seqlens: bounds of packed documents, int32 `[B+1]`, as in `nsa`. Default: None.
            max_seqlen: tokens of the longest document, a hint as in `nsa`. Default: None.
            cache: from `new_cache`; the call is then `nsa_with_cache`, without gradients. Default: None.
            counts: number of real tokens of each sequence, int32 `[B]`, as in `nsa_with_cache`. Default: None.
            others: arguments of other libraries' attention layers (`attention_mask`, `past_key_values`, ...), which
                raise unless they are None or have no effect.

        Returns:
            Same shape and dtype as `hidden_states`; under autocast, its dtype.

        Raises:
            TypeError: `hidden_states` of another dtype; an unknown argument; a `rope` hook that changes the dtype;
                `position_embeddings` without a `rope` hook.
            ValueError: `hidden_states` of another layout, width or device; an argument of `others` that is not
                supported; a `rope` hook that changes the shape.
            RuntimeError: with a cache, as `nsa_with_cache`.
            dispatch.BackendError: as `nsa`.
        """
        self._check(hidden_states, cu_seqlens, others)
        if cache is None and counts is not None:
            raise ValueError("counts goes with cache, got only counts")
        if cache is not None and (cu_seqlens is not None or max_seqlen is not None):
            raise ValueError(f"cu_seqlens and max_seqlen do not go with cache, got {cu_seqlens}, {max_seqlen}")
        if cache is not None and self.context_parallel is not None:
            raise ValueError("cache does not go with context_parallel: a cache holds whole sequences")
        arguments = self._nsa_arguments(hidden_states, position_embeddings)
        if cache is None:
            run = nsa if self.context_parallel is None else self.context_parallel.nsa
            out = run(**arguments, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        else:
            out = nsa_with_cache(**arguments, cache=cache, counts=counts)
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected

    def new_cache(self, table: PageTable, dtype: torch.dtype | None = None) -> NSACache:
        """Create a cache of this layer for the sequences of a table, which all layers of a model share.

        Args:
            table: from `PageTable.empty`.
            dtype: dtype of queries, keys and values; under autocast, autocast's. Default: None, which means that of the
                weights.

        Returns:
            The cache, for `forward`.
        """
        return NSACache(
            self._config(),
            table,
            heads=self.num_heads,
            heads_kv=self.num_kv_heads,
            dim=self.head_dim,
            dim_v=self.v_head_dim,
            separate_kv=bool(self.branch_proj),
            dtype=weight_properties(self.q_proj)[0] if dtype is None else dtype,
        )

    def forward_aux(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, NSAAux]:
        """`forward` without an autograd graph, and intermediate results such as the selected blocks.

        Args:
            hidden_states: as in `forward`, and so are all other arguments.
            position_embeddings: passed to the `rope` hook. Default: None.
            cu_seqlens: bounds of packed documents, int32 `[B+1]`. Default: None.
            max_seqlen: tokens of the longest document. Default: None.
            others: as in `forward`.

        Returns:
            The output of `forward`, and NSAAux.
        """
        if self.context_parallel is not None:
            raise ValueError("forward_aux does not go with context_parallel: call `forward`")
        self._check(hidden_states, cu_seqlens, others)
        with torch.no_grad():
            arguments = self._nsa_arguments(hidden_states, position_embeddings)
            out, aux = nsa_forward_aux(**arguments, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
            return self.o_proj(out.flatten(-2)), aux

    def _check(self, hidden_states: Tensor, cu_seqlens: Tensor | None, others: Mapping[str, Any]) -> None:
        refuse_unsupported(others, causal=self.config.causal, instead_of_mask=PACK)
        check_input(hidden_states, self.hidden_size, self.q_proj, packed=cu_seqlens is not None)

    def _nsa_arguments(self, hidden_states: Tensor, position_embeddings: Any) -> dict[str, Any]:
        """q, k, v and the other arguments of `nsa` except the bounds of documents."""
        heads, kv_heads, dim, v_dim = self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim
        q = split_heads("q_proj", self.q_proj(hidden_states), heads, dim)
        keys = {"k": split_heads("k_proj", self.k_proj(hidden_states), kv_heads, dim)}
        values = {"v": split_heads("v_proj", self.v_proj(hidden_states), kv_heads, v_dim)}
        for name, project in self.branch_proj.items():
            if name.startswith("k"):
                keys[name] = split_heads(name, project(hidden_states), kv_heads, dim)
            else:
                values[name] = split_heads(name, project(hidden_states), kv_heads, v_dim)
        gates = None
        if self.gate_proj is not None:
            gates = split_heads("gate_proj", torch.sigmoid(self.gate_proj(hidden_states)), heads, 3)
        return {
            "q": self._rotate(q, position_embeddings),
            **{name: self._rotate(k, position_embeddings) for name, k in keys.items()},
            **values,
            "w_k_compress": None if self.w_k_compress is None else local_part(self.w_k_compress).to(q.dtype),
            "w_v_compress": None if self.w_v_compress is None else local_part(self.w_v_compress).to(values["v"].dtype),
            "gate_proj_weight": None if self.gate_proj_weight is None else local_part(self.gate_proj_weight),
            "gates": gates,
            "config": self._config(),
            "backend": self.backend,
        }

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, gate={self.gate!r}, config={self.config}"

    def _config(self) -> NSAConfig:
        if not self.compress:
            return self.config
        k, v = self.config.pools
        pools: Any = getattr(self.compress, "k", k), getattr(self.compress, "v", v)
        return replace(self.config, compress=pools)

    def _rotate(self, tensor: Tensor, position_embeddings: Any) -> Tensor:
        return apply_rope(self.rope, tensor, position_embeddings)

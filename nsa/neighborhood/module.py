"""NeighborhoodAttention, the function with projections, and NeighborhoodAttentionLayer, with norm and residual."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from nsa.common.checks import check_choice, check_eps, is_number
from nsa.common.derivatives import needs_grad
from nsa.common.keywords import ONE_BY_ONE
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
from nsa.neighborhood.api import neighborhood_attention
from nsa.neighborhood.cache import NeighborhoodCache
from nsa.neighborhood.operators import ALGORITHMS, Window

if TYPE_CHECKING:
    from nsa.distributed.context import ContextParallel


class NeighborhoodAttention(nn.Module):
    """Self-attention of each token to the `kernel_size` tokens around it (NATTEN, arXiv 2204.07143, in one dimension).

    Projections are named as in NSAttention and Llama: q_proj, k_proj, v_proj, o_proj.

    Args:
        hidden_size: width of the input and output.
        num_heads: H, query heads.
        num_kv_heads: H_kv, key/value heads, a divisor of H. Default: None, which means H.
        kernel_size: keys of a window, at least 1; see `neighborhood_attention`. Default: 7.
        dilation: distance between neighbors in tokens, at least 1. Default: 1.
        softmax_scale: factor of the logits. Default: None, which means 1/sqrt(D).
        boundary: "truncate" or "shift", as in `neighborhood_attention`. Default: "truncate".
        causal: attend only to keys up to the token itself. Default: False.
        head_dim: D. Default: None, which means hidden_size // num_heads.
        bias: add a bias to the projections, including o_proj. Default: False.
        dropout: probability that an element of the output is zeroed in training, after o_proj. Attention probabilities
            are never dropped: no kernel stores them. Default: 0.
        rope: rotary hook `(tensor [B,N,heads,D], position_embeddings) -> tensor`, applied to queries and keys; must
            keep shape and dtype, which under autocast differs from the parameters'. Default: None.
        algorithm: "auto", "flash", "band" or "dense", as in `neighborhood_attention`. Default: "auto".
        context_parallel: a nsa.distributed.ContextParallel that divides sequences: inputs and outputs of `forward` are
            this rank's tokens, and position_embeddings must be those of its `positions`. Default: None.
        backend: as in `neighborhood_attention`. Default: None.
        device: device of the parameters, as in nn.Linear. Default: None.
        dtype: dtype of the parameters, as in nn.Linear. Default: None.

    Raises:
        TypeError: naming an argument of the wrong type, what was expected and what came.
        ValueError: naming an argument out of range, what was expected and what came.

    Examples:
        >>> import torch
        >>> from nsa import NeighborhoodAttention
        >>> layer = NeighborhoodAttention(hidden_size=64, num_heads=4, kernel_size=5)
        >>> layer(torch.randn(1, 100, 64)).shape
        torch.Size([1, 100, 64])
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
        context_parallel: ContextParallel | None = None,
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
        check_context_parallel(context_parallel, "neighborhood_attention")
        if not is_number(dropout):
            raise TypeError(f"dropout must be a number, got {dropout!r}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be from 0 to 1, got {dropout}")
        self.rope, self.algorithm, self.backend = rope, algorithm, backend
        self.context_parallel = context_parallel

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias, **factory)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias, **factory)
        self.v_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias, **factory)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias, **factory)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        *,
        cache: NeighborhoodCache | None = None,
        **others: Any,
    ) -> Tensor:
        """Attend within each sequence; with a cache, hidden_states are the tokens after the cached ones.

        Args:
            hidden_states: `[B,N,hidden_size]`, in the weights' dtype, or under autocast any dtype that it casts.
            position_embeddings: passed to the `rope` hook; with a cache, those of `cache.positions(N)`. Default: None.
            cache: from `new_cache`; without gradients. Default: None.
            others: arguments of other libraries' attention layers, which raise as in NSAttention.

        Returns:
            Same shape and dtype as `hidden_states`; under autocast, its dtype.

        Raises:
            TypeError: `hidden_states` of another dtype; an unknown argument; a `rope` hook that changes the dtype;
                `position_embeddings` without a `rope` hook.
            ValueError: `hidden_states` of another layout, width or device; an argument of `others` that is not
                supported; a `rope` hook that changes the shape; a cache of other sizes, or without `causal=True`.
            RuntimeError: with a cache if gradients are needed, or if another thread is using it.
            dispatch.BackendError: as `neighborhood_attention`.
        """
        refuse_unsupported(others, causal=self.window.causal, instead_of_mask=ONE_BY_ONE)
        check_input(hidden_states, self.hidden_size, self.q_proj, packed=None)
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        q = self._rotate(split_heads("q_proj", self.q_proj(hidden_states), heads, dim), position_embeddings)
        k = self._rotate(split_heads("k_proj", self.k_proj(hidden_states), kv_heads, dim), position_embeddings)
        v = split_heads("v_proj", self.v_proj(hidden_states), kv_heads, dim)
        if cache is None:
            out = self._attend(q, k, v)
        else:
            if self.context_parallel is not None:
                raise ValueError("cache does not go with context_parallel: a cache follows whole sequences")
            self._check_cache(cache, q, k, v)
            with cache.thread.alone():
                k, v = cache.followed_by(k, v)
                out = self._attend(q, k, v)
                cache.keep(k, v, q.shape[1])
        result: Tensor = self.dropout(self.o_proj(out.flatten(-2)))
        return result

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parallel = self.context_parallel
        run = neighborhood_attention if parallel is None else parallel.neighborhood_attention
        window = self.window  # spelled out: Dynamo of torch 2.6 and 2.7 cannot trace asdict
        out: Tensor = run(
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
        return out

    def new_cache(self, batch: int, dtype: torch.dtype | None = None) -> NeighborhoodCache:
        """Create a rolling cache for this layer's window.

        Args:
            batch: B, sequences.
            dtype: dtype of keys and values; under autocast, autocast's. Default: None, which means that of the weights.

        Returns:
            The cache, for `forward`.

        Raises:
            ValueError: without `causal=True`.
        """
        self._check_causal()
        own_dtype, device = weight_properties(self.k_proj)
        return NeighborhoodCache(
            batch,
            heads_kv=self.num_kv_heads,
            dim=self.head_dim,
            kernel_size=self.window.kernel_size,
            dilation=self.window.dilation,
            dtype=own_dtype if dtype is None else dtype,
            device=device,
        )

    def _check_cache(self, cache: NeighborhoodCache, q: Tensor, k: Tensor, v: Tensor) -> None:
        if not isinstance(cache, NeighborhoodCache):
            raise TypeError(f"cache must be a NeighborhoodCache, got {type(cache).__name__}")
        self._check_causal()
        for name in ("kernel_size", "dilation"):
            own, other = getattr(self.window, name), getattr(cache, name)
            if own != other:
                raise ValueError(f"cache must have {name}={own}, got {other}")
        if needs_grad(q, k, v):
            raise RuntimeError("a call with a cache does not support gradients: call it under torch.no_grad()")

    def _check_causal(self) -> None:
        if not self.window.causal:
            raise ValueError("cache goes with causal=True: windows reach later tokens, got causal=False")

    def extra_repr(self) -> str:
        options = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, **asdict(self.window)}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    def _rotate(self, tensor: Tensor, position_embeddings: Any) -> Tensor:
        return apply_rope(self.rope, tensor, position_embeddings)


class NeighborhoodAttentionLayer(nn.Module):
    """`x + attention(layer_norm(x))`: NeighborhoodAttention as the first half of a pre-norm transformer block.

    Equivalent to LigerFusedNeighborhoodAttentionLayer of Liger-Kernel; docs/neighborhood_attention.md explains how to
    load that layer's weights.

    Args:
        hidden_size: width of the input and output.
        num_heads: H, query heads.
        num_kv_heads: H_kv, key/value heads, a divisor of H. Default: None, which means H.
        norm_eps: epsilon of the LayerNorm, at least 0. Default: 1e-5.
        device: device of the parameters, as in nn.Linear. Default: None.
        dtype: dtype of the parameters, as in nn.Linear. Default: None.
        attention: further options of NeighborhoodAttention, such as `kernel_size`; `dropout` applies before the
            addition to x.

    Raises:
        TypeError: naming an argument of the wrong type, what was expected and what came.
        ValueError: naming an argument out of range, what was expected and what came.

    Examples:
        >>> import torch
        >>> from nsa import NeighborhoodAttentionLayer
        >>> layer = NeighborhoodAttentionLayer(hidden_size=64, num_heads=4, kernel_size=5)
        >>> layer(torch.randn(1, 100, 64)).shape
        torch.Size([1, 100, 64])
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
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention = NeighborhoodAttention(hidden_size, num_heads, num_kv_heads, **factory, **attention)
        check_eps(norm_eps, "norm_eps")
        self.layer_norm = nn.LayerNorm(hidden_size, eps=norm_eps, **factory)

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None) -> Tensor:
        """Attend within each sequence and add the result to the input.

        Args:
            hidden_states: `[B,N,hidden_size]`, in the weights' dtype, or under autocast any dtype that it casts.
            position_embeddings: passed to the `rope` hook. Default: None.

        Returns:
            Same shape and dtype as `hidden_states`, under autocast too.

        Raises:
            TypeError, ValueError: as NeighborhoodAttention.
            dispatch.BackendError: as `neighborhood_attention`.
        """
        check_input(hidden_states, self.attention.hidden_size, self.attention.q_proj, packed=None)
        norm, given = self.layer_norm, hidden_states.dtype
        if norm.weight.dtype in (given, torch.float32):
            normed = norm(hidden_states)
        else:  # autocast on a CPU does not cast layer_norm's inputs, which must have equal dtypes
            wide = torch.promote_types(given, norm.weight.dtype)
            x, weight, bias = (tensor.to(wide) for tensor in (hidden_states, norm.weight, norm.bias))
            normed = layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
        update = self.attention(normed, position_embeddings)
        result: Tensor = hidden_states + update.to(hidden_states.dtype)
        return result

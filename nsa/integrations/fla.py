"""Weights of NSA layers of flash-linear-attention (fla.layers.NativeSparseAttention) in NSAttention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.common.checks import is_finite
from nsa.common.layers import RotaryHook
from nsa.config import NSAConfig
from nsa.decoding.cache import NSACache
from nsa.module import NSAttention

NAMES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "o_proj", "g_proj": "gate_proj"}
"""Names of fla's projections, and of ours."""
INV_FREQ = "rotary.inv_freq"
"""A buffer of fla's layer."""


def fla_config(block_size: int = 64, block_counts: int = 16, window_size: int | None = 512) -> NSAConfig:
    """The options that match fla: means of blocks without overlap, the first block and a token's last two forced, and
    one selection per token and group.

    Args:
        block_size: tokens of a block. Default: 64.
        block_counts: blocks that a token selects, at least the three that are forced. Default: 16.
        window_size: keys of the window, the token included; None: no window. Default: 512.

    Returns:
        The options.

    Raises:
        TypeError: for block counts that differ by token.
        ValueError: for fewer blocks than are forced.

    Examples:
        >>> from nsa.integrations.fla import fla_config
        >>> fla_config(block_counts=8).num_selected_blocks
        8
    """
    if isinstance(block_counts, Tensor):
        raise TypeError("block_counts must be an integer: NSA selects equally many blocks for all tokens, got a tensor")
    return NSAConfig.paper(
        compress_block_size=block_size,
        compress_stride=block_size,
        select_block_size=block_size,
        num_selected_blocks=block_counts,
        window_size=window_size or 0,
    )


@dataclass(frozen=True)
class FlaRotary:
    """fla's rotary embedding as a `rope` hook: rotates halves, as Llama does, and rounds cos and sin to the heads'
    dtype.

    Args:
        theta: its base. Default: 10000.
    """

    theta: float = 10000.0

    def __call__(self, heads: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate `[...,N,heads,D]` by positions `[N]` or `[B,N]`; None: from 0 on."""
        if positions is None:
            positions = torch.arange(heads.shape[-3], device=heads.device)
        elif positions.shape not in (heads.shape[-3:-2], heads.shape[:-2]):
            wanted = f"{list(heads.shape[-3:-2])} or {list(heads.shape[:-2])}"
            raise ValueError(f"position_embeddings must be positions {wanted}, got shape {list(positions.shape)}")
        wide = torch.promote_types(heads.dtype, torch.float32)
        angles = positions.to(wide)[..., None, None] * self.frequencies(heads.shape[-1], wide, heads.device)
        cos, sin = (table.to(heads.dtype).to(wide) for table in (angles.cos(), angles.sin()))
        first, second = heads.to(wide).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(heads.dtype)

    def frequencies(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Angles from one position to the next `[D/2]`."""
        exponents = torch.arange(0, dim, 2, dtype=dtype, device=device) / dim
        return 1.0 / self.theta**exponents


class FlaAttention(NSAttention):
    """NSAttention with FlaRotary: `position_embeddings` are positions, computed by the layer if None.

    Positions of packed documents continue from one to the next, since only differences matter.
    """

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, *, cache: NSACache | None = None, **others: Any
    ) -> Tensor:
        """As NSAttention.forward. With a cache, positions are those of the table's next tokens.

        Raises:
            ValueError: also if `context_parallel` is set without positions, because a rank's do not begin at 0.
        """
        if self.context_parallel is not None and position_embeddings is None:
            raise ValueError(
                "position_embeddings must be this rank's with context_parallel: those of its positions(N), or "
                "positions(N, cu_seqlens=...), got None"
            )
        if cache is not None and position_embeddings is None:
            position_embeddings = cache.table.positions(hidden_states.shape[-2])
        return super().forward(hidden_states, position_embeddings, cache=cache, **others)


def layer_from_fla(
    state: Mapping[str, Tensor], config: NSAConfig | None = None, rope: RotaryHook | float | None = 10000.0
) -> NSAttention:
    """Build an NSAttention with the weights and rotary embedding of an NSA layer of fla; sizes follow from the weights.

    Args:
        state: the layer's state_dict: q_proj, k_proj, v_proj, g_proj, o_proj, with or without biases of q, k and v.
        config: from `fla_config`. Default: None, which means `fla_config()`.
        rope: a number for fla's rotary embedding with this `rope_theta`, which is not among the weights; a hook as in
            NSAttention; or None for no rotation. Default: 10000, as in fla.

    Returns:
        The layer, on the weights' device and in their dtype. With fla's rotary it computes positions itself, also with
        a cache; `position_embeddings` may override them, `[N]` or `[B,N]`, and must be given if its `context_parallel`
        is set.

    Raises:
        TypeError: for a rope that is none of these.
        ValueError: naming weights that are missing, unknown or of sizes that do not fit each other; for a theta that is
            not greater than 0, or not that of the state's `rotary.inv_freq`, if it is there.

    Examples:
        >>> import torch
        >>> from nsa.integrations.fla import layer_from_fla
        >>> rows = {"q_proj": 64, "k_proj": 16, "v_proj": 16, "g_proj": 12}  # 4 heads of 16, 1 of keys, 3 gates a head
        >>> state = {f"{name}.weight": torch.randn(count, 32) for name, count in rows.items()}
        >>> layer = layer_from_fla({**state, "o_proj.weight": torch.randn(32, 64)})
        >>> layer(torch.randn(1, 100, 32)).shape
        torch.Size([1, 100, 32])
    """
    wanted = {f"{name}.weight" for name in NAMES}
    biases = {f"{name}.bias" for name in ("q_proj", "k_proj", "v_proj")} & state.keys()
    given = state.keys() - {INV_FREQ}
    if given != wanted | biases or len(biases) not in (0, 3):
        raise ValueError(f"state must have {sorted(wanted)}, and three biases or none, got {sorted(given)}")
    q, k, v, o, gate = (state[f"{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj"))
    heads = gate.shape[0] // 3
    fits = heads > 0 and gate.shape[0] % 3 == 0 and q.shape[0] % heads == 0 and k.shape[0] % (q.shape[0] // heads) == 0
    if not fits or v.shape != k.shape or o.shape != q.shape[::-1]:
        shapes = {name: list(state[name].shape) for name in sorted(wanted)}
        raise ValueError(f"state must have three gates a head and heads of one size, got {shapes}")
    dim = q.shape[0] // heads
    layer_class, hook = NSAttention, rope
    if isinstance(rope, (int, float)) and not isinstance(rope, bool):
        layer_class, hook = FlaAttention, _rotary(rope, dim, state.get(INV_FREQ))
    layer = layer_class(
        q.shape[1],
        heads,
        k.shape[0] // dim,
        head_dim=dim,
        config=fla_config() if config is None else config,
        gate="x",
        bias=bool(biases),
        rope=hook,  # type: ignore[arg-type]  # a bool raises
        device=q.device,
        dtype=q.dtype,
    )
    own = {f"{NAMES[name.partition('.')[0]]}.{name.partition('.')[2]}": state[name] for name in given}
    own["gate_proj.bias"] = torch.zeros_like(gate[:, 0])
    layer.load_state_dict(own)
    return layer


def _rotary(theta: float, dim: int, inv_freq: Tensor | None) -> FlaRotary:
    """fla's rotary embedding, checked against its buffer if there is one."""
    if not (is_finite(theta) and theta > 0):
        raise ValueError(f"rope must be greater than 0 as fla's rope_theta, got {theta}")
    rotary = FlaRotary(float(theta))
    if inv_freq is not None:
        own = rotary.frequencies(dim, torch.float64, inv_freq.device)
        rtol = 2**-19 + torch.finfo(inv_freq.dtype).eps  # rounding of powers in fp32, and of the buffer
        if own.shape != inv_freq.shape or not torch.allclose(inv_freq.double(), own, rtol=rtol, atol=0):
            raise ValueError(
                f"rope must be the rope_theta of the state's {INV_FREQ} = {inv_freq.tolist()}, got {theta}"
            )
    return rotary

"""Weights of NSA layers of flash-linear-attention (fla.layers.NativeSparseAttention) in NSAttention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nsa.common.layers import RotaryHook
from nsa.config import NSAConfig
from nsa.module import NSAttention

NAMES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "o_proj", "g_proj": "gate_proj"}
"""fla's projections, and ours."""


def fla_config(block_size: int = 64, block_counts: int = 16, window_size: int | None = 512) -> NSAConfig:
    """The options that compute what fla does: means of blocks that do not overlap, the first block and a token's last
    two forced, a selection per token and group.

    Args:
        block_size: tokens of a block. Default: 64.
        block_counts: blocks that a token selects, at least the three that are forced. Default: 16.
        window_size: keys of the window, the token included; None: no window. Default: 512.

    Returns:
        The options.

    Raises:
        TypeError: for block counts that differ by token.
        ValueError: for fewer blocks than are forced.

    Example:
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


def layer_from_fla(
    state: Mapping[str, Tensor], config: NSAConfig | None = None, rope: RotaryHook | None = None
) -> NSAttention:
    """NSAttention with the weights of an NSA layer of fla, whose sizes they tell.

    Args:
        state: the layer's state_dict: q_proj, k_proj, v_proj, g_proj, o_proj, with or without biases of q, k and v.
        config: from `fla_config`. Default: None, which means `fla_config()`.
        rope: as in NSAttention; fla rotates halves, as Llama does, with `rope_theta` and no scaling. Default: None.

    Returns:
        The layer, on the weights' device and in their dtype.

    Raises:
        ValueError: naming weights that are missing, unknown or of sizes that do not fit each other.

    Example:
        >>> import torch
        >>> from nsa.integrations.fla import layer_from_fla
        >>> rows = {"q_proj": 64, "k_proj": 16, "v_proj": 16, "g_proj": 12}  # 4 heads of 16, 1 of keys, 3 gates a head
        >>> state = {f"{name}.weight": torch.randn(count, 32) for name, count in rows.items()}
        >>> layer = layer_from_fla({**state, "o_proj.weight": torch.randn(32, 64)})
        >>> layer(torch.randn(1, 100, 32)).shape
        torch.Size([1, 100, 32])
    """
    buffers = {name for name in state if name.startswith("rotary.")}
    wanted = {f"{name}.weight" for name in NAMES}
    biases = {f"{name}.bias" for name in ("q_proj", "k_proj", "v_proj")} & state.keys()
    given = state.keys() - buffers
    if given != wanted | biases or len(biases) not in (0, 3):
        raise ValueError(f"state must have {sorted(wanted)}, and three biases or none, got {sorted(given)}")
    q, k, gate = (state[f"{name}.weight"] for name in ("q_proj", "k_proj", "g_proj"))
    heads = gate.shape[0] // 3
    if gate.shape[0] % 3 or q.shape[0] % heads or k.shape[0] % (q.shape[0] // heads):
        shapes = {name: list(state[name].shape) for name in sorted(wanted)}
        raise ValueError(f"state must have three gates a head and heads of one size, got {shapes}")
    dim = q.shape[0] // heads
    layer = NSAttention(
        q.shape[1],
        heads,
        k.shape[0] // dim,
        head_dim=dim,
        config=fla_config() if config is None else config,
        gate="x",
        bias=bool(biases),
        rope=rope,
        device=q.device,
        dtype=q.dtype,
    )
    own = {f"{NAMES[name.partition('.')[0]]}.{name.partition('.')[2]}": state[name] for name in given}
    own["gate_proj.bias"] = torch.zeros_like(gate[:, 0])
    layer.load_state_dict(own)
    return layer

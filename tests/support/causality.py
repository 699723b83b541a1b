"""Causality by perturbation: other values after a position, bit-identical results up to it. For every backend.

`assert_causal(run, tokens, config)` takes any `run(q, k, v, **fixed) -> (out, NSAAux)` on inputs `[B,N,heads,D]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nsa import NSAAux, NSAConfig

Run = Callable[..., tuple[Tensor, NSAAux]]
BRANCHES = ("o_cmp", "o_slc", "o_win")
LSES = ("lse_cmp", "lse_slc", "lse_win")


def perturbed(tensors: Iterable[Tensor], after: int) -> list[Tensor]:
    """The tensors with every token behind position `after` replaced by other, larger values."""
    changed = []
    for tensor in tensors:
        other = tensor.clone()
        other[:, after + 1 :] = torch.randn_like(other[:, after + 1 :]) * 3 + 1
        changed.append(other)
    return changed


def assert_causal(
    run: Run, tensors: tuple[Tensor, Tensor, Tensor], config: NSAConfig, positions: Iterable[int]
) -> None:
    """No result at or before a position depends on anything after it: each branch, its LSE, the whole, the selection.

    Token mode: with free selection. Tile mode: with the selection fixed at every position, and with free selection
    at the positions that end a tile (a tile's scores see the whole tile).
    """
    out, aux = run(*tensors)
    tokens = tensors[0].shape[1]
    for at in positions:
        changed = perturbed(tensors, at)
        ends_tile = (at + 1) % config.q_tile_size == 0 or at == tokens - 1
        if ends_tile:
            free_out, free_aux = run(*changed)
            _assert_same_until(at, out, aux, free_out, free_aux, f"free selection, perturbed after {at}")
            tiles = (at + 1) // config.q_tile_size
            for name in ("indices", "cmp_indices"):
                before, after = getattr(aux, name), getattr(free_aux, name)
                assert before is None or torch.equal(before[:, :, :tiles], after[:, :, :tiles]), f"{name} after {at}"
        if not config.token_mode:
            fixed: dict[str, Any] = {"indices": aux.indices, "cmp_indices": aux.cmp_indices}
            fixed_out, fixed_aux = run(*changed, **fixed)
            _assert_same_until(at, out, aux, fixed_out, fixed_aux, f"fixed selection, perturbed after {at}")


def _assert_same_until(at: int, out: Tensor, aux: NSAAux, new_out: Tensor, new_aux: NSAAux, what: str) -> None:
    assert torch.equal(out[:, : at + 1], new_out[:, : at + 1]), f"out, {what}"
    for name in BRANCHES:
        assert torch.equal(getattr(aux, name)[:, : at + 1], getattr(new_aux, name)[:, : at + 1]), f"{name}, {what}"
    for name in LSES:
        before, after = getattr(aux, name), getattr(new_aux, name)
        assert torch.equal(before[..., : at + 1], after[..., : at + 1]), f"{name}, {what}"

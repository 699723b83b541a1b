"""Causality by perturbation: other values after a position, bit-identical results up to it. For every backend.

`assert_causal(run, tokens, config)` takes any `run(q, k, v, **fixed) -> (out, NSAAux)` on inputs `[B,N,heads,D]`; with
fewer queries than keys they are the last tokens.
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
    """The tensors with every token behind position `after` replaced by other, larger values; all end alike."""
    given = list(tensors)
    tokens = max(tensor.shape[1] for tensor in given)
    changed = []
    for tensor in given:
        other = tensor.clone()
        behind = slice(after + 1 - (tokens - tensor.shape[1]), None)
        other[:, behind] = torch.randn_like(other[:, behind]) * 3 + 1
        changed.append(other)
    return changed


def assert_causal(
    run: Run, tensors: tuple[Tensor, Tensor, Tensor], config: NSAConfig, positions: Iterable[int]
) -> None:
    """No result at or before a position depends on anything after it: each branch, its LSE, the whole, the selection.

    Token mode: with free selection. Tile mode: with the selection fixed at every position, and with free selection
    at the positions that end a tile (a tile's scores see the whole tile).

    Args:
        positions: of queries, counted from the first key.
    """
    out, aux = run(*tensors)
    tokens, first = tensors[1].shape[1], tensors[1].shape[1] - tensors[0].shape[1]
    for at in positions:
        row = at - first
        changed = perturbed(tensors, at)
        ends_tile = (at + 1) % config.q_tile_size == 0 or at == tokens - 1
        if ends_tile:
            free_out, free_aux = run(*changed)
            _assert_same_until(row, out, aux, free_out, free_aux, f"free selection, perturbed after {at}")
            tiles = (at + 1) // config.q_tile_size - first // config.q_tile_size
            for name in ("indices", "cmp_indices"):
                before, after = getattr(aux, name), getattr(free_aux, name)
                assert before is None or torch.equal(before[:, :, :tiles], after[:, :, :tiles]), f"{name} after {at}"
        if not config.token_mode:
            fixed: dict[str, Any] = {"indices": aux.indices, "cmp_indices": aux.cmp_indices}
            fixed_out, fixed_aux = run(*changed, **fixed)
            _assert_same_until(row, out, aux, fixed_out, fixed_aux, f"fixed selection, perturbed after {at}")


def _assert_same_until(row: int, out: Tensor, aux: NSAAux, new_out: Tensor, new_aux: NSAAux, what: str) -> None:
    assert torch.equal(out[:, : row + 1], new_out[:, : row + 1]), f"out, {what}"
    for name in BRANCHES:
        assert torch.equal(getattr(aux, name)[:, : row + 1], getattr(new_aux, name)[:, : row + 1]), f"{name}, {what}"
    for name in LSES:
        before, after = getattr(aux, name), getattr(new_aux, name)
        assert torch.equal(before[..., : row + 1], after[..., : row + 1]), f"{name}, {what}"

"""A call of the kernel of window, forced blocks, combine and gate (attend/window_combine.py), and checks of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.kv_outer_cases import Inputs, check_gated, make


@dataclass(frozen=True)
class Case:
    """Tokens of a sequence, or of documents."""

    tokens: int | list[int]
    group: int = 16
    kv_heads: int = 1
    dim: int = 64
    window: int = 200
    forced: tuple[int, int] = (1, 2)
    beside: int = 2
    """Slots for blocks that are not forced."""
    first: int = 0
    """Of the queries."""
    behind: int = 0
    """Rows of no document."""
    size: int = 64
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, device: str) -> Inputs:
        options: dict[str, Any] = {"size": self.size, "batch": self.batch, "dtype": self.dtype, "behind": self.behind}
        count = sum(self.forced) + self.beside
        return make(
            self.tokens, self.group, self.kv_heads, self.dim, count=count, forced=self.forced, device=device, **options
        )

    def in_window(self, inputs: Inputs) -> Inputs:
        """The same, where each token sees its window."""
        lengths = [self.tokens] if isinstance(self.tokens, int) else self.tokens
        near = torch.zeros_like(inputs.visible)
        start = 0
        for length in lengths:
            here, position = slice(start, start + length), torch.arange(length)
            distance = position[:, None] - position
            near[:, :, here, here] = ((distance >= 0) & (distance < self.window)).to(near.device)
            start += length
        return replace(inputs, visible=near)

    def run(self, inputs: Inputs, gating: Any = None) -> tuple[Tensor, ...]:
        """o, lse, o_win and lse_win; NaN where nothing was written."""
        from cute_kernels.attend.kv_outer import kv_outer_forward
        from cute_kernels.attend.window_combine import WindowBranch

        q = inputs.q[:, self.first :]
        sums = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device=q.device)
        window = WindowBranch(self.window - 1, torch.full_like(q, math.nan), sums)
        how: dict[str, Any] = {"size": self.size, "scale": inputs.scale, "packed": inputs.packed, "gating": gating}
        how |= {"first_token": self.first, "init": self.forced[0], "local": self.forced[1], "window": window}
        o, lse = kv_outer_forward(q, inputs.k, inputs.v, inputs.indices[:, :, self.first :], **how)
        assert window.o is not None
        return o, lse, window.o, sums

    def check(self, device: str) -> None:
        inputs = self.inputs(device)
        o, lse, o_win, lse_win = self.run(inputs)
        selected = inputs.assert_attends(o, lse, first=self.first)
        assert not o.transpose(1, 2)[~selected].any()
        assert (lse[~selected] == -math.inf).all()
        self.in_window(inputs).assert_attends(o_win, lse_win, "o_win", self.first)
        assert not lse.isnan().any()
        assert lse_win.isnan().any() == (self.behind > 0), "rows of no query are left alone"

    def check_gated(self, gates: str, device: str) -> None:
        inputs = self.inputs(device)
        check_gated(inputs.q[:, self.first :], gates, lambda gating: self.run(inputs, gating))

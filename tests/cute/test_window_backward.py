"""The split backward of the window (attend/window_backward.py), alone and with local selected blocks, against fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import cases
from tests.support.attention_gradients import Branch, check_gradients, gated_branch, normal_inputs
from tests.support.hardware import ATOMIC_FREE

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported and while it compiles
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Inputs:
    """What the backward takes; `local` is of the second branch, the selected one: l' and local blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    branches: list[Branch]
    left: int
    local: tuple[int, int] | None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def run(self) -> list[Tensor]:
        """Into memory that holds NaN."""
        from cute_kernels.attend.window_backward import LocalSelected, window_backward

        window, *others = self.branches
        local_selected = None
        if self.local is not None:
            local_selected = LocalSelected(others[0].lse, others[0].delta, *self.local)
        into = [torch.full_like(x, math.nan) for x in (self.q, self.k, self.v)]
        how: dict[str, Any] = {"left": self.left, "scale": self.scale, "local_selected": local_selected}
        window_backward(self.q, self.k, self.v, self.do, window.lse, window.delta, into=(*into,), **how)
        return into

    def check(self) -> list[Tensor]:
        got = self.run()
        check_gradients(got, self.q, self.k, self.v, self.do, self.branches, self.scale)
        return got


def make(
    tokens: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 128,
    *,
    left: int = 511,
    local: tuple[int, int] | None = None,
    batch: int = 1,
    dtype: torch.dtype = BF16,
    device: str = "cuda",
) -> Inputs:
    """Normal inputs. The second branch also sees the first key; lse is shifted as by the logarithm of a gate."""
    generator = torch.Generator(device).manual_seed(1)
    tensors = normal_inputs(tokens, tokens, heads, kv_heads, dim, batch=batch, dtype=dtype, generator=generator)
    row = torch.arange(tokens, device=device)[:, None]
    key = row.T
    branches = [gated_branch(*tensors, (key <= row) & (key >= row - left), generator)]
    if local is not None:
        size, blocks = local
        pairs = (key <= row) & (key >= (row // size - blocks + 1) * size)
        branches.append(gated_branch(*tensors, pairs, generator, among=pairs | (key == 0)))
    return Inputs(*tensors, branches, left, local)


LOCAL_BLOCKS = [None, (64, 2)]
CASES: list[tuple[int, dict[str, Any]]] = [
    *(
        (tokens, {"local": local})
        for tokens in (1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000, 2049)
        for local in LOCAL_BLOCKS
    ),
    *((1100, {"left": left, "local": local}) for left in (127, 128, 190, 191, 192, 4000) for local in LOCAL_BLOCKS),
    *((700, {"left": left}) for left in (0, 1, 62, 63, 64, 65)),
    *((1500, {"local": local}) for local in [(64, 1), (64, 8), (128, 1), (128, 3), (192, 2), (256, 2)]),
    # Callers pass no wider windows than the sequence; local blocks may be wider
    *((tokens, {"left": tokens - 1, "local": (64, 2)}) for tokens in (1, 100, 128)),
]


@pytest.mark.cuda
@ATOMIC_FREE
@pytest.mark.parametrize(("tokens", "options"), CASES, ids=str)
def test_gradients(tokens: int, options: dict[str, Any]) -> None:
    make(tokens, **options).check()


@pytest.mark.cuda
@ATOMIC_FREE
@pytest.mark.parametrize(
    ("group", "dim", "dtype", "local"),
    cases.product([1, 2, 16], [64, 128], [BF16, FP16], LOCAL_BLOCKS, cover=2),
    ids=str,
)
def test_groups(group: int, dim: int, dtype: torch.dtype, local: tuple[int, int] | None) -> None:
    heads = max(group, 2)
    make(900, heads, heads // group, dim, left=255, local=local, dtype=dtype, batch=2).check()


@pytest.mark.cuda
@ATOMIC_FREE
@pytest.mark.parametrize("local", LOCAL_BLOCKS, ids=str)
def test_rows_without_statistics(local: tuple[int, int] | None) -> None:
    inputs = make(600, local=local)
    branches = []
    for i, branch in enumerate(inputs.branches):
        lse, delta = branch.lse.clone(), branch.delta.clone()
        rows = slice(100 + 50 * i, 300)
        lse[..., rows], delta[..., rows] = math.inf if i else -math.inf, math.nan
        branches.append(replace(branch, lse=lse, delta=delta))
    dq, *_ = replace(inputs, branches=branches).check()
    assert not dq[:, 150:300].any()


@pytest.mark.cuda_extra
def test_nothing_to_do() -> None:
    dq, dk, dv = make(0, 1, 1, 64, device="cpu").run()
    assert dq.numel() == dk.numel() == dv.numel() == 0

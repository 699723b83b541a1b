"""The kernel of token_blocks.py, as the compiler's PTX, interpreted on a CPU (tests/ptx.py), against the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, reference
from nsa.tensors import NSAInputs
from tests.helpers import make_qkv
from tests.test_token_blocks import check_chosen
from tests.test_token_selected_ptx import argument, program
from tests.token_selected_twins import Twin

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

CONFIG = NSAConfig.paper(
    compress_block_size=2, compress_stride=1, select_block_size=4, num_selected_blocks=5, window_size=0
)
"""A step covers 252 tokens."""


@pytest.fixture(params=["mma.sync, early", "wgmma, late", "wgmma, early"])
def choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Tensor]:
    """token_blocks interpreted. Parameter: what multiplies, and when copies arrive."""
    instruction, _, copies = request.param.partition(", ")
    from cute_kernels import jit, token_blocks

    monkeypatch.setattr(jit, "OPTIONS", f"{jit.OPTIONS} --gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}")
    real = token_blocks._compiled

    def compiled(*how: Any) -> Twin:
        def run(q: Tensor, k: Tensor, lse: Tensor, indices: Tensor, *others: Any) -> None:
            *x, ctas = others
            statics = (3,), (3,), (), (3,)
            given = [argument(y, static) for y, static in zip((q, k, lse, indices), statics, strict=True)]
            given += [argument(y, (0,)) if isinstance(y, Tensor) else argument(y) for y in x if y is not None]
            tiling = token_blocks.choose_tiling(how[1], how[2], how[3])
            assert tiling is not None
            items = -(-q.shape[1] // tiling.tokens) * k.shape[2] * q.shape[0]
            tensors = [y for y in (q, k, lse, indices, *x) if isinstance(y, Tensor)]
            grid = min(items, ctas), 1, 1
            program(real, *how[:-1], instruction == "wgmma").run(given, grid, tensors, copies == "late")

        return Twin(run)

    monkeypatch.setattr(token_blocks, "_compiled", compiled)
    return token_blocks.token_blocks


@pytest.mark.parametrize(
    ("group", "dim", "tokens", "start", "dtype"),
    [
        (1, 64, 70, 0, torch.bfloat16),
        (2, 64, 60, 700, torch.bfloat16),
        (3, 128, 40, 300, torch.float16),
        (16, 128, 40, 280, torch.bfloat16),
        (64, 128, 37, 300, torch.bfloat16),
    ],
)
def test_interpreted(
    choose: Callable[..., Tensor], group: int, dim: int, tokens: int, start: int, dtype: torch.dtype
) -> None:
    """Few and many steps and parts, an odd and an even number of heads, every tiling."""
    inputs = NSAInputs(*make_qkv(start + tokens, group, 1, dim, dtype=dtype))
    k_cmp = reference.pooled(inputs, CONFIG)[0].k_cmp
    assert k_cmp is not None
    exact = NSAInputs(*(x.double() for x in (inputs.q, inputs.k, inputs.v)), k_cmp=k_cmp.double(), v_cmp=k_cmp.double())
    _, aux = reference.nsa(exact, CONFIG)
    rows = slice(start, start + tokens)
    got = choose(inputs.q[:, rows], k_cmp, aux.lse_cmp[:, :, rows].float(), CONFIG, start=start)
    full = torch.cat([aux.indices[:, :, :start].int(), got], 2)
    assert check_chosen(full, aux.indices, inputs, CONFIG, k_cmp, aux.lse_cmp) <= 0.05 * tokens

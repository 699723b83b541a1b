"""What a NaN or inf of a token reaches on an NVIDIA GPU: no more than docs/semantics.md says, forward and backward.

Rows meet whole tiles of keys. A tile of compressed entries has 128 of them, 128 d tokens, and in backward up to 128
rows of every d-th token meet it together: 256 d. A tile of rows begins up to T before one of its rows, and tiles of a
window are up to 192 rows and 128 keys, of a token's own blocks up to 256 keys: max(T, 512).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, nsa, nsa_forward_aux
from tests.support import cases
from tests.support.causality import LSES
from tests.support.cute_cases import assert_same, gate_weight, like, on_gpu
from tests.support.hardware import DETERMINISTIC, EITHER

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default"), EITHER, pytest.mark.usefixtures("kernels")]

KV_HEADS = 2


@dataclass(frozen=True)
class Case:
    config: NSAConfig
    tokens: int = 25_000
    batch: int = 1
    deterministic: bool = True
    dim: int = 128
    heads: int = 8
    """Query heads of KV_HEADS key/value heads."""

    @property
    def group(self) -> slice:
        """Query heads of key/value head 0, which is spoilt."""
        return slice(0, self.heads // KV_HEADS)

    @property
    def reach(self) -> int:
        """Tokens, as docs/semantics.md has it."""
        return 256 * self.config.stride + max(self.config.q_tile_size, 512)


CASES = {
    "seed": Case(NSAConfig.seed()),
    "paper": Case(NSAConfig.paper(), tokens=9_000),
    "paper, 16 heads a group": Case(NSAConfig.paper(), tokens=9_000, heads=32),
    "paper, D=64": Case(NSAConfig.paper(), tokens=9_000, dim=64),
    "overlapping": Case(NSAConfig(compress_block_size=32, compress_stride=16, select_block_size=64), tokens=9_000),
    "stride 1": Case(NSAConfig(compress_block_size=16, compress_stride=1, select_block_size=64), tokens=3_000),
    "tiles of 1024": Case(NSAConfig(q_tile_size=1024, compress_block_size=16, select_block_size=192), tokens=9_000),
    "two sequences": Case(
        NSAConfig(compress_block_size=32, compress_stride=16, select_block_size=64), 9_000, batch=2, deterministic=False
    ),
    "chosen entries": Case(NSAConfig(num_cmp_selected_blocks=2)),
}


def spoilt(names: Iterable[str], cover: int) -> Any:
    """Cases, the tensors of which an element is bad, and what it is."""
    values = cases.product(names, ["q", "k", "v"], [math.nan, math.inf], cover=cover)
    return pytest.mark.parametrize(("name", "which", "bad"), values)


@DETERMINISTIC
@spoilt((name for name, case in CASES.items() if case.deterministic), cover=2)
def test_no_more_than_promised(name: str, which: str, bad: float) -> None:
    check(CASES[name], which, bad)


@spoilt((name for name, case in CASES.items() if not case.deterministic), cover=1)
def test_no_more_than_promised_where_sums_have_any_order(name: str, which: str, bad: float) -> None:
    check(CASES[name], which, bad)


def check(case: Case, which: str, bad: float) -> None:
    plain = on_gpu(case.tokens, case.heads, KV_HEADS, case.dim, batch=case.batch)
    expected = results(case, plain)
    run = 128 * case.config.stride  # tokens whose entries are a tile of keys
    last_run = case.tokens // run * run
    for at in (last_run - 1, last_run, case.tokens - 1):
        assert case.reach < at
        tensors = [x.clone() for x in plain]
        tensors["qkv".index(which)][0, at, 0] = bad
        got = results(case, tuple(tensors))
        assert not bool(torch.isfinite(got["out"][0, at, 0]).all())
        first_row, first_tile = at - case.reach, at // case.config.q_tile_size
        for of, x in got.items():
            clean = torch.ones_like(x, dtype=torch.bool)
            if of in LSES:
                clean[0, case.group, first_tile * case.config.q_tile_size :] = False
            elif of.endswith("indices"):
                selects = 1 if case.config.shares_heads else case.heads // KV_HEADS
                clean[0, :selects, first_tile:] = False
            elif of in ("dk", "dv"):
                clean[0, :, 0] = False
            else:
                clean[0, first_row:, case.group] = False
            assert bool(clean.any())
            assert_same(x[clean], expected[of][clean], f"{of}, {at}", exact=case.deterministic or of[0] != "d")


def results(case: Case, qkv: tuple[Tensor, ...]) -> dict[str, Tensor]:
    weight = gate_weight(case.heads, case.dim)
    out, aux = nsa_forward_aux(*qkv, gate_proj_weight=weight, config=case.config)
    kept: dict[str, Any] = {name: getattr(aux, name) for name in (*LSES, "indices", "cmp_indices")}
    leaves = [x.detach().requires_grad_() for x in qkv]
    trained = nsa(*leaves, gate_proj_weight=weight, config=case.config, deterministic=case.deterministic)
    gradients = torch.autograd.grad(trained, leaves, like(*out.shape))
    kept |= {"out": out, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return {name: x for name, x in kept.items() if x is not None}

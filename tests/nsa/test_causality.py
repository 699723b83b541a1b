"""The oracle never looks ahead; and the check that says so can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nsa.reference as reference
from nsa import NSAAux, NSAConfig
from nsa.inputs import NSAInputs
from tests.support.cases import product
from tests.support.causality import Run, assert_causal
from tests.support.helpers import SMALL, make_qkv

TOKENS = 75
CONFIGS = {
    **SMALL,
    "seed, overlapping blocks": replace(SMALL["seed"], compress_stride=3, select_block_size=5),
    "paper, no forced blocks": replace(SMALL["paper"], num_init_blocks=0, num_local_blocks=0),
    "tiles of 7": replace(SMALL["seed"], q_tile_size=7, share_heads_in_group=True, num_local_blocks=2),
}


def oracle(config: NSAConfig) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, **fixed: Tensor | None) -> tuple[Tensor, NSAAux]:
        return reference.nsa(NSAInputs(q, k, v), config, **fixed)

    return run


@pytest.mark.parametrize(("name", "dtype"), product(CONFIGS, [torch.float64, torch.bfloat16]))
def test_nothing_depends_on_later_tokens(name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    assert_causal(oracle(config), make_qkv(TOKENS, dtype=dtype), config, range(0, TOKENS, 2))


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_the_check_catches_a_leak(branch: str) -> None:
    """A branch that sees one token ahead fails the check."""
    config = replace(SMALL["seed"], compress_block_size=8)

    def leaking(q: Tensor, k: Tensor, v: Tensor, **fixed: Tensor | None) -> tuple[Tensor, NSAAux]:
        ahead_k, ahead_v = (torch.cat([t[:, 1:], t[:, -1:]], dim=1) for t in (k, v))
        shifted = {f"k_{branch}": ahead_k, f"v_{branch}": ahead_v}
        if branch == "cmp":
            _, aux = reference.nsa(NSAInputs(q, ahead_k, ahead_v), config)
            shifted = {"k_cmp": aux.k_cmp, "v_cmp": aux.v_cmp}
        return reference.nsa(NSAInputs(q, k, v, **shifted), config, **fixed)

    with pytest.raises(AssertionError, match="perturbed after"):
        assert_causal(leaking, make_qkv(TOKENS), config, range(TOKENS))


def test_without_causality_everything_sees_everything() -> None:
    """The same perturbation does change earlier rows when causal=False, in each branch."""
    config = replace(SMALL["seed"], causal=False, window_size=40)
    for branch in ("o_cmp", "o_slc", "o_win"):
        q, k, v = make_qkv(32)
        _, aux = oracle(config)(q, k, v)
        changed = [torch.cat([t[:, :16], t[:, 16:] + 1], dim=1) for t in (k, v)]
        _, other = oracle(config)(q, *changed, indices=aux.indices)
        assert not torch.equal(getattr(aux, branch)[:, :16], getattr(other, branch)[:, :16])

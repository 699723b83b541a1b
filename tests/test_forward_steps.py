"""The steps of the forward in token mode, with PyTorch twins for kernels: the branches' sum made in either place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import backward, fa4, forward
from cute_kernels.documents import LENGTH
from nsa import NSAConfig
from nsa.tensors import NSAInputs
from tests import backward_twins, token_selected_twins
from tests.helpers import make_inputs
from tests.test_token_selected import apart, random_indices

PAPER = NSAConfig.paper(num_selected_blocks=4, window_size=100)
LENGTHS = (150, 0, 3, 147)

pytestmark = pytest.mark.filterwarnings("default")


def rows_alike(q: Tensor, v_dim: int, factor: float) -> Tensor:
    """What a branch might give: of each row something else, of q alone."""
    return (factor * q.float().sum(-1, keepdim=True) + torch.arange(v_dim) / v_dim).to(q.dtype)


def window(q: Tensor, k: Tensor, v: Tensor, *, documents: Any = None, **_: Any) -> tuple[Tensor, None]:
    o = rows_alike(q, v.shape[3], -0.1)
    if documents is not None:  # other rows are not written
        used = torch.zeros(q.shape[1], dtype=torch.bool)
        for first, count in zip(*(x.tolist() for x in documents), strict=False):
            used[first : first + count] = True
        o[:, ~used] = torch.nan
    return o, None


def compressed(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return rows_alike(q, v.shape[3], 0.2), q.new_zeros((q.shape[0], q.shape[2], q.shape[1]))


def token_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, config: Any, *, start: int, documents: Any = None) -> Tensor:
    how: dict[str, Any] = {"size": 64, "forced": (config.num_init_blocks, config.num_local_blocks)}
    count, shape = config.num_selected_blocks, (q.shape[0], k_cmp.shape[2])
    if documents is None:
        return random_indices(shape, [start + q.shape[1]], 6, count, **how)[:, :, start:]
    lengths = documents.bounds[LENGTH, :-1].tolist()
    rows = documents.rows[documents.rows >= 0].long()
    return apart(random_indices(shape, lengths, 3, count, **how), 2, rows, q.shape[1], 0)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    backward_twins.install(monkeypatch, "sm_90", fa4.RULES[9])
    token_selected_twins.install(monkeypatch)
    monkeypatch.setattr(fa4, "window", window)
    monkeypatch.setattr(fa4, "compressed", compressed)
    monkeypatch.setattr(forward, "token_blocks", token_blocks)
    monkeypatch.setattr(forward, "block_means", backward_twins.block_means)
    monkeypatch.setattr(forward, "entry_lists", lambda *_: None)


def some_inputs(gates: str, *, packed: bool) -> NSAInputs:
    inputs = make_inputs(310, heads=4, kv_heads=2, dim=64, batch=None if packed else 2, dtype=torch.bfloat16)
    if packed:
        inputs = replace(inputs, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int())
    if gates == "given":
        return replace(inputs, gates=torch.randn(*inputs.q.shape[:-1], 3))
    if gates == "projected":
        return replace(inputs, gate_proj_weight=torch.randn(4, 3, 64, dtype=torch.bfloat16) / 8)
    return inputs


def without_gated_sum(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the branches are added by a kernel of their own")

    patch.setattr(forward, "gated_sum", refuse)


@pytest.mark.parametrize(("packed", "chunked"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("gates", ["given", "projected", "thirds"])
def test_sums_in_registers_are_those_of_outputs(
    gates: str, packed: bool, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the forward without branches, and of training that computes the branches again."""
    inputs = some_inputs(gates, packed=packed)
    if chunked:
        monkeypatch.setattr(forward, "CHUNK_BYTES", 1 << 18)
    with monkeypatch.context() as patch:
        patch.setattr(forward, "adds_branches", lambda *_: False)
        expected, kept = backward.nsa_saving(inputs, PAPER, recompute=True)
    assert expected.isfinite().all()
    if not chunked:
        assert torch.equal(forward.nsa(inputs, PAPER)[0], expected)
    without_gated_sum(monkeypatch)
    assert torch.equal(forward.nsa(inputs, PAPER, aux=False)[0], expected)
    out, kept_now = backward.nsa_saving(inputs, PAPER, recompute=True)
    assert torch.equal(out, expected)
    assert all(torch.equal(x, y) for x, y in zip(kept_now, kept, strict=True))
    saved = backward.Saved.of_list(kept_now)
    assert saved.o_slc is None
    assert (saved.gates is not None) == (gates == "projected")


@pytest.mark.parametrize("changes", [{"num_init_blocks": 0, "num_local_blocks": 0}, {"num_selected_blocks": 0}])
def test_no_forced_blocks(changes: dict[str, int]) -> None:
    """Nothing has the selected branch in registers then."""
    config = replace(PAPER, num_init_blocks=0, num_local_blocks=0) if "num_selected_blocks" in changes else PAPER
    config = replace(config, **changes)
    inputs = some_inputs("projected", packed=False)
    assert torch.equal(forward.nsa(inputs, config, aux=False)[0], forward.nsa(inputs, config)[0])

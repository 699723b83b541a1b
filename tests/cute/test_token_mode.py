"""NSA with selection per token, whole, on an NVIDIA GPU: forward, gradients, causality, chunks, packs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAAux, NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support.causality import assert_causal
from tests.support.cute_cases import BF16, FP16, check_forward, check_gradients, gate_weight, like, on_gpu
from tests.support.helpers import assert_as_alone
from tests.support.kv_outer_cases import small_chunks

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

PAPER = NSAConfig.paper(num_selected_blocks=6, window_size=200)
"""A selection that selects from a few hundred tokens on."""
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing forced": {"num_init_blocks": 0, "num_local_blocks": 0},
    "only forced": {"num_selected_blocks": 3},
    "apart": {"compress_block_size": 64, "compress_stride": None},
    "blocks of 128": {"select_block_size": 128},
    "blocks of 256": {"select_block_size": 256, "num_selected_blocks": 3},
    "no window": {"window_size": 0},
    "local blocks reach out of the window": {"window_size": 100},
    "blocks of 128 in the window": {"select_block_size": 128, "window_size": 300},
    "nothing selected": {"num_selected_blocks": 0, "num_init_blocks": 0, "num_local_blocks": 0},
}


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 63, 64, 65, 257, 1000, 2500])
def test_sizes(tokens: int) -> None:
    inputs = NSAInputs(*on_gpu(tokens), gate_proj_weight=gate_weight())
    aux = check_forward(inputs, PAPER)
    if tokens > 1000:  # the selection left something out
        assert int((aux.indices[:, :, -1] >= 0).sum(-1).max()) == 6
    check_gradients(inputs, PAPER)


@pytest.mark.parametrize(
    ("group", "dim", "dtype"), cases.product([1, 2, 4, 8, 16, 64], [64, 128], [BF16, FP16], cover=2), ids=str
)
def test_groups(group: int, dim: int, dtype: torch.dtype) -> None:
    heads = max(group, 2)
    qkv = on_gpu(700, heads, heads // group, dim, dtype=dtype, batch=2)
    check_forward(NSAInputs(*qkv, gate_proj_weight=gate_weight(heads, dim, dtype)), PAPER)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    inputs = NSAInputs(*on_gpu(1500, 8, 2, 64), gate_proj_weight=gate_weight(8, 64))
    check_forward(inputs, replace(PAPER, **OPTIONS[name]))
    check_gradients(inputs, replace(PAPER, **OPTIONS[name]))


@pytest.mark.parametrize("dims", [(64, 128), (128, 64)], ids=str)
def test_value_dims(dims: tuple[int, int]) -> None:
    inputs = NSAInputs(*on_gpu(900, 8, 2, *dims[:1], v_dim=dims[1]))
    check_forward(inputs, PAPER)
    check_gradients(inputs, PAPER)


@pytest.mark.parametrize(("group", "recompute"), cases.product([1, 4, 16], [False, True]))
def test_gradients_of_groups(group: int, recompute: bool) -> None:
    heads = max(group, 2)
    inputs = NSAInputs(*on_gpu(700, heads, heads // group, 64, batch=2), gate_proj_weight=gate_weight(heads, 64))
    check_gradients(inputs, PAPER, recompute=recompute)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_given_gates(dtype: torch.dtype) -> None:
    inputs = NSAInputs(*on_gpu(900, batch=2), gates=like(2, 900, 8, 3).to(dtype))
    check_forward(inputs, PAPER)
    check_gradients(inputs, PAPER)


def test_own_keys_and_entries() -> None:
    q, k, v = on_gpu(600)
    own = {
        f"{kind}_{branch}": like(*k.shape, seed=i)
        for i, (kind, branch) in enumerate((kind, branch) for kind in "kv" for branch in ("slc", "win"))
    }
    entries = PAPER.num_compressed(600)
    own |= {name: like(1, entries, 2, 128, seed=9) for name in ("k_cmp", "v_cmp")}
    check_gradients(NSAInputs(q, k, v, **own), PAPER)


def test_nothing_depends_on_later_tokens() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, NSAAux]:
        return nsa_forward_aux(q, k, v, config=PAPER)

    positions = [0, 30, 31, 32, 46, 47, 63, 64, 127, 128, 300, 511, 767, 1099]
    assert_causal(run, on_gpu(1100, 8, 2, 64), PAPER, positions)


@pytest.mark.parametrize("source", ["projected", "given", "thirds"])
def test_chunks_of_queries_and_worklist_chunks_change_nothing(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does whether the gate is a kernel of its own, as it is where aux is asked for."""
    from cute_kernels.call import chunk_rows

    q, k, v = on_gpu(3000, batch=2)
    gates: dict[str, dict[str, Tensor]] = {
        "projected": {"gate_proj_weight": gate_weight()},
        "given": {"gates": like(2, 3000, 8, 3)},
        "thirds": {},
    }
    expected, _ = nsa_forward_aux(q, k, v, **gates[source], config=PAPER)
    assert torch.equal(nsa_forward(q, k, v, **gates[source], config=PAPER), expected)
    monkeypatch.setattr("cute_kernels.call.CHUNK_BYTES", 1 << 20)
    assert chunk_rows(2, 3000, 8, 128, 256) < 3000
    small_chunks(monkeypatch, 256, 1 << 20, 100)
    assert torch.equal(nsa_forward(q, k, v, **gates[source], config=PAPER), expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_packed_documents(recompute: bool) -> None:
    """Those of each document alone."""
    lengths = (1, 0, 700, 64, 65, 900, 3, 256)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    tokens = sum(lengths) + 10
    qkv = [x[0] for x in on_gpu(tokens)]
    do = like(tokens, 8, 128)
    do[sum(lengths) :] = torch.nan  # belongs to no document

    def gradients_of(do: Tensor, *qkv: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = nsa(*leaves, config=PAPER, recompute=recompute, **keywords)
        return torch.autograd.grad(out, leaves, do)

    got = gradients_of(do, *qkv, cu_seqlens=bounds)
    start = 0
    for length in lengths:
        here = slice(start, start := start + length)
        if length > 0:
            alone = gradients_of(do[None, here], *(x[None, here] for x in qkv))
            for name, whole, part in zip("qkv", got, alone, strict=True):
                assert_as_alone(whole[None, here], part, f"{name}, {length} long")
    for gradient in got:
        assert not gradient[sum(lengths) :].any()

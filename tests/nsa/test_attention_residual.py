"""Attention residual: two oracles that agree, arguments, the layer, operators."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from ascend_kernels.device import DEVICES
from ascend_kernels.launch import recording
from ascend_kernels.residual import launchers, tiling
from dispatch import attention_residual
from nsa import AttentionResidual
from tests.support.cases import product
from tests.support.helpers import assert_rounded_once
from tests.support.residual_cases import EPS, LARGE_SCORES, check, differentiated, make, oracle, through_the_public_op
from tests.support.residual_loops import mix

# The oracle


@pytest.mark.parametrize(("layout", "dtype"), [("stacked", torch.bfloat16), ("list", torch.float16)])
def test_the_reference_rounds_gradients_once(layout: str, dtype: torch.dtype) -> None:
    case = make(200, 20, 6, batch=2, layout=layout, dtype=dtype)
    double = make(200, 20, 6, batch=2, layout=layout, dtype=torch.float64)
    for leaf, exact in zip(case.leaves, double.leaves, strict=True):
        exact.data.copy_(leaf)
    exact = differentiated(oracle, replace(double, do=case.do.double()))
    got = through_the_public_op(case, "reference")
    for i in range(1 + len(case.leaves)):
        assert_rounded_once(got[i], exact[i], f"result {i}")


# The public function


@pytest.mark.parametrize("layout", ["stacked", "list", "token-major", "slices", "strided"])
def test_cpu_tensors_run_the_reference(layout: str) -> None:
    case = make(6, 20, 4, batch=2, layout=layout, dtype=torch.bfloat16, weight_dtype=torch.float32)
    got, expected = through_the_public_op(case, "reference"), differentiated(oracle, case)
    for name, mine, rounded in zip(("out", *("gradient",) * len(case.leaves)), got, expected, strict=True):
        # Both round once, after sums in other orders: one unit in the last place apart, or a few hundred of fp32
        rtol = max(torch.finfo(rounded.dtype).eps, 2**-15)
        torch.testing.assert_close(mine, rounded, rtol=rtol, atol=2**-15, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(attention_residual(case.blocks, case.w_query, case.w_norm, EPS), got[0])


def test_strides_of_single_rows_do_not_matter() -> None:
    """B = 1: blocks that lie alike, whatever PyTorch says of the stride that nothing steps over."""
    wide, blocks = torch.randn(1, 12, 8), torch.randn(2, 1, 10, 8)
    given = [wide[:, :10], *blocks]
    assert given[0].stride() != given[1].stride()
    w_query = torch.randn(8)
    assert torch.equal(attention_residual(given, w_query), attention_residual([x.clone() for x in given], w_query))


@pytest.mark.parametrize(("lead", "layout"), product([(), (4,), (2, 0, 4), (2, 1, 3, 2)], ["stacked", "list"]))
def test_any_leading_dimensions(lead: tuple[int, ...], layout: str) -> None:
    stacked = torch.randn(3, *lead, 8, dtype=torch.float64, requires_grad=True)
    blocks = stacked if layout == "stacked" else list(stacked)
    w_query, w_norm = torch.randn(2, 8, dtype=torch.float64)
    out = attention_residual(blocks, w_query, w_norm, EPS)
    expected = mix(stacked.reshape(3, 1, -1, 8).tolist(), w_query.tolist(), w_norm.tolist(), EPS)
    assert out.shape == (*lead, 8)
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64).view(*lead, 8), rtol=0, atol=1e-12)
    out.sum().backward()
    rows = stacked.detach().reshape(3, 1, -1, 8).requires_grad_()
    attention_residual(rows, w_query, w_norm, EPS).sum().backward()
    assert stacked.grad is not None
    assert rows.grad is not None
    torch.testing.assert_close(stacked.grad, rows.grad.view_as(stacked), rtol=0, atol=1e-12)


# The layer


@pytest.mark.parametrize("norm_weight", [True, False])
def test_the_layer_starts_with_the_mean(norm_weight: bool) -> None:
    layer = AttentionResidual(16, norm_weight=norm_weight)
    blocks = [torch.randn(2, 5, 16, requires_grad=True) for _ in range(4)]
    out = layer(blocks)
    torch.testing.assert_close(out, sum(blocks) / 4)
    out.square().sum().backward()
    assert all(block.grad is not None for block in blocks)
    assert sorted(layer.state_dict()) == ["w_norm", "w_query"][0 if norm_weight else 1 :]
    assert layer.w_query.grad is not None
    assert layer.w_query.grad.abs().sum() > 0


def test_the_layer_is_the_function() -> None:
    layer = AttentionResidual(16, eps=1e-3)
    torch.nn.init.normal_(layer.w_query)
    blocks = torch.randn(4, 2, 5, 16)
    assert torch.equal(layer(blocks), attention_residual(blocks, layer.w_query, layer.w_norm, 1e-3))
    assert "16, eps=0.001, norm_weight=True" in repr(layer)


# Tiles and launches


def test_planner_on_random_shapes() -> None:
    """3,000 shapes: tiles are among the specialisations and fit the UB, grids are small, every row is taken."""
    known = set(tiling.specialisations())
    assert len(known) <= 80
    draw = random.Random(0)
    for _ in range(3_000):
        backward, listed = draw.random() < 0.5, draw.random() < 0.5
        dtype, device = draw.choice(tiling.DTYPES), draw.choice(list(DEVICES.values()))
        dim, blocks = 16 * max(1, int(2 ** draw.uniform(0, 16))), draw.randint(1, 64)
        shape = {"dim": dim, "blocks": blocks, "tokens": int(2 ** draw.uniform(0, 24))}
        plan = tiling.ascend_plan(backward=backward, dtype=dtype, listed=listed, device=device, **shape)
        kernels = (("products", "gradients") if backward else ("scores", "mix")) if plan.tiled else ()
        for kernel in kernels or ("backward" if backward else "forward",):
            assert (kernel, dtype, plan.block_d, plan.rows) in known
        assert plan.tiled == (plan.block_d < dim)
        assert plan.one_tile == (blocks <= plan.rows)
        assert plan.live_bytes["UB"] <= 0.85 * device.ub
        assert 1 <= plan.programs <= min(65535, 2 * device.cores, shape["tokens"])
        block_p, weights = tiling.weights_plan(dim, device)
        assert ("weights", torch.float32, weights.block_d, 1) in known
        assert block_p == tiling.WEIGHTS_BLOCK_P
        assert weights.live_bytes["UB"] <= 0.85 * device.ub
        gpu = tiling.gpu_plan(backward=backward, dtype=dtype, cores=132, **shape)
        assert gpu.tiled == (gpu.block_d < dim)
        assert gpu.tiled or gpu.rows * gpu.block_d // (32 * gpu.options["num_warps"]) <= (128 if backward else 64)
        assert gpu.tiled or 32 * gpu.options["num_warps"] * gpu.options["maxnreg"] <= 1 << 16
        assert gpu.one_tile == (blocks <= gpu.rows)
        if backward:
            partials, values = 4 * gpu.programs, shape["tokens"] * blocks * dtype.itemsize
            assert gpu.programs <= 132 or 32 * partials <= values


NAMES = ["forward_kernel", "backward_kernel", "weights_kernel"]
TILED = ["scores_kernel", "mix_kernel", "products_kernel", "gradients_kernel", "weights_kernel"]


@pytest.mark.parametrize(
    ("dim", "blocks", "layout", "names"),
    [
        (2048, 8, "stacked", NAMES),
        (2048, 16, "list", NAMES),
        (2048, 20, "list", ["table_kernel", "table_kernel", *NAMES[:1], "table_kernel", "table_kernel", *NAMES[1:]]),
        (4096, 8, "stacked", TILED),
    ],
)
def test_launches_that_an_npu_would_be_given(dim: int, blocks: int, layout: str, names: list[str]) -> None:
    case = make(70000 // dim, dim, blocks, layout=layout, dtype=torch.bfloat16)
    with recording(run=False) as launches:
        through_the_public_op(case, "ascend")
    assert [one.kernel.__name__ for one in launches] == names
    for one in launches:
        assert set(one.arguments) | set(one.constants) == set(one.kernel.arg_names)
        assert math.prod(one.grid) <= 40


def test_what_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses off the alignment, features with gaps, longer lists; and eps is part of what a call is."""
    monkeypatch.setattr(launchers.RepeatedLaunch, "possible", staticmethod(lambda _: True))
    case = make(3, 64, 17, layout="list", dtype=torch.bfloat16, requires_grad=False)
    w, norm, lookup = case.w_query, case.w_norm, launchers.RepeatedCall.lookup
    few = list(case.blocks[:16])
    calls = [(few, w, norm, 1e-6), (few, w, norm, 1e-5), (few[:15], w, norm, 1e-6), (few, w, None, 1e-6)]
    assert len({lookup(*call).key for call in calls}) == 4  # type: ignore[union-attr]
    wide = torch.zeros(1 + few[0].numel(), dtype=torch.bfloat16)
    shifted, gaps = wide[1:].view(few[0].shape), wide[:128:2]
    for blocks, *weights in (
        (list(case.blocks), w, norm),
        ([*few[:3], shifted], w, norm),
        (few, wide[1:65], norm),
        (few, w, gaps),
        (torch.zeros(2, 1, 3, 128, dtype=torch.bfloat16)[..., ::2], w, norm),
    ):
        assert lookup(blocks, *weights, 1e-6) is None


# On a GPU

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])


@pytest.mark.cuda
@DTYPES
@pytest.mark.parametrize("dim", [1, 15, 16, 17, 123, 1025, 4096, 8192, 9000])
@pytest.mark.parametrize("blocks", [1, 3, 8, 33, 64])
def test_shapes_on_a_gpu(blocks: int, dim: int, dtype: torch.dtype) -> None:
    check("triton", 37, dim, blocks, through_the_public_op, dtype=dtype, batch=3, device="cuda")


@pytest.mark.cuda
@DTYPES
@pytest.mark.parametrize("case", LARGE_SCORES)
def test_large_scores_on_a_gpu(case: str, dtype: torch.dtype) -> None:
    check("triton", 64, run=through_the_public_op, dtype=dtype, device="cuda", **LARGE_SCORES[case])


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["list", "slices", "token-major", "strided"])
@pytest.mark.parametrize("dim", [123, 1024, 4096])
@pytest.mark.parametrize("blocks", [1, 5, 16, 17, 64])
def test_layouts_on_a_gpu(blocks: int, dim: int, layout: str) -> None:
    options: dict[str, Any] = {"layout": layout, "dtype": torch.bfloat16, "weight_dtype": torch.float32}
    check("triton", 200, dim, blocks, through_the_public_op, batch=2, norm=dim != 123, device="cuda", **options)


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["stacked", "list"])
def test_many_tokens_on_a_gpu(layout: str) -> None:
    """More tokens than a grid on an NPU may have programs, and strides over them forward and backward."""
    with recording(run=True) as launches:
        check(
            "triton", 35000, 64, 4, through_the_public_op, dtype=torch.bfloat16, batch=2, layout=layout, device="cuda"
        )
    assert [one.kernel.fn.__name__ for one in launches] == NAMES
    assert all(one.grid[0] < 65535 for one in launches)


@pytest.mark.cuda
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("layout", ["stacked", "list", "token-major", "slices"])
def test_repeated_launches_on_a_gpu(layout: str, norm: bool) -> None:
    """Other tensors of the same kind: bit by bit what launches give that Triton looks at, as it does when recorded."""
    options: dict[str, Any] = {"layout": layout, "norm": norm, "dtype": torch.bfloat16, "device": "cuda", "batch": 2}
    case, other = make(100, 512, 6, **options), make(100, 512, 6, **options)
    through_the_public_op(case, "triton")
    with torch.no_grad():
        for leaf in other.leaves:
            leaf.mul_(0.5)
    repeated = through_the_public_op(other, "triton")
    with recording(run=True) as launches:
        looked_at = through_the_public_op(other, "triton")
    assert len(launches) == 3
    assert all(torch.equal(a, b) for a, b in zip(repeated, looked_at, strict=True))
    with torch.no_grad():
        assert torch.equal(attention_residual(*other.inputs(other.leaves), EPS, backend="triton"), repeated[0])


@pytest.mark.cuda
@pytest.mark.parametrize(("tokens", "dim"), [(70000, 4096), (17000, 16384)], ids=["one tile", "tiled"])
def test_offsets_beyond_32_bits_on_a_gpu(tokens: int, dim: int) -> None:
    """The last block starts after 2^31 elements: it must be what the others are, and its gradient too."""
    blocks = torch.empty(9, 1, tokens, dim, dtype=torch.bfloat16, device="cuda").normal_()
    blocks[8] = blocks[0]
    assert blocks[8].storage_offset() > 1 << 31
    w = torch.full((dim,), 1e-2, device="cuda", requires_grad=True)
    blocks.requires_grad_()
    out = attention_residual(blocks, w, backend="triton")
    gradient, _ = torch.autograd.grad(out, (blocks, w), torch.ones_like(out))
    assert torch.equal(gradient[8], gradient[0])
    rows = [0, 1, tokens // 2 - 1, tokens - 1]
    part = blocks[:, :, rows].detach().double().requires_grad_()
    expected = oracle(part, w.double(), None)
    torch.testing.assert_close(out[:, rows].double(), expected, atol=2e-2, rtol=1e-2)
    (exact,) = torch.autograd.grad(expected, part, torch.ones_like(expected))
    torch.testing.assert_close(gradient[:, :, rows].double(), exact, atol=1e-2, rtol=2e-2)


@pytest.mark.cuda
@pytest.mark.parametrize(("layout", "blocks"), [("stacked", 8), ("list", 8), ("list", 20)])
def test_memory_on_a_gpu(layout: str, blocks: int) -> None:
    """Nothing of V's size but V and its gradient: lists are not stacked, partial sums of t are few."""
    case = make(1024, 4096, blocks, layout=layout, dtype=torch.bfloat16, device="cuda")
    size = 1024 * 4096 * 2
    through_the_public_op(case, "triton")
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = through_the_public_op(case, "triton")
    peak = torch.cuda.max_memory_allocated() - held
    assert len(results) == 1 + len(case.leaves)
    partials = max(132 * 4096 * 4, blocks * size // 32)
    assert peak <= (blocks + 1) * size + partials + (1 << 20)  # dV, out, and what is small


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["stacked", "list"])
@pytest.mark.parametrize("blocks", [8, 20])
def test_bitwise_and_in_a_graph_on_a_gpu(blocks: int, layout: str) -> None:
    """Every run gives the same bits, a replayed CUDA graph too, which reads what the tensors hold by then."""
    case = make(1000, 1024, blocks, layout=layout, dtype=torch.bfloat16, device="cuda")
    first = through_the_public_op(case, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, through_the_public_op(case, "triton"), strict=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        through_the_public_op(case, "triton")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = through_the_public_op(case, "triton")
    with torch.no_grad():
        for leaf in case.leaves:
            leaf.mul_(0.5)
    graph.replay()
    expected = through_the_public_op(case, "triton")
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    assert not torch.equal(captured[0], first[0])

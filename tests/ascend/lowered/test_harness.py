"""The harness on a small op, and on a planted defect of each class: every one must be caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ascend_kernels.launch import Launch, launch, recording
from ascend_kernels.neighborhood import tiling
from dispatch import neighborhood_attention
from tests.ascend.lowered import demo, description, execution, gates, liveness, proof, toolchain
from tests.ascend.lowered.gates import CAPACITY, MAX_GRID
from tests.support.helpers import assert_within_budget, make_qkv


def capture(op: Callable[..., Tensor], *arguments: object, **keywords: object) -> tuple[Tensor, list[Launch]]:
    with recording(run=False) as launches:
        out = op(*arguments, **keywords)
    return out, launches


def is_softmax(out: Tensor, x: Tensor) -> None:
    assert_within_budget(out, torch.softmax(x.double(), 1), torch.softmax(x, 1))


@pytest.mark.ascend
def test_another_kernel_than_was_launched_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As when its file changed after this process, or a child, has read it."""
    monkeypatch.setattr(toolchain, "CACHE", tmp_path)
    _, launches = capture(demo.softmax, torch.ones(3, 5))
    monkeypatch.setattr(description, "sources", lambda _: ("def softmax_kernel(): ...",))
    with pytest.raises(proof.ProofError, match=r"demo.py has another softmax_kernel than was launched"):
        proof.execute(launches)


# ---------------------------------------------------------------- planted defects


@pytest.mark.ascend
def test_swapped_arguments_are_caught() -> None:
    x = torch.randn(37, 19)
    out, launches = capture(demo.softmax, x, rows=19, columns=37)
    proof.execute(launches)
    with pytest.raises(AssertionError, match="NaN"):
        is_softmax(out, x)


@pytest.mark.ascend
@pytest.mark.parametrize(
    ("defect", "where"),
    [
        ("a row too many", r"SIGSEGV in program \(4, 0, 0\).* past the end of p_x"),
        ("a row too early", "written outside its tensors .*p_out"),
    ],
)
def test_rows_outside_are_caught(defect: str, where: str) -> None:
    """As a failure that names the kernel, the launch, the program and the tensor; this process lives on."""
    _, launches = capture(demo.softmax, torch.randn(37, 19), defect=defect)
    story = rf"launch 0, softmax_kernel\[5\]\(p_x=float32\[37, 19\].*{defect}.*{where}"
    with pytest.raises(proof.MemoryFault, match=story):
        proof.execute(launches)


@pytest.mark.ascend
def test_clamp_is_caught() -> None:
    x = torch.randn(37, 19)
    out, launches = capture(demo.softmax, x, defect="clamped")
    proof.execute(launches)
    is_softmax(out, x)
    with pytest.raises(AssertionError, match="loops over single elements"):
        gates.assert_no_single_element_loops(proof.lower(launches[0]).linalg)


def test_oversize_tile_is_caught() -> None:
    with pytest.raises(AssertionError, match=f"1048576 bytes live in UB, A2 has {CAPACITY['A2']['UB']}"):
        gates.assert_plan(demo.RowPlan(512, 128, (1,)))


@pytest.mark.ascend
def test_larger_tiles_than_planned_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel launched with four times the rows and twice the keys of its plan. The count of whole tiles leaves room
    for less: plans count twice what crosses between memories.
    """
    tiles, larger = tiling.Tiles(32, 64, 64), tiling.Tiles(128, 128, 64)
    plan = tiling.Plan(tiles, (1,), tiling.live_bytes("forward", tiles, 2), {})
    q, k, v = make_qkv(70, dim=64, dtype=torch.bfloat16)
    linalg = {}
    for launched in (tiles, larger):
        monkeypatch.setattr(tiling, "ascend_tiles", lambda *_, launched=launched: launched)
        (one,) = capture(neighborhood_attention, q, k, v, backend="ascend")[1]
        linalg[launched] = proof.lower(one).linalg
    gates.assert_plan_is_honest(plan, linalg[tiles])
    with pytest.raises(AssertionError, match=r"keeps 65536 bytes alive in L1, the plan counts 45056"):
        gates.assert_plan_is_honest(replace(plan, live_bytes={**plan.live_bytes, "UB": 1 << 20}), linalg[larger])
    with pytest.raises(AssertionError, match=r"keeps \d+ bytes alive in UB, the plan counts 73728"):
        gates.assert_plan_is_honest(plan, linalg[larger])


LOOP = """
func.func @k(%arg0: memref<?xf32>) attributes {x} {
  %0 = tensor.empty() : tensor<8x4xf32>
  %1 = linalg.fill ins(%cst : f32) outs(%0 : tensor<8x4xf32>) -> tensor<8x4xf32>
  %2 = bufferization.to_tensor %alloc restrict writable : memref<8x4xf16>
  %3 = math.exp %1 : tensor<8x4xf32>
  %4:2 = scf.for %arg1 = %c0 to %c8 step %c1 iter_args(%arg2 = %1, %arg3 = %c0) -> (tensor<8x4xf32>, i32)  : i32 {
    %5 = bufferization.to_tensor %alloc_0 restrict writable : memref<4x4xf16>
    %6 = linalg.matmul ins(%2, %5 : tensor<8x4xf16>, tensor<4x4xf16>) outs(%1 : tensor<8x4xf32>) -> tensor<8x4xf32>
    %7 = arith.cmpf oeq, %6, %3 : tensor<8x4xf32>
    %8 = arith.select %7, %arg2, %6 : tensor<8x4xi1>, tensor<8x4xf32>
    scf.yield %8, %c0 : tensor<8x4xf32>, i32
  }
  scf.for %arg1 = %c0 to %c8 step %c1  : i32 {
    %5 = arith.addf %4#0, %4#0 : tensor<8x4xf32>
    bufferization.materialize_in_destination %5 in writable %view : (tensor<8x4xf32>, memref<8x4xf32>) -> ()
  }
"""


def test_tiles_alive_at_once_are_counted() -> None:
    """Before the select: %3, which the next iteration needs again, the accumulator %arg2, the product %6 and its mask.

    %2 stays for all products. %5 in the second loop is another tile than in the first.
    """
    assert liveness.live_bytes(LOOP) == {"UB": 3 * 128 + 32, "L1": 64 + 32}


@pytest.mark.parametrize("grid", [(MAX_GRID + 1,), (256, 16, 16), (0,)])
def test_grid_overflow_is_caught(grid: tuple[int, ...]) -> None:
    """Before anything is lowered: the product counts, not each dim."""
    plan = demo.RowPlan(8, 32, grid)
    with pytest.raises(AssertionError, match="programs"):
        gates.assert_plan(plan)
    _, launches = capture(demo.softmax, torch.randn(37, 19), plan=plan)
    with pytest.raises(AssertionError, match=r"launch 0, softmax_kernel.*programs"):
        proof.execute(launches)


@pytest.mark.ascend
def test_upcast_before_the_matmul_is_caught() -> None:
    a, b, out = torch.ones(16, 16).bfloat16(), torch.ones(16, 16).bfloat16(), torch.empty(16, 16)
    arguments = {"p_a": a, "p_b": b, "p_out": out, "m": 16, "n": 16, "k": 16}
    with recording(run=False) as launches:
        launch(demo.upcast_matmul, (1,), arguments, {"M": 16, "N": 16, "K": 16})
    linalg = proof.lower(launches[0]).linalg
    gates.assert_matmul_inputs(linalg, "f32")
    with pytest.raises(AssertionError, match="not bf16"):
        gates.assert_matmul_inputs(linalg, "bf16")


@pytest.mark.ascend
def test_writes_between_rows_are_caught() -> None:
    out, x = torch.zeros(8, 24)[:, :16], torch.zeros(8, 16)
    arguments = {"p_x": x, "p_out": out, "rows": 8, "columns": 16, "x_stride": 16, "out_stride": 24}
    with recording(run=False) as launches:
        launch(demo.writes_between_rows, (1,), arguments, {"ROWS": 8, "COLUMNS": 32})
    with pytest.raises(proof.MemoryFault, match="between the elements of p_out"):
        proof.execute(launches)


# ---------------------------------------------------------------- what executing promises


@pytest.mark.ascend
def test_views_of_one_storage() -> None:
    """x and the output side by side in each row; the rest of the storage and autograd's versions stay as they are."""
    storage = torch.randn(9, 50)
    before = storage.clone()
    x, out = storage[:, :20], storage[:, 25:45]
    arguments = {"p_x": x, "p_out": out, "rows": 9, "columns": 20, "x_stride": 50, "out_stride": 50}
    plan = demo.plan_rows(9, 20)
    with recording(run=False) as launches:
        launch(demo.softmax_kernel, plan.grid, arguments, {"ROWS": plan.rows, "COLUMNS": plan.columns})
    version = storage._version
    assert len(execution.regions_of({"p_x": x, "p_out": out})) == 2, "no element in common: guarded apart"
    proof.execute(launches)
    before[:, 25:45] = out
    assert torch.equal(storage, before)
    is_softmax(out, x)
    assert storage._version == version


@pytest.mark.ascend
def test_shared_expanded_and_empty_memory() -> None:
    """An output in place of the input; an input whose rows are one; tensors without elements."""
    x = torch.randn(9, 20)
    before = x.clone()
    proof.execute(capture(demo.softmax, x, p_out=x)[1])
    is_softmax(x, before)
    expanded = torch.randn(1, 19).expand(37, 19)
    out, launches = capture(demo.softmax, expanded)
    proof.execute(launches)
    is_softmax(out, expanded)
    proof.execute(capture(demo.softmax, torch.ones(0, 19), plan=demo.RowPlan(8, 32, (1,)))[1])

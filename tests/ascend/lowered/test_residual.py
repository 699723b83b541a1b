"""Attention residual's launches, captured from the public op: lowered by triton-ascend, executed, gated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_kernels.device import DEVICES, UB_VARIABLE, npu_of
from ascend_kernels.launch import Launch, recording
from ascend_kernels.residual import tiling
from ascend_kernels.residual.rows import MAX_POINTERS
from dispatch import attention_residual
from tests.ascend.lowered import gates, proof
from tests.support import cases
from tests.support.residual_cases import EPS, Case, check, make, through_the_public_op

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LOADS_STORES = {
    "forward": (3, 3),
    "backward": (6, 2),
    "weights": (3, 2),
    "scores": (3, 2),
    "mix": (3, 1),
    "products": (3, 2),
    "gradients": (8, 2),
    "table": (0, MAX_POINTERS),
}
"""Block copies in and out that a kernel's source has, with one for all of the blocks' pointers."""
ADDRESSES = ("stacked", "pointers", "table")

TOKENS = 19
"""More than three times the vector cores of an NPU here (conftest.py): programs take several tokens."""
LARGE_UB = 256 << 10
LARGE = {"logits": 100.0, "spread": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "rows of 2040": {"dim": 2040, "blocks": 9, **LARGE},
    "four rows of 1024": {"dim": 1024, "blocks": 3, **LARGE},
    "eight rows of 123": {"dim": 123, "blocks": 6, "norm": False},
    "one row": {"dim": 17, "blocks": 1, "batch": 2},
    "one number, whose rstd ** 3 is past fp16": {"dim": 1, "blocks": 1, "tokens": 10},
    "weights in fp32": {"dim": 40, "blocks": 4, "weight_dtype": torch.float32},
    "every second feature": {"dim": 48, "blocks": 5, "layout": "strided"},
    "64 rows": {"dim": 1, "blocks": 64, "batch": 2, "layout": "token-major"},
    "a list of rows of 2040": {"dim": 2040, "blocks": 4, "layout": "list"},
    "the longest list of pointers": {"dim": 256, "blocks": 16, "layout": "list", "batch": 2},
    "a table of rows of 2048": {"dim": 2048, "blocks": 17, "layout": "slices"},
    "tiled": {"dim": 2500, "blocks": 5, "tokens": 11, **LARGE},
    "tiled, the dim of models": {"dim": 4096, "blocks": 8, "tokens": 11, "norm": False},
    "tiled list": {"dim": 2500, "blocks": 3, "layout": "list", "tokens": 11},
    "tiled table": {"dim": 2560, "blocks": 17, "layout": "slices", "tokens": 5},
    "large UB": {"dim": 4096, "blocks": 3, "tokens": 5, "ub": LARGE_UB},
    "large UB, tiled": {"dim": 5000, "blocks": 3, "tokens": 5, "ub": LARGE_UB},
    "large UB, tiled table": {"dim": 5008, "blocks": 17, "layout": "slices", "tokens": 3, "ub": LARGE_UB},
}

BETWEEN: dict[str, dict[str, Any]] = {
    **{f"rows of {dim}": {"dim": dim, "blocks": 9, **LARGE} for dim in (250, 500, 1000)},
    **{f"four rows of {dim}": {"dim": dim, "blocks": 3, **LARGE} for dim in (256, 500)},
    "eight rows of 512": {"dim": 512, "blocks": 6, "norm": False},
    **{f"a list of rows of {dim}": {"dim": dim, "blocks": 4, "layout": "list"} for dim in (250, 500, 1000)},
    **{f"a table of rows of {dim}": {"dim": dim, "blocks": 17, "layout": "slices"} for dim in (256, 512, 1024)},
    "large UB, table": {"dim": 4096, "blocks": 17, "layout": "slices", "tokens": 3, "ub": LARGE_UB},
    "large UB, list": {"dim": 4000, "blocks": 3, "layout": "list", "tokens": 5, "ub": LARGE_UB},
    "large UB, tiled list": {"dim": 5000, "blocks": 2, "layout": "list", "tokens": 5, "ub": LARGE_UB},
}
"""Rows of other sizes, and slow compilations of lists, left to `--full`."""


@contextmanager
def ub_of(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rest of the case, on a device of its UB."""
    rest = {"tokens": TOKENS, **case}
    with pytest.MonkeyPatch.context() as patch:
        if "ub" in rest:
            patch.setenv(UB_VARIABLE, str(rest.pop("ub")))
        yield rest


def specialisation_of(launch: Launch) -> tuple[str, torch.dtype, int, int, str] | None:
    """As `tiling.specialisations` lists it, and how blocks are addressed; None for the kernel that writes tables."""
    kernel = launch.kernel.fn.__name__.removesuffix("_kernel")
    if kernel == "table":
        return None
    constants = {"ROWS": 1, "ADDRESS": 0, **launch.constants}
    dtype = launch.arguments["p_partials" if kernel == "weights" else "p_0"].dtype
    return kernel, dtype, constants["BLOCK_D"], constants["ROWS"], ADDRESSES[constants["ADDRESS"]]


def gate(launches: Sequence[Launch]) -> None:
    """Block copies only, and tiles from the list, within the UB of a device that has as much."""
    known = set(tiling.specialisations())
    for launch in launches:
        linalg = proof.lower(launch).linalg
        kernel = launch.kernel.fn.__name__.removesuffix("_kernel")
        gates.assert_no_single_element_loops(linalg, kernel)
        found = specialisation_of(launch)
        loads, stores = LOADS_STORES[kernel]
        if found is None:
            assert gates.count_block_copies(linalg) == {"load": loads, "store": stores}
            continue
        _, dtype, block_d, rows, address = found
        assert found[:4] in known
        loads += (MAX_POINTERS - 1) * (address == "pointers")
        if kernel == "backward" and not launch.constants["ONE_TILE"]:
            loads += 1  # all scores of a token
        assert gates.count_block_copies(linalg) == {"load": loads, "store": stores}
        live = tiling.live_bytes(kernel, block_d, rows, dtype.itemsize)
        plan = tiling.Plan(block_d, rows, False, False, 1, launch.grid[0], live, {})
        gates.assert_plan_is_honest(plan, linalg, kernel)
        ub = npu_of(torch.device("cpu")).ub
        for device in (name for name, listed in DEVICES.items() if listed.ub >= ub):
            gates.assert_plan(plan, device, kernel)


def executed(case: Case, backend: str) -> tuple[Tensor, ...]:
    """The result and gradients of the public op, whose launches run from their Linalg, forward and backward."""
    with proof.executing() as launches:
        out = attention_residual(*case.inputs(case.leaves), EPS, backend=backend)
        gradients = torch.autograd.grad(out, case.leaves, case.do)
    gate(launches)
    return (out.detach(), *gradients)


@pytest.mark.ascend
@pytest.mark.parametrize(
    ("case", "dtype"), [*cases.product(CASES, DTYPES), *cases.rest(*product(BETWEEN, DTYPES))], ids=str
)
def test_cases(case: str, dtype: torch.dtype) -> None:
    with ub_of((CASES | BETWEEN)[case]) as options:
        check("ascend", run=executed, dtype=dtype, **options)


@pytest.mark.ascend
def test_tokens_do_not_meet() -> None:
    """NaN in one token's blocks, and an infinite gradient of another, stay with these tokens."""
    case = make(6, 20, 3)
    blocks, do = case.blocks.detach().clone(), case.do.clone()  # type: ignore[union-attr]
    blocks[1, 0, 2] = torch.nan
    do[0, 4] = torch.inf
    out, gradient, *_ = executed(replace(case, blocks=blocks.requires_grad_(), do=do), "ascend")
    assert out.isnan().any(-1).flatten().nonzero().flatten().tolist() == [2]
    assert (~gradient.isfinite()).any(-1).any(0).flatten().nonzero().flatten().tolist() == [2, 4]


def test_every_specialisation_is_executed() -> None:
    """Derived from the cases by recording their launches. Lists have one row in a tile."""
    with recording(run=False) as launches:
        for dtype, case in product(DTYPES, (CASES | BETWEEN).values()):
            with ub_of(case) as options:
                through_the_public_op(make(dtype=dtype, **options), "ascend")
    found = {specialisation_of(launch) for launch in launches} - {None}
    listed = {
        (kernel, dtype, block_d, rows, address)
        for kernel, dtype, block_d, rows in tiling.specialisations()
        for address in (ADDRESSES if rows == 1 and kernel != "weights" else ADDRESSES[:1])
    }
    assert not listed - found, f"no case launches {sorted(map(str, listed - found))}"
    assert not found - listed, f"not among the specialisations: {sorted(map(str, found - listed))}"


@pytest.mark.parametrize(
    ("dtype", "size"), cases.product(DTYPES, [(1024, "stacked"), (4096, "stacked"), (8192, "list")]), ids=str
)
def test_compiles_for_sm_90(dtype: torch.dtype, size: tuple[int, str]) -> None:
    """Tiles are loaded ahead where the plan says so, straight into shared memory, of which there is enough."""
    dim, layout = size
    case = make(3, dim, 8, dtype=dtype, layout=layout)
    with recording(run=False) as launches:
        through_the_public_op(case, "triton")
    assert len(launches) == 3
    for one in launches:
        made = proof.compile_ptx(one)
        assert made.shared_bytes <= 227 << 10
        assert ("cp.async" in made.ptx) == (one.constants.get("STAGES", 1) > 1)

"""Every kernel that a Blackwell GPU runs, executed on a CPU: tests/support/blackwell_cases.py says what and how.

CI executes the part of the table in which every value of its axes comes (`make test-interpreted`);
`make test-blackwell` all of it, and `make test` only looks at the record:
bench/results/blackwell-executed.json holds what tools/execute_blackwell.py recorded of it.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.report import RESULTS
from nsa import NSAConfig, nsa, nsa_forward_aux
from nsa.inputs import NSAInputs
from tests.ptx import Launched, Schedule
from tests.support import blackwell_cases as blackwell
from tests.support import cases
from tests.support.blackwell_cases import Case, Execution
from tests.support.helpers import EXP2_ERROR, make_qkv
from tests.support.interpreted_gpu import interpreted_gpu

pytestmark = [pytest.mark.cuda_extra, pytest.mark.slow, pytest.mark.filterwarnings("default")]

TABLE = [
    pytest.param(case, schedule, marks=[] if here else pytest.mark.full, id=f"{case.name}-{schedule}")
    for case, schedule, here in blackwell.table()
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("case", "schedule"), TABLE)
def test_executed(case: Case, schedule: str) -> None:
    execution = blackwell.execute(case, schedule)
    assert not execution.beyond_budgets
    assert not blackwell.unknown(execution.findings)


PRESETS = {"paper": (NSAConfig.paper(), 300), "per tile": (NSAConfig.per_tile(), 130)}
"""With N, which is smaller than in use, as the number of heads is."""


@pytest.mark.interpreted
@pytest.mark.parametrize("preset", ["per tile", *cases.rest("paper")])
def test_nsa_through_dispatch(preset: str) -> None:
    """The public function with autograd, whose backend runs on what it takes for a B200."""
    config, tokens = PRESETS[preset]
    # As rows of the table, so that most kernels are compiled once
    leaves = make_qkv(tokens, 1, 1, 128, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn((1, 3, 128)) * 128**-0.5).to(torch.bfloat16).requires_grad_()
    inputs = NSAInputs(*leaves, gate_proj_weight=weight)
    do = torch.randn_like(leaves[0])
    launched: list[Launched] = []
    with interpreted_gpu("sm_100", Schedule(launched=launched.append)):
        out = nsa(**inputs.tensors(), config=config, backend="cute")
        with torch.no_grad():
            again, aux = nsa_forward_aux(**inputs.tensors(), config=config, backend="cute")
        gradients = torch.autograd.grad(out, [*inputs.tensors().values()], do)
    assert torch.equal(out, again)
    got = {"out": out.detach(), **dict(zip(inputs.tensors(), gradients, strict=True))}
    execution = Execution()
    blackwell.check_nsa(execution, inputs.map(Tensor.detach), config, do, got, (aux.indices, aux.cmp_indices))
    assert not execution.beyond_budgets
    kernels = [blackwell.kernel_class(of.kernel) for of in launched]
    assert {"FlashAttentionForwardSm100", "FlashAttentionBackwardSm100"} <= {*kernels}
    assert ("KVOuterForward" in kernels) == config.token_mode


# What was recorded


def test_record_is_of_this_table() -> None:
    """All of it, as docs/blackwell.md says."""
    record = json.loads((RESULTS / "blackwell-executed.json").read_text(encoding="utf-8"))
    names = [(row["case"], row["schedule"]) for row in record["cases"]]
    assert len({*names}) == len(names) > 0
    table = {(case.name, schedule) for case, schedule, _ in blackwell.table()}
    assert {*names} == table
    page = (RESULTS.parents[1] / "docs" / "blackwell.md").read_text(encoding="utf-8")
    assert f"is recorded in {len(names)} rows" in " ".join(page.split())
    assert not blackwell.missing(form for row in record["cases"] for form in row["forms"])
    assert all(row["error"] <= row["budget"] for row in record["cases"])
    assert not blackwell.unknown(found for row in record["cases"] for found in row["findings"])


def test_error_of_lse_is_that_of_the_polynomial() -> None:
    from flash_attn.cute.utils import POLY_EX2

    x = np.linspace(0, 1, 1 << 20)
    worst = np.abs(np.polyval(POLY_EX2[3][::-1], x) / 2**x - 1).max()
    assert 0.9 * EXP2_ERROR < worst < EXP2_ERROR

"""Kernels without one of the instructions that order them: does the checker of races (tests/ptx/) notice?

FlashAttention-4's on Blackwell, as NSA's selected branch launches them, and kernels per token on Hopper. Every
instruction that orders is left out alone (mutations.py). Of those that are executed, and not known to change nothing,
85 % must be noticed. `make test-interpreted` leaves out a few of FlashAttention-4's; `make test-blackwell` every one.
tools/execute_blackwell.py writes down each, but for those of window and combine.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ptx.mutations import Deletion, Effects, candidates, delete_each
from tests.support import cases
from tests.support.blackwell_cases import kernel_class, known
from tests.support.deletion_cases import (
    backward,
    fa4_case,
    forward,
    paired_backward,
    per_token_cases,
    window_combine_case,
)

pytestmark = [pytest.mark.slow, pytest.mark.interpreted, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]

KNOWN = {forward: set(), backward: {"last stage"}, paired_backward: {"last stage", "pair"}}
"""Findings in the kernels as they are."""
NOTICED = 0.85
ALL = 1 << 20
"""Of the instructions that are executed, and not known to change nothing: every one."""


def noticed_of(deletions: list[Deletion]) -> list[bool]:
    return [x.found for x in deletions if x.executed and not x.reason]


@pytest.mark.parametrize(
    ("make_call", "most"),
    [(forward, 4), (backward, 2), *cases.rest((forward, ALL), (backward, ALL), (paired_backward, ALL))],
)
def test_deletions_from_fa4_are_noticed(make_call: Callable[[], Callable[[], object]], most: int) -> None:
    case, base = fa4_case(make_call), Effects()
    assert not case.run(case.program, base, True)
    assert {known(f"{kernel_class(case.program.name)}: {found}") for found in base.findings} == KNOWN[make_call]
    idle = base.idle()
    wanted = [at for at in candidates(case.program) if at in base.executed and at not in idle]
    apart = max(1, len(wanted) // most)
    noticed = noticed_of(delete_each(make_call.__name__, case, wanted[apart // 2 :: apart]))
    assert len(noticed) >= min(most, 20)
    assert sum(noticed) >= NOTICED * len(noticed)


@pytest.mark.parametrize("warpgroups", [True, *cases.rest(False)], ids=["wgmma", "mma"])
def test_deletions_from_kernels_per_token_are_noticed(warpgroups: bool) -> None:
    for name, case in per_token_cases(warpgroups).items():
        noticed = noticed_of(delete_each(name, case))
        assert noticed
        assert all(noticed), name


@pytest.mark.full
def test_deletions_from_window_and_combine_are_noticed() -> None:
    """All but three `bar.warp.sync` before one lane arrives for its warp: it wrote by itself, or all read together."""
    deletions = [x for x in delete_each("WindowCombine", window_combine_case()) if x.executed and not x.reason]
    missed = [x.instruction for x in deletions if not x.found]
    assert len(deletions) > 40
    assert missed == ["bar.warp.sync -1"] * 3

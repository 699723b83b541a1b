"""bench/soak.py on the CPU: the file of a run, that its bars can fail, and that its steps meet every kind of size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench import soak
from bench.common import with_ending
from cute_kernels.fa4.kernels import FEW_DOCUMENTS
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support.compile_keys import noted_keys

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "docs" / "results_files.md"


def run(out: Path, *options: str) -> dict[str, Any]:
    """After a first step of one kind: a GPU's kernels need every kind, which takes as long as a hundred steps."""
    with mock.patch.object(soak, "every_kind", return_value=[soak.Work((3,))]):
        assert soak.main(["--device=cpu", f"--out={out}", *options]) == 0
    content: dict[str, Any] = json.loads(with_ending(out, ".json").read_text())
    return content


def test_leaves_what_it_promises(tmp_path: Path) -> None:
    content = run(tmp_path / "soak-0.5", "--steps=4", "--every=0.01")
    documented = re.search(r"`bench/soak.py` writes\s+`{(.*?)}`", SCHEMAS.read_text(), re.DOTALL)
    assert documented is not None
    assert set(content) == set(re.findall(r"\w+", re.sub(r"\[.*\]", "", documented[1], flags=re.DOTALL)))
    listed = re.findall(r"\w+", documented[1].partition("runs: [")[2])
    (only,) = content["runs"]
    assert listed == [*list(only)[:-1], "step", "work", "kernels", "records", *only["records"][0]]
    assert (content["steps"], only["steps"], only["not_finite"]) == (4, 4, 0)
    assert content["tokens"] == sum(soak.draw(0, i, soak.SIZES["cpu"].tokens).tokens for i in range(4))
    assert only["records"][-1]["step"] == 4
    assert all(record["loss"] < 10 and record["tokens_per_s"] > 0 for record in only["records"])
    assert [bar["verdict"] for bar in content["bars"][:4]] == ["pass", *["not measured"] * 3]


# The allocator


IMPORT_TORCH = """
import os, runpy, sys

class Stop:
    def find_spec(self, name, *_):
        if name == "torch":
            raise SystemExit([value for name, value in os.environ.items() if name.endswith("_ALLOC_CONF")])

sys.meta_path.insert(0, Stop())
runpy.run_path("bench/soak.py", run_name="__main__")
"""
"""Says what PyTorch will read of its allocator."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64")],
)
def test_segments_are_expandable_unless_told_otherwise(given: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")} | given
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_TORCH], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == str([expected])


# The bars


RECORD = {"allocated_mib": 50.0, "reserved_mib": 100.0, "resident_mib": 200.0, "compiled": 0}
RUN = {"not_finite": 0, "records": [RECORD] * 8}


def later(**changes: Any) -> dict[str, Any]:
    """With other records in its second half."""
    return RUN | {"records": [RECORD] * 4 + [RECORD | changes] * 4}


@pytest.mark.parametrize(
    ("bad", "failing"),
    [
        (RUN, None),
        (RUN | {"not_finite": 1}, 0),
        (later(compiled=1), 1),
        (later(allocated_mib=51.5), 2),
        (later(reserved_mib=107.0), 3),
        (later(resident_mib=213.0), 4),
    ],
)
def test_bars_fail_by_what_they_hold(bad: dict[str, Any], failing: int | None) -> None:
    expected = ["FAIL" if i == failing else "pass" for i in range(5)]
    assert [bar.verdict for bar in soak.bars(bad)] == expected


def test_sees_what_is_not_finite_and_what_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = iter([5, 5, 5, 7, 7])
    monkeypatch.setattr(soak, "num_compiled", lambda _: next(compiled))
    watch = soak.Watch(torch.device("cpu"), 0.0)
    for result in ([2.0, 1.0], [torch.nan, 1.0], [1.0, torch.inf], [4.0, 1.0]):
        watch.saw(soak.Work((3,)), torch.tensor(result))
    watch.record()
    assert watch.run()["not_finite"] == 2
    assert (watch.records[-1]["loss"], watch.records[-1]["compiled"]) == (3.0, 2)
    assert watch.late == [{"step": 2, "work": {"lengths": (3,), "batch": None, "tail": 0}, "kernels": 2}]


# What steps work on


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.sampled_from([1, 2, 64, 16384]))
def test_steps_fit(seed: int, step: int, most: int) -> None:
    work = soak.draw(seed, step, most)
    assert 1 <= work.tokens <= most
    assert (work.batch is None) == (step % 2 == 1)
    symbols, following, bounds = soak.symbols_of(work, torch.Generator().manual_seed(0))
    assert symbols.shape == following.shape
    assert symbols.numel() == work.tokens
    assert torch.equal(symbols[..., 1:], following[..., :-1])
    if bounds is not None:
        assert bounds.diff().tolist() == list(work.lengths)


def test_the_first_steps_meet_every_kind() -> None:
    most = soak.SIZES["cuda"].tokens
    kinds = list(soak.every_kind(soak.SIZES["cuda"]))
    assert kinds[0].tokens == max(work.tokens for work in kinds) == most
    for sequence in (True, False):
        lengths = {work.lengths[0] for work in kinds if (work.batch is not None) == sequence}
        assert {1, 64, 65, 128, 129, 8192, 8193} <= lengths
        for config in (soak.SIZES["cuda"].tile, soak.SIZES["cuda"].token):
            assert {1, 64, 65, 128, 129} <= set(map(config.num_compressed, lengths))
    assert max(len(work.lengths) for work in kinds) > FEW_DOCUMENTS
    drawn = [soak.draw(0, step, most) for step in range(2000)]
    assert max(len(work.lengths) for work in drawn) > FEW_DOCUMENTS
    assert any(0 in work.lengths for work in drawn)


@pytest.mark.cuda_extra
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", ["token", *cases.rest("tile")])
def test_no_size_asks_for_a_kernel_of_its_own(mode: str) -> None:
    """After the first steps. Sizes of kernels' arguments change where tokens are multiples of d, and one later."""
    sizes = soak.SIZES["cuda"]
    config: NSAConfig = getattr(sizes, mode)
    lengths = [n + more for n in range(0, sizes.tokens, 23 * config.stride) for more in (0, 1)]
    works = [soak.Work((n,), batch=1) for n in [*lengths, sizes.tokens] if n > 0]
    with noted_keys() as keys:
        for work in soak.every_kind(sizes):
            train_step(sizes, config, work)
        met = len(keys)
        assert met > 40
        for work in [*works, *(soak.draw(0, step, sizes.tokens) for step in range(50))]:
            train_step(sizes, config, work)
            assert len(keys) == met, work


def train_step(sizes: soak.Sizes, config: NSAConfig, work: soak.Work) -> None:
    """A layer's forward and backward on meta tensors: kernels are asked for, nothing is computed."""
    from cute_kernels import backward, forward

    dim = sizes.width // sizes.heads
    rows = (work.tokens,) if work.batch is None else (work.batch, work.tokens // work.batch)

    def empty(*shape: int) -> Tensor:
        return torch.empty(*rows, *shape, dtype=torch.bfloat16, device="meta")

    q, gates = empty(sizes.heads, dim), empty(sizes.heads, 3)
    k, v = empty(sizes.kv_heads, dim), empty(sizes.kv_heads, dim)
    bounds = torch.empty(len(work.lengths) + 1, dtype=torch.int32, device="meta")
    inputs = NSAInputs(q, k, v, gates=gates, cu_seqlens=None if work.batch is not None else bounds)
    out, saved = forward.nsa_saving(inputs, config, recompute=False)
    backward.nsa_backward(inputs, config, saved, torch.empty_like(out))

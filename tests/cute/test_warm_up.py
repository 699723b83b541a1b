"""Kernels compiled ahead (nsa/warm_up): all that a call needs, whoever is first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.runtime import disk_cache
from nsa import NSAConfig, warm_up
from nsa.warm_up.__main__ import main
from tests.support.helpers import run_child

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported

HOPPER = {"CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_ARCH": "sm_90", "FLASH_ATTENTION_NUM_SMS": "132"}

JOBS = """
import sys, warnings
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
import cutlass.cute as cute
import torch
from nsa import NSAConfig
from nsa.warm_up import _call, worker

class Compiled:
    def export_to_c(self, *, object_file_path, function_name):
        Path(object_file_path).write_bytes(function_name.encode())

calls = [_call((1, 1000, 8, 2, 64), True), _call((1, 1000, 8, 2, 64, 128), True)]
jobs = [
    {"config": asdict(config), "dtype": "bfloat16", "backward": backward, "calls": calls}
    for config in (NSAConfig.per_tile(), NSAConfig.paper()) for backward in (False, True)
]
asked = {}
with (
    mock.patch.object(cute, "compile", lambda *_, **__: Compiled()),
    mock.patch.object(cute.runtime, "load_module", lambda *_, **__: SimpleNamespace(kernel="loaded")),
):
    for job in jobs:
        worker.KERNELS[:] = worker.kernels_of(job)
        asked |= dict.fromkeys(kernel.name for kernel in worker.KERNELS)
        for number in range(len(worker.KERNELS)):
            worker.compile_kernel(number)
from cute_kernels.runtime import jit
print("asked", len(asked), "compiled", len(jit.COMPILED))
print("imported", *(name for name in ("flash_attn", "quack") if name in sys.modules))
"""
"""Does what a process of warm_up does, but compiles nothing."""


def test_kernels_are_kept_and_found(tmp_path: Path) -> None:
    """A later process compiles nothing, and does not import FlashAttention-4."""
    where = tmp_path / "cache"
    environment = {**os.environ, **HOPPER, disk_cache.VARIABLE: str(where)}
    *told, first, imported = run_child(JOBS, environment).splitlines()
    count = len(list(where.glob("*.o")))
    assert first == f"asked {count} compiled {count}"
    assert count > 20
    assert len({line for line in told if line.startswith("there ")}) == count
    assert imported == "imported flash_attn quack"
    *_, later, imported = run_child(JOBS, environment).splitlines()
    assert later == f"asked {count} compiled 0"
    assert imported == "imported"


def test_a_process_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)  # whatever the umask
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "open"))
    with pytest.raises(RuntimeError, match=r"(?s)kernels were not compiled.*must be this user's own"):
        warm_up(processes=1, target=((9, 0), 132))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shapes": [(1, 8192, 8, 2)]}, r"each of shapes must be \(B, N, H, H_kv, D\) or .*, got \(1, 8192, 8, 2\)"),
        ({"shapes": [(1, 8192, 8, 3, 64)]}, "H in shapes must be a multiple of H_kv, got 8 and 3"),
        ({"shapes": [(1, 8192, 8, 2, 96)]}, "D in shapes must be 64 or 128, got 96"),
        ({"shapes": [(1, 8192, 8, 2, 64, 32)]}, "D_v in shapes must be 64 or 128, got 32"),
        ({"processes": 0}, "processes must be at least 1, got 0"),
        ({"target": ((8, 0), 108)}, r"compute capability 9.0 or 10.0, got \(8, 0\)"),
        (
            {"shapes": (1, 8192, 8, 2, 128)},
            r"shapes must be a list of \(B, N, H, H_kv, D\), got \(1, 8192, 8, 2, 128\)",
        ),
        ({"target": "sm_90"}, r"target must be like \(\(9, 0\), 132\), got 'sm_90'"),
        ({"processes": "2"}, "processes must be an integer, got '2'"),
        ({"config": {}}, "config must be an NSAConfig"),
    ],
)
def test_bad_arguments(options: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))
    with pytest.raises((TypeError, ValueError), match=problem):
        warm_up(**options)
    monkeypatch.setenv(disk_cache.VARIABLE, "0")
    with pytest.raises(ValueError, match=f"{disk_cache.VARIABLE} is 0, so kernels are not cached"):
        warm_up()


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    jobs: list[Any] = []

    def run(job: Any, environment: dict[str, str], progress: Any) -> int:
        jobs.append((json.loads(json.dumps(job)), {name: environment[name] for name in HOPPER}))
        progress(1, 2)
        return 2

    monkeypatch.setenv(disk_cache.VARIABLE, "1")
    monkeypatch.setattr(sys.modules["nsa.warm_up"], "_run", run)  # `nsa.warm_up` is the function
    assert main(["--preset", "paper", "--shape", "1,64,4,2,64,128", "--processes", "3", "--target", "sm_90,132"]) == 0
    assert "2 kernels are on disk" in capsys.readouterr().out
    ((job, environment),) = jobs
    assert NSAConfig(**job["config"]) == NSAConfig.paper()
    assert job["calls"] == [
        {"q": [1, 64, 4, 64], "k": [1, 64, 2, 64], "v": [1, 64, 2, 128], "gate_proj_weight": [4, 3, 64]}
    ]
    assert (job["processes"], job["backward"], environment) == (3, True, HOPPER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for wrong, message in (
        (["--target", "hopper"], "--target takes"),
        (["--target", "sm_90,132", "--shape", "1,2"], "each of shapes must be"),
        ([], "no CUDA device is available: pass --target sm_90,132"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert message in capsys.readouterr().err


CALL = """
import hashlib, sys
import torch
from cute_kernels.runtime import jit
from nsa import NSAConfig, nsa
torch.manual_seed(0)
q, k, v = (torch.randn(1, 1000, h, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for h in (8, 2, 2))
weight = torch.randn(8, 3, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
out = nsa(q, k, v, gate_proj_weight=weight, config=NSAConfig.PRESET())
out.sum().backward()
torch.cuda.synchronize()
assert all(x.grad.isfinite().all() for x in (q, k, v, weight))
print(len(jit.COMPILED), jit._spent)
print(*(name for name in ("flash_attn", "quack", "torch._dynamo") if name in sys.modules))
tensors = (out, q.grad, k.grad, v.grad) if REPEATABLE else (out,)
print(*(hashlib.sha256(x.detach().cpu().view(torch.int16).numpy().tobytes()).hexdigest() for x in tensors))
"""


@pytest.mark.cuda
@pytest.mark.parametrize("preset", ["per_tile", "paper"])
def test_a_later_process_compiles_nothing(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it import FlashAttention-4; its results are those of a process that compiles for itself."""
    where = tmp_path / "cache"
    monkeypatch.setenv(disk_cache.VARIABLE, str(where))
    count = warm_up(getattr(NSAConfig, preset)(), [(1, 1000, 8, 2, 64)])
    repeatable = preset == "per_tile" and torch.cuda.get_device_capability()[0] == 9  # no atomics in backward
    call = CALL.replace("PRESET", preset).replace("REPEATABLE", str(repeatable))
    compiled, imported, results = run_child(call, dict(os.environ)).splitlines()[-3:]
    assert (compiled, imported) == ("0 0.0", "")
    assert len(list(where.glob("*.o"))) == count
    *_, own = run_child(call, {**os.environ, disk_cache.VARIABLE: "0"}).splitlines()
    assert results == own

"""bench/probe_max_seqlen.py: the search, what counts as "does not fit", the state file, and real probes on the CPU."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dispatch
from bench import probe_max_seqlen as probe
from bench.report import environment
from nsa import NSAConfig

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--heads", "1", "--dim", "16", "--memory-limit", "0.06"]

# The search


class Memory:
    """Lengths up to `room` fit, those from `slow` on take too long."""

    def __init__(self, room: int, slow: float = math.inf) -> None:
        self.room, self.slow = room, slow
        self.tried: list[int] = []

    def __call__(self, tokens: int) -> probe.Failure | None:
        self.tried.append(tokens)
        if tokens >= self.slow:
            return "timeout"
        return None if tokens <= self.room else "oom"


lengths = st.integers(1, 2**24)


@given(
    room=st.integers(0, 2**24),
    slow=st.none() | lengths,
    start=lengths,
    granularity=lengths,
    maximum=st.none() | lengths,
)
def test_search_brackets_the_limit(
    room: int, slow: int | None, start: int, granularity: int, maximum: int | None
) -> None:
    """Within the granularity, by logarithmically many different trials, none above the maximum; a timeout ends it."""
    memory = Memory(room, math.inf if slow is None else slow)
    bracket = probe.search(memory, start, granularity, maximum)
    timeouts = [tokens for tokens in memory.tried if tokens >= memory.slow]
    fits, fails = bracket.fits or 0, bracket.fails
    assert fits <= room
    assert fits < memory.slow
    if timeouts:
        assert timeouts == memory.tried[-1:]
        assert (bracket.why, fails) == ("timeout", timeouts[0])
    elif maximum is not None and room >= maximum:
        assert bracket == probe.Bracket(maximum, None, "max-seqlen")
    else:
        assert bracket.why == "oom"
        assert fails is not None
        assert room < fails <= fits + granularity
        assert {fails, fits} <= {*memory.tried, 0}
    doublings = max(0, math.ceil(math.log2(max(room, 1) / start))) + 2
    halvings = math.ceil(math.log2(max(start, 2 * room) / granularity + 1)) + 1
    assert len(set(memory.tried)) == len(memory.tried) <= doublings + halvings
    assert 0 < min(memory.tried) <= max(memory.tried) <= (maximum or max(memory.tried))


# Arguments


def test_options_reach_the_configuration() -> None:
    args = probe.parse([*SMALL, "--preset", "paper", "--window-size", "64", "--backward"])
    assert probe.config_of(args) == NSAConfig.paper(window_size=64)
    assert (args.out.stem, args.backend, args.note, args.dense) == ("probe-cpu-nsa-fwd+bwd", "reference", "", None)


@pytest.mark.parametrize("recompute", [[], ["--recompute"]])
def test_the_training_path_is_probed(recompute: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that need gradients, with recompute as asked for; the output and every gradient are looked at."""
    right, given = probe.nsa, []

    def recording(*tensors: torch.Tensor, **keywords: Any) -> torch.Tensor:
        given.append((keywords["recompute"], all(x.requires_grad for x in tensors)))
        return right(*tensors, **keywords)

    monkeypatch.setattr(probe, "nsa", recording)
    args = probe.parse([*SMALL, "--backward", *recompute])
    results = probe.run_op(args, probe.make_inputs(args, 100))
    assert given == [(bool(recompute), True)]
    gradients = [f"the gradient of {name}" for name in ("q", "k", "v", "gate_proj_weight")]
    assert list(results) == ["the output", *gradients]
    for name, tensor in results.items():
        probe.check_finite(name, tensor)
        assert tensor.any()


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("recompute", [[], ["--recompute"]])
def test_a_trial_on_a_gpu_counts_everything(recompute: list[str]) -> None:
    sizes = ["--device", "cuda", "--heads", "4", "--kv-heads", "1", "--dim", "64", "--backend", "cute"]
    trial = probe.run_trial(probe.parse([*sizes, "--backward", *recompute]), 5000)
    assert trial["fits"]
    assert trial["peak_gib"] > 5000 * 64 * 2 * (4 * 4 + 4 * 1) / 2**30


def test_on_a_gpu_without_kernels_the_reference_runs_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: Any, backend: str | None) -> None:
        raise dispatch.BackendError("no backend can run nsa on cuda:\n  cute: not installed")

    on_gpu = probe.parse(SMALL)
    on_gpu.device, on_gpu.dtype = "cuda", "bf16"
    monkeypatch.setattr(dispatch, "resolve", refuse)
    with pytest.raises(dispatch.BackendError):
        probe.backend_for(on_gpu)
    on_gpu.backend = None
    backend, note = probe.backend_for(on_gpu)
    assert backend == "reference"
    assert "cute: not installed" in note
    monkeypatch.setenv("NSA_KERNELS_BACKEND", "reference")
    with pytest.raises(dispatch.BackendError):
        probe.backend_for(on_gpu)


# What counts as "does not fit"


@pytest.mark.parametrize(
    ("error", "device", "expected"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."), "cpu", True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), "cpu", True),
        (RuntimeError("std::bad_alloc"), "cpu", True),
        (RuntimeError("could not create a primitive"), "cpu", True),
        (RuntimeError("could not create a primitive descriptor for the matmul primitive"), "cpu", False),
        (MemoryError(), "cpu", True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "cpu", False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), "cpu", False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "cuda", True),
        (RuntimeError("CUDA error: out of memory"), "cuda", True),
        (type("CUDADialectError", (Exception,), {})("\nerror: CUDA_ERROR_OUT_OF_MEMORY (error code: 2)"), "cuda", True),
        (ValueError("CUDA_ERROR_INVALID_VALUE"), "cuda", False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "cuda", False),
        (MemoryError(), "cuda", False),
    ],
)
def test_only_missing_memory_counts(error: Exception, device: str, expected: bool) -> None:
    assert probe.is_out_of_memory(error, torch.device(device)) is expected


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "timeout", "why", "text"),
    [
        ("import os; os.kill(os.getpid(), 9)", 60, "oom", "SIGKILL"),
        ("import time; time.sleep(60)", 0.1, "timeout", "no result after 0.1 s"),
        ("raise ValueError('q must be nice')", 60, None, "ValueError: q must be nice"),
        ("import os; os.kill(os.getpid(), 15)", 60, None, "status -15"),
    ],
)
def test_how_a_trial_ends(code: str, timeout: float, why: str | None, text: str) -> None:
    """A killed one is out of memory, a slow one is neither; any other failure ends the probe with its text."""
    if why is None:
        with pytest.raises(SystemExit, match=text):
            probe.start_trial(4096, python(code), timeout)
    else:
        trial = probe.start_trial(4096, python(code), timeout)
        assert (trial["n"], trial["fits"], trial["why"]) == (4096, False, why)
        assert text in trial["reason"]


def test_a_result_that_is_not_finite_is_an_error() -> None:
    good = torch.zeros(1, 1000, 2, 4)
    probe.check_finite("the output", good)
    good[:, -1] = math.nan
    with pytest.raises(FloatingPointError, match="the output holds NaN or inf"):
        probe.check_finite("the output", good[:, -1:])


# The limit on memory


def test_the_limit_holds_inside_and_is_lifted_afterwards() -> None:
    elements = 256 * 2**20  # 1 GiB: more than earlier tests can have left free in this process
    with probe.limited_memory(32 * 2**20):
        torch.empty(2**20)
        with pytest.raises(RuntimeError) as refused:
            torch.empty(elements)
        with pytest.raises(MemoryError):
            bytearray(4 * elements)
    assert probe.is_out_of_memory(refused.value, torch.device("cpu"))
    torch.empty(elements)


# The state file


class Trials(Memory):
    """Stands in for subprocess.run of trials. Other commands (git) really run.

    At each trial the state file holds all trials before it: whoever kills the probe loses one.
    """

    really_run = staticmethod(subprocess.run)
    interrupted_at = 0
    out = Path()

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "--trial" not in command:
            return self.really_run(command, **options)
        tokens = int(command[-1])
        if self.tried:
            assert {*self.tried} <= {trial["n"] for trial in json.loads(self.out.read_text())["trials"]}
        if tokens == self.interrupted_at:
            raise KeyboardInterrupt
        why = super().__call__(tokens)
        if why == "timeout":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        trial = probe.trial_row(tokens, 0.5, 0.25, why, why and "MemoryError")
        return subprocess.CompletedProcess(command, 0, json.dumps(trial) + "\n", "")


@pytest.fixture
def run_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs main() against Trials; returns its status, what it printed, and the state file."""

    def run(trials: Trials, *arguments: str) -> tuple[int, str, dict[str, Any]]:
        monkeypatch.setattr(subprocess, "run", trials)
        trials.out = out = tmp_path / "probe.json"
        try:
            status = probe.main([*SMALL, "--out", str(out), *arguments])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out + printed.err, json.loads(out.read_text())

    return run


def test_results_hold_everything_and_no_trial_is_repeated(run_main: Any) -> None:
    status, printed, first = run_main(Trials(room=5000))
    assert (status, first["bracket"]) == (0, {"fits": 4096, "fails": 5120, "why": "oom"})
    assert [trial["n"] for trial in first["trials"]] == [1024, 2048, 4096, 5120, 6144, 8192]
    assert {"n", "fits", "seconds", "peak_gib", "reason"} <= first["trials"][0].keys()
    assert {"device", "versions", "commit", "command", "settings"} <= first.keys()
    assert first["settings"]["backend"] == "reference"
    assert printed.startswith("Longest sequence for nsa forward on ")
    assert "fits N=4,096, does not fit N'=5,120 (granularity 1,024)" in printed

    again, finer = Trials(room=5000), Trials(room=5000)
    _, printed, second = run_main(again)
    assert again.tried == []
    assert "Going on from the 6 trials" in printed
    assert (second["trials"], second["bracket"]) == (first["trials"], first["bracket"])
    _, _, third = run_main(finer, "--granularity", "256")
    assert finer.tried == [4608, 4864]  # 5120 is known
    assert third["bracket"] == {"fits": 4864, "fails": 5120, "why": "oom"}


@pytest.mark.parametrize("change", [["--dim", "32"], ["--backward"], ["--memory-limit", "0.07"], ["another torch"]])
def test_other_settings_start_again_and_say_so(
    run_main: Any, change: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_main(Trials(room=5000))
    if change == ["another torch"]:
        facts = environment(torch.device("cpu"))
        newer = {**facts, "versions": {**facts["versions"], "torch": "99.0"}}
        monkeypatch.setattr(probe, "environment", lambda device: newer)
        change = []
    again = Trials(room=2000)
    _, printed, state = run_main(again, *change)
    assert again.tried == [1024, 2048]
    assert "Starting anew, since the trials in " in printed
    assert state["bracket"] == {"fits": 1024, "fails": 2048, "why": "oom"}


def test_an_interrupted_probe_goes_on_where_it_was(run_main: Any) -> None:
    interrupted = Trials(room=5000)
    interrupted.interrupted_at = 8192
    status, printed, state = run_main(interrupted)
    assert status == 130
    assert "the same command goes on from there" in printed
    assert [trial["n"] for trial in state["trials"]] == [1024, 2048, 4096]
    assert state["bracket"] is None

    rest = Trials(room=5000)
    _, _, state = run_main(rest)
    assert rest.tried == [8192, 6144, 5120]
    assert state["bracket"] == {"fits": 4096, "fails": 5120, "why": "oom"}


def test_more_time_tries_again_what_ran_out_of_it(run_main: Any) -> None:
    _, printed, state = run_main(Trials(room=5000, slow=4096), "--timeout", "10")
    assert state["bracket"] == {"fits": 2048, "fails": 4096, "why": "timeout"}
    assert "fits N=2,048, stopped by time at N'=4,096" in printed
    same = Trials(room=5000)
    run_main(same, "--timeout", "10")
    assert same.tried == []
    longer = Trials(room=5000)
    _, _, state = run_main(longer, "--timeout", "20")
    assert longer.tried == [4096, 8192, 6144, 5120]
    assert state["bracket"]["why"] == "oom"


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "something.json"
    out.write_text("{}")
    with pytest.raises(SystemExit, match="holds no results of this project"):
        probe.main([*SMALL, "--out", str(out)])
    assert out.read_text() == "{}"


# Real processes


def wait_for(what: Callable[[], Any], seconds: float = 120) -> Any:
    """The result of `what` as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_killed_probe_leaves_no_trial_behind(tmp_path: Path) -> None:
    """On a GPU it would hold memory that the next probe's trials miss."""
    pid_file = tmp_path / "pid"
    endless = f"""
import os, time
from bench import probe_max_seqlen as probe
probe.end_with_the_probe()
open({str(pid_file)!r} + ".partial", "w").write(str(os.getpid()))
os.replace({str(pid_file)!r} + ".partial", {str(pid_file)!r})
time.sleep(600)
"""
    starter = f"from bench import probe_max_seqlen as probe; probe.start_trial(1, {python(endless)!r}, timeout=600)"
    killed = subprocess.Popen(python(starter), cwd=CHECKOUT)
    wait_for(pid_file.exists)
    trial = int(pid_file.read_text())
    assert is_running(trial)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    wait_for(lambda: not is_running(trial), seconds=30)

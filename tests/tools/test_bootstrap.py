"""tools/bootstrap.py, without network and without pip: every command it would start is recorded instead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import bootstrap

CHECKOUT = Path(__file__).resolve().parents[2]
GIGABYTE = 10**9
GPU = (0, "GPU 0: NVIDIA H200")


class Machine:
    """A checkout, and what stands in for subprocess.run: nvidia-smi, the Python of .venv, `-m venv` and pip."""

    def __init__(self, checkout: Path, patch: pytest.MonkeyPatch) -> None:
        self.checkout, self.patch = checkout, patch
        self.pip_calls: list[list[str]] = []
        self.venvs_made = 0
        self.venv_python_answer: tuple[int, str] = (0, "{}.{}".format(*sys.version_info[:2]))
        self.nvidia_smi_answer: tuple[int, str] | Exception
        self.failing_pip: tuple[int, str] | None = None
        self.environ: dict[str, str] = {}

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        code, output = self.answer(list(command), options)
        done = subprocess.CompletedProcess(command, code, stdout=output, stderr="")
        if options["check"]:
            done.check_returncode()
        return done

    def answer(self, command: list[str], options: dict[str, Any]) -> tuple[int, str]:
        if command[0].endswith("nvidia-smi"):
            if isinstance(self.nvidia_smi_answer, Exception):
                raise self.nvidia_smi_answer
            return self.nvidia_smi_answer
        if command[1:3] == ["-m", "venv"]:
            venv = Path(command[-1])
            (venv / "bin").mkdir(parents=True, exist_ok=True)
            (venv / "bin" / "python").touch()
            (venv / "pyvenv.cfg").touch()
            (venv / bootstrap.STAMP_NAME).unlink(missing_ok=True)
            self.venvs_made += 1
            return 0, ""
        if not Path(command[0]).exists():
            raise FileNotFoundError(command[0])
        if "pip" in command:
            self.pip_calls.append(command)
            self.environ = options["env"]
            return self.failing_pip or (0, "WARNING: a harmless line")
        return self.venv_python_answer

    def set_devices(self, nvidia_smi: tuple[int, str] | Exception | None = None, npu: str = "") -> None:
        """Args: `nvidia_smi`: its answer, None if there is no such command. `npu`: "npu-smi" or "node"."""
        self.nvidia_smi_answer = FileNotFoundError("nvidia-smi") if nvidia_smi is None else nvidia_smi
        self.patch.setattr(bootstrap.shutil, "which", lambda name: f"/bin/{name}" if name == npu else None)
        self.patch.setattr(bootstrap, "NPU_NODE", CHECKOUT if npu == "node" else CHECKOUT / "no such node")

    def set_up(self, *extras: str) -> None:
        bootstrap.set_up(self.checkout, self.checkout / ".venv", extras)

    @property
    def work(self) -> tuple[int, int]:
        """Numbers of environments made and of calls of pip."""
        return self.venvs_made, len(self.pip_calls)

    @property
    def extras(self) -> list[str]:
        """Extras that the stamp names."""
        found: list[str] = json.loads((self.checkout / ".venv" / bootstrap.STAMP_NAME).read_text())["extras"]
        return found


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine without GPU or NPU, with disk enough and no TORCH_* variables; no test may start a real process."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (checkout / "constraints.txt").write_text("numpy==2.3.5\n")
    machine = Machine(checkout, monkeypatch)
    machine.set_devices()
    monkeypatch.setattr(bootstrap, "ROOT", checkout)
    monkeypatch.setattr(bootstrap.subprocess, "run", machine.run)
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda _: SimpleNamespace(free=100 * GIGABYTE))
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.delenv("TORCH_VERSION", raising=False)
    return machine


# Preflight


def test_old_python_stops_before_anything_runs(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.patch.setattr(bootstrap.sys, "version_info", (3, 9, 1))
    assert bootstrap.main(["--extras", "dev"]) == 1
    assert "Python too old: found 3.9.1" in capsys.readouterr().err
    assert not (machine.checkout / ".venv").exists()


def test_without_a_gpu_that_is_needed_nothing_runs(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--extras", "dev", "--gpu"]
    assert bootstrap.main(arguments) == 1
    assert "this needs an NVIDIA GPU" in capsys.readouterr().err
    assert not (machine.checkout / ".venv").exists()
    machine.set_devices(GPU)
    assert bootstrap.main(arguments) == 0


@pytest.mark.parametrize(
    ("device", "free_gb", "enough"),
    [("CPU", 3.9, False), ("CPU", 4.1, True), ("GPU", 11.9, False), ("GPU", 12.1, True), ("NPU", 2.9, False)],
)
def test_disk_is_measured_against_the_device(device: str, free_gb: float, enough: bool, machine: Machine) -> None:
    machine.patch.setattr(bootstrap.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_gb * GIGABYTE))
    venv, chosen = machine.checkout / ".venv", getattr(bootstrap, device)
    problems = bootstrap.preflight(venv, chosen, make_venv=True, install_torch=True)
    assert len(problems) == (not enough)
    assert all(f"{free_gb} GB free" in problem and f"{chosen.disk_gb} GB" in problem for problem in problems)
    assert bootstrap.preflight(venv, chosen, make_venv=False, install_torch=False) == []


def test_folder_that_is_no_venv_is_left_alone(machine: Machine) -> None:
    (machine.checkout / ".venv").mkdir()
    (machine.checkout / ".venv" / "thesis.tex").touch()
    with pytest.raises(bootstrap.SetUpError, match="in the way and is not a virtual environment"):
        machine.set_up("dev")
    assert (machine.checkout / ".venv" / "thesis.tex").exists()


# Which torch, from where


CPU, NPU = ("torch==2.13.0", ".[bench,dev]"), ("torch==2.7.1", ".[bench,dev,npu]")


@pytest.mark.parametrize(
    ("nvidia_smi", "npu", "expected"),
    [
        (None, "", CPU),
        ((9, "driver not loaded"), "", CPU),
        (subprocess.TimeoutExpired("nvidia-smi", 60), "", CPU),
        (None, "npu-smi", NPU),
        (None, "node", NPU),
        (GPU, "npu-smi", ("torch>=2.6", ".[bench,cuda,dev]")),
    ],
)
def test_torch_for_the_device_is_installed_first_and_kept(
    nvidia_smi: tuple[int, str] | Exception | None, npu: str, expected: tuple[str, str], machine: Machine
) -> None:
    machine.set_devices(nvidia_smi, npu)
    machine.set_up("dev", "bench")
    torch, package = expected
    torch_step, package_step = machine.pip_calls
    assert torch_step[-1] == torch
    assert "-e" not in torch_step
    assert package_step[-3:] == ["-e", package, torch]
    for step in machine.pip_calls:
        assert step[step.index("--constraint") + 1] == "constraints.txt"
        assert "--index-url" not in step
    assert machine.environ["PIP_DISABLE_PIP_VERSION_CHECK"] == "1"


def test_torch_index_serves_the_torch_step_alone(machine: Machine) -> None:
    machine.patch.setenv("TORCH_INDEX", "file:///wheels")
    machine.set_up("dev")
    torch_step, package_step = machine.pip_calls
    assert torch_step[torch_step.index("--index-url") + 1] == "file:///wheels"
    assert "--index-url" not in package_step
    assert "--constraint" not in torch_step, "such an index has not every version"
    assert "--constraint" in package_step


# Stamp: when is there work to do


def test_extras_add_up(machine: Machine) -> None:
    both = ["bench", "dev"]
    for wanted, pip_calls, extras in (([], 2, []), (["bench"], 4, ["bench"]), (both, 6, both), (["bench"], 6, both)):
        machine.set_up(*wanted)
        assert (machine.work, machine.extras) == ((1, pip_calls), extras)


def written(name: str, content: str) -> Callable[[Machine], object]:
    return lambda machine: (machine.checkout / name).write_text(content)


def moved(machine: Machine) -> None:
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("moved"))


STAMP = f".venv/{bootstrap.STAMP_NAME}"
CHANGES: dict[str, tuple[Callable[[Machine], object], int, str]] = {
    "pyproject.toml": (written("pyproject.toml", "[project]\nname = 'renamed'\n"), 1, ""),
    "constraints.txt": (written("constraints.txt", "numpy==2.3.4\n"), 1, ""),
    **{f"stamp {stamp}": (written(STAMP, stamp), 1, "") for stamp in ("not json", "[1]", "{}")},
    "torch": (lambda machine: machine.patch.setenv("TORCH_VERSION", "2.9.1"), 1, "torch==2.9.1"),
    "no Python": (lambda machine: (machine.checkout / ".venv" / "bin" / "python").unlink(), 2, "its Python is gone"),
    "no pip": (lambda machine: setattr(machine, "venv_python_answer", (1, "")), 2, "or has no pip"),
    "old Python": (lambda machine: setattr(machine, "venv_python_answer", (0, "3.9\n")), 2, "another python: 3.9"),
    "moved": (moved, 2, "another checkout: "),
}
"""By name: what happens, how many environments are then made in all, and what is told or given to pip."""


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_installed_again(name: str, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    change, environments, told = CHANGES[name]
    machine.set_up("dev", "bench")
    change(machine)
    machine.set_up("bench")
    assert machine.work == (environments, 4)
    assert told in f"{capsys.readouterr().out} {machine.pip_calls[-1][-1]}"
    assert machine.extras == ["bench"] or environments == 2, "dev was not brought up to date"


def test_new_device_makes_venv_again_and_a_lost_one_does_not(machine: Machine) -> None:
    """A CPU build of torch satisfies torch>=2.6, so pip alone would not replace it once there is a GPU."""
    machine.set_up("dev", "bench")
    machine.set_devices(GPU)
    machine.set_up("dev")
    assert (machine.work, machine.extras) == ((2, 4), ["cuda", "dev"])
    machine.set_devices()
    machine.set_up("dev")
    assert machine.work == (2, 4)


# Failures


def test_pip_failure_is_explained_and_tried_again(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.patch.setenv("TORCH_INDEX", "https://user:secret@index.invalid/simple")
    machine.failing_pip = (1, "\n".join(f"line {number}" for number in range(100)) + "\nERROR: no such wheel")
    assert bootstrap.main(["--extras", "dev"]) == 1

    message = capsys.readouterr().err
    for part in (".venv/bin/python", " -I -m pip install", "torch==2.13.0", "line 99", "ERROR: no such wheel"):
        assert part in message
    assert bootstrap.PIP_ADVICE in message
    for hidden in ("line 10\n", "secret"):
        assert hidden not in message

    machine.failing_pip = None
    assert bootstrap.main(["--extras", "dev"]) == 0
    assert machine.venvs_made == 1, "what was done before the failure is kept"
    assert machine.extras == ["dev"]

    machine.failing_pip = (1, "ERROR")
    assert bootstrap.main(["--extras", "bench"]) == 1
    machine.failing_pip = None
    before = len(machine.pip_calls)
    machine.set_up("dev")
    assert len(machine.pip_calls) == before + 2, "an update that failed leaves no stamp that fits"


# Versions that stand in two files


def pinned_versions(file: str, package: str) -> set[str]:
    return set(re.findall(rf"\b{package}\s*==\s*([\w.]+)", (CHECKOUT / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("tool", ["ruff", "mypy"])
def test_pre_commit_runs_the_versions_of_the_dev_extra(tool: str) -> None:
    (in_dev_extra,) = pinned_versions("pyproject.toml", tool)
    assert pinned_versions(".pre-commit-config.yaml", tool) == {in_dev_extra}


def test_npu_torch_pairs_with_torch_npu() -> None:
    (torch_npu,) = pinned_versions("pyproject.toml", "torch-npu")
    assert f"{bootstrap.NPU.torch}." == f"torch=={torch_npu}"  # .*: any maintenance release

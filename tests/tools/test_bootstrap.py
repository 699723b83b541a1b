"""tools/bootstrap.py, without network and without pip: every command it would start is recorded instead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import bootstrap

CHECKOUT = Path(__file__).resolve().parents[2]
GIGABYTE = 10**9


class Machine:
    """Stands in for subprocess.run: answers for nvidia-smi, the Python of .venv, `-m venv` and pip."""

    def __init__(self) -> None:
        self.pip_calls: list[list[str]] = []
        self.venvs_made = 0
        self.venv_python_answer: tuple[int, str] = (0, "{}.{}".format(*sys.version_info[:2]))
        self.nvidia_smi_answer: tuple[int, str] | Exception = (0, "GPU 0: NVIDIA H200")
        self.failing_pip: tuple[int, str] | None = None
        self.environ: dict[str, str] = {}

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        code, output = self.answer(list(command), options)
        return subprocess.CompletedProcess(command, code, stdout=output, stderr="")

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


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without GPU or NPU, with disk enough and no TORCH_* variables; no test may start a real process."""
    machine = Machine()
    monkeypatch.setattr(bootstrap.subprocess, "run", machine.run)
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda _: SimpleNamespace(free=100 * GIGABYTE))
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.delenv("TORCH_VERSION", raising=False)
    set_devices(monkeypatch, tools=[], npu_node=False)
    return machine


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    extras = "\n".join(f"{extra} = []" for extra in ("bench", "cuda", "dev", "npu"))
    (tmp_path / "pyproject.toml").write_text(
        f"[project]\nname = 'nsa-kernels'\n\n[project.optional-dependencies]\n{extras}\n"
    )
    (tmp_path / "constraints.txt").write_text("numpy==2.3.5\n")
    return tmp_path


def set_devices(monkeypatch: pytest.MonkeyPatch, tools: Sequence[str], npu_node: bool) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/bin/{name}" if name in tools else None)
    monkeypatch.setattr(bootstrap, "NPU_NODE", CHECKOUT if npu_node else CHECKOUT / "no such node")


def set_up(checkout: Path, *extras: str, **options: bool) -> None:
    bootstrap.set_up(checkout, checkout / ".venv", extras, **options)


def stamped_extras(checkout: Path) -> list[str]:
    extras: list[str] = json.loads((checkout / ".venv" / bootstrap.STAMP_NAME).read_text())["extras"]
    return extras


# ---------------------------------------------------------------- preflight


def test_old_python_stops_before_anything_runs(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", checkout)
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 1))
    assert bootstrap.main(["--extras", "dev"]) == 1
    assert "Python too old: found 3.9.1" in capsys.readouterr().err
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("device", "free_gb", "enough"),
    [("CPU", 3.9, False), ("CPU", 4.1, True), ("GPU", 11.9, False), ("GPU", 12.1, True), ("NPU", 2.9, False)],
)
def test_disk_is_measured_against_the_device(
    device: str, free_gb: float, enough: bool, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_gb * GIGABYTE))
    chosen = getattr(bootstrap, device)
    problems = bootstrap.preflight(checkout / ".venv", chosen, make_venv=True, install_torch=True)
    assert len(problems) == (not enough)
    assert all(f"{free_gb} GB free" in problem and f"{chosen.disk_gb} GB" in problem for problem in problems)
    assert bootstrap.preflight(checkout / ".venv", chosen, make_venv=False, install_torch=False) == []


def test_folder_that_is_no_venv_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "thesis.tex").touch()
    with pytest.raises(bootstrap.SetUpError, match="in the way and is not a virtual environment"):
        set_up(checkout, "dev")
    assert (checkout / ".venv" / "thesis.tex").exists()


def test_extras_are_those_of_the_package() -> None:
    """As the build backend understood pyproject.toml."""
    known = metadata.metadata("nsa-kernels").get_all("Provides-Extra")
    assert bootstrap.extras_of(CHECKOUT / "pyproject.toml") == sorted(known)


# ---------------------------------------------------------------- which torch, from where


@pytest.mark.parametrize(
    ("tools", "npu_node", "nvidia_smi", "device"),
    [
        ([], False, (0, ""), "CPU"),
        (["nvidia-smi"], False, (0, "GPU 0: NVIDIA H200"), "GPU"),
        (["nvidia-smi"], False, (0, "No devices found"), "CPU"),
        (["nvidia-smi"], False, (9, "driver not loaded"), "CPU"),
        (["nvidia-smi"], False, subprocess.TimeoutExpired("nvidia-smi", 60), "CPU"),
        (["nvidia-smi"], False, OSError("not executable"), "CPU"),
        (["npu-smi"], False, (0, ""), "NPU"),
        ([], True, (0, ""), "NPU"),
        (["nvidia-smi", "npu-smi"], True, (0, "GPU 0: NVIDIA H200"), "GPU"),
    ],
)
def test_device_is_found(
    tools: list[str],
    npu_node: bool,
    nvidia_smi: tuple[int, str] | Exception,
    device: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.nvidia_smi_answer = nvidia_smi
    set_devices(monkeypatch, tools, npu_node)
    assert bootstrap.find_device() == getattr(bootstrap, device)


@pytest.mark.parametrize(
    ("tools", "torch", "package"),
    [
        ([], "torch==2.13.0", ".[bench,dev]"),
        (["nvidia-smi"], "torch>=2.6", ".[bench,cuda,dev]"),
        (["npu-smi"], "torch==2.7.1", ".[bench,dev,npu]"),
    ],
)
def test_torch_is_installed_first_and_kept(
    tools: list[str], torch: str, package: str, machine: Machine, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_devices(monkeypatch, tools, npu_node=False)
    set_up(checkout, "dev", "bench")
    torch_step, package_step = machine.pip_calls
    assert torch_step[-1] == torch
    assert "-e" not in torch_step
    assert package_step[-3:] == ["-e", package, torch]
    for step in machine.pip_calls:
        assert step[step.index("--constraint") + 1] == "constraints.txt"
        assert "--index-url" not in step
    assert machine.environ["PIP_DISABLE_PIP_VERSION_CHECK"] == "1"


def test_torch_index_serves_the_torch_step_alone(
    machine: Machine, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_INDEX", "file:///wheels")
    set_up(checkout, "dev")
    torch_step, package_step = machine.pip_calls
    assert torch_step[torch_step.index("--index-url") + 1] == "file:///wheels"
    assert "--index-url" not in package_step
    assert "--constraint" not in torch_step, "such an index has not every version"
    assert "--constraint" in package_step


# ---------------------------------------------------------------- stamp: when is there work to do


@pytest.mark.parametrize(
    ("first", "second", "pip_runs_again", "extras_after"),
    [
        (["dev", "bench"], ["bench"], False, ["bench", "dev"]),
        (["dev", "bench"], ["bench", "dev"], False, ["bench", "dev"]),
        (["bench"], ["dev", "bench"], True, ["bench", "dev"]),
        (["bench"], ["dev"], True, ["bench", "dev"]),
        ([], ["dev"], True, ["dev"]),
    ],
)
def test_extras_add_up(
    first: list[str],
    second: list[str],
    pip_runs_again: bool,
    extras_after: list[str],
    machine: Machine,
    checkout: Path,
) -> None:
    set_up(checkout, *first)
    assert (machine.venvs_made, len(machine.pip_calls)) == (1, 2)
    set_up(checkout, *second)
    assert (machine.venvs_made, len(machine.pip_calls)) == (1, 4 if pip_runs_again else 2)
    assert stamped_extras(checkout) == extras_after


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pyproject.toml", "[project]\nname = 'renamed'\n"),
        ("constraints.txt", "numpy==2.3.4\n"),
        *((f".venv/{bootstrap.STAMP_NAME}", stamp) for stamp in ("not json", "[1]", "{}")),
    ],
)
def test_changed_files_install_again(name: str, content: str, machine: Machine, checkout: Path) -> None:
    set_up(checkout, "dev", "bench")
    (checkout / name).write_text(content)
    set_up(checkout, "bench")
    assert (machine.venvs_made, len(machine.pip_calls)) == (1, 4)
    assert stamped_extras(checkout) == ["bench"], "dev was not brought up to date"


def test_changed_torch_version_installs_again(
    machine: Machine, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(checkout, "dev")
    monkeypatch.setenv("TORCH_VERSION", "2.9.1")
    set_up(checkout, "dev")
    assert machine.venvs_made == 1
    assert [call[-1] for call in machine.pip_calls[2:]] == ["torch==2.9.1", "torch==2.9.1"]


@pytest.mark.parametrize(
    ("venv_python_answer", "reason"),
    [
        (None, "its Python is gone"),
        ((1, ""), "its Python is broken or has no pip"),
        ((0, "3.9\n"), r"it has Python 3.9, this is Python \d"),
    ],
)
def test_unusable_venv_is_made_again(
    venv_python_answer: tuple[int, str] | None,
    reason: str,
    machine: Machine,
    checkout: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up(checkout, "dev")
    if venv_python_answer is None:
        (checkout / ".venv" / "bin" / "python").unlink()
    else:
        machine.venv_python_answer = venv_python_answer
    set_up(checkout, "dev")
    assert (machine.venvs_made, len(machine.pip_calls)) == (2, 4)
    assert re.search(reason, capsys.readouterr().out)


def test_new_device_makes_venv_again_and_a_lost_one_does_not(
    machine: Machine, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU build of torch satisfies torch>=2.6, so pip alone would not replace it once there is a GPU."""
    set_up(checkout, "dev", "bench")
    set_devices(monkeypatch, ["nvidia-smi"], npu_node=False)
    set_up(checkout, "dev")
    assert (machine.venvs_made, stamped_extras(checkout)) == (2, ["cuda", "dev"])
    set_devices(monkeypatch, [], npu_node=False)
    set_up(checkout, "dev")
    assert (machine.venvs_made, len(machine.pip_calls)) == (2, 4)


def test_moved_checkout_makes_venv_again(machine: Machine, checkout: Path, tmp_path_factory: Any) -> None:
    set_up(checkout, "dev")
    moved = tmp_path_factory.mktemp("elsewhere") / "checkout"
    checkout.rename(moved)
    set_up(moved, "dev")
    assert machine.venvs_made == 2


# ---------------------------------------------------------------- failures


def test_pip_failure_is_explained_and_tried_again(
    machine: Machine, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", checkout)
    monkeypatch.setenv("TORCH_INDEX", "https://user:secret@index.invalid/simple")
    machine.failing_pip = (1, "\n".join(f"line {number}" for number in range(100)) + "\nERROR: no such wheel")
    assert bootstrap.main(["--extras", "dev"]) == 1

    message = capsys.readouterr().err
    for part in (".venv/bin/python", " -I -m pip install", "torch==2.13.0", "line 99", "ERROR: no such wheel"):
        assert part in message
    for hint in ("HTTPS_PROXY", "TORCH_INDEX", "TORCH_VERSION", "100.0 GB are free"):
        assert hint in message
    for hidden in ("line 10\n", "secret"):
        assert hidden not in message

    machine.failing_pip = None
    assert bootstrap.main(["--extras", "dev"]) == 0
    assert machine.venvs_made == 1, "what was done before the failure is kept"
    assert stamped_extras(checkout) == ["dev"]


def test_failed_update_leaves_no_fitting_stamp(machine: Machine, checkout: Path) -> None:
    set_up(checkout, "bench")
    machine.failing_pip = (1, "ERROR")
    with pytest.raises(bootstrap.SetUpError):
        set_up(checkout, "dev")
    machine.failing_pip = None
    set_up(checkout, "bench")
    assert len(machine.pip_calls) == 2 + 1 + 2


# ---------------------------------------------------------------- versions that stand in two files


def pinned_versions(file: str, package: str) -> set[str]:
    return set(re.findall(rf"\b{package}\s*==\s*([\w.]+)", (CHECKOUT / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("tool", ["ruff", "mypy"])
def test_pre_commit_runs_the_versions_of_the_dev_extra(tool: str) -> None:
    (in_dev_extra,) = pinned_versions("pyproject.toml", tool)
    assert pinned_versions(".pre-commit-config.yaml", tool) == {in_dev_extra}


def test_npu_torch_pairs_with_torch_npu() -> None:
    (torch_npu,) = pinned_versions("pyproject.toml", "torch-npu")
    assert f"{bootstrap.NPU.torch}." == f"torch=={torch_npu}"  # .*: any maintenance release

"""Command lines of scripts: `--help` needs no kernel language and does nothing else; unknown options are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "examples", "tools")
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
SCRIPTS = [file for file in FILES if '\nif __name__ == "__main__":\n' in (ROOT / file).read_text(encoding="utf-8")]
COMMANDS = [*SCRIPTS, "-m dispatch"]
ABSENT = ("cutlass", "flash_attn", "triton", "torch_npu", "quack", "fla", "liger_kernel", "matplotlib", "transformers")

CHILD = """
import contextlib, io, json, runpy, sys
from importlib.abc import MetaPathFinder

ABSENT, COMMANDS, ROOT = json.loads(sys.argv[1])
DEEDS = ("subprocess.Popen", "os.system", "os.exec", "os.mkdir", "os.remove", "os.rename", "socket.connect")
deeds = []

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def watch(event, given):
    writes = event == "open" and isinstance(given[1], str) and set(given[1]) & set("wax+")
    if event in DEEDS or writes:
        deeds.append(f"{event} {given[0]!r}")

def run(command, *arguments):
    out, err = io.StringIO(), io.StringIO()
    deeds.clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if command.startswith("-m "):
                sys.argv = [command[3:], *arguments]
                runpy.run_module(command[3:], run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = f"{ROOT}/{command}".rpartition("/")[0]
                sys.argv = [command, *arguments]
                runpy.run_path(f"{ROOT}/{command}", run_name="__main__")
            status = "came to its end"
        except SystemExit as left:
            status = left.code
        except Exception as error:
            status = repr(error)
    return {"status": status, "out": out.getvalue(), "err": err.getvalue(), "deeds": list(deeds)}

sys.dont_write_bytecode = True
sys.meta_path.insert(0, Absent())
import torch._dynamo  # with the folder that it makes
sys.addaudithook(watch)
found = {command: [run(command, "--help"), run(command, "--no-such-option")] for command in COMMANDS}
print(json.dumps(found))
"""
"""Runs each command twice in one process, which imports torch once; what it does to files and processes is noted."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """To `--help`, and to an option that does not exist."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([ABSENT, COMMANDS, str(ROOT)])],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


def test_scripts_are_found() -> None:
    assert {"bench/bench_nsa_stages.py", "examples/needle.py", "tools/bootstrap.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_helps_and_does_nothing_else(command: str, answers: dict[str, list[dict[str, Any]]]) -> None:
    answer = answers[command][0]
    assert answer["status"] == 0, answer["err"]
    assert answer["out"].startswith("usage: ")
    assert len(answer["out"].splitlines()) > 4, "says what the script is for"
    assert answer["deeds"] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_options_are_refused(command: str, answers: dict[str, list[dict[str, Any]]]) -> None:
    answer = answers[command][1]
    assert answer["status"] == 2, answer
    assert "unrecognized arguments: --no-such-option" in answer["err"]
    assert (answer["out"], answer["deeds"]) == ("", [])


@pytest.mark.parametrize("folder", ["examples", "tools"])
def test_what_is_beside_scripts_is_a_script(folder: str) -> None:
    """Helpers of examples are in examples/shared, so that nobody runs one and sees nothing."""
    assert {file for file in FILES if file.startswith(f"{folder}/")} - set(SCRIPTS) <= {f"{folder}/__init__.py"}


def test_an_ascii_stdout_ends_no_script() -> None:
    """Importing `bench`, as all that print other characters do, has them printed as "?"."""
    code = "import bench; print('1.2 ± 0.1, N²')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1.2 ? 0.1, N?\n"), done.stderr
    others = [file for file in SCRIPTS if "\nfrom bench" not in (ROOT / file).read_text(encoding="utf-8")]
    assert [file for file in others if not file.startswith("tools/")] == [
        "bench/picture.py",
        "bench/tables.py",
    ]  # print paths alone

"""What no source of ours does: load objects that can run code, run text as code, or hand text to a shell."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("nsa", "dispatch", "cute_kernels", "ascend_kernels", "bench", "examples", "tools", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = re.compile(
    r"(builtins\.)?(eval|exec)|os\.(system|popen|spawn\w+|exec\w+)|subprocess\.(getoutput|getstatusoutput)"
    r"|asyncio\.create_subprocess_shell|runpy\.run_path|yaml\.(unsafe_)?load|(pd|pandas)\.read_pickle"
    r"|torch\.(jit\.load|hub\.load\w*|serialization\.\w+)"
)
UNSAFE_ALONE = {"torch.load", "numpy.load"}
"""Imported by their own names they would be `load`, which says nothing."""
PROCESS_CALLS = re.compile(r"subprocess\.(run|Popen|call|check_call|check_output)")
ALLOWED = {("tests/docs/test_pages.py", "exec")}
"""The examples of our own documents."""


def unsafe(source: str) -> list[tuple[int, str]]:
    """Line and name of everything of the kind, by syntax: what a name was bound to elsewhere is not followed."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [(node.lineno, name) for name in names if UNSAFE_CALLS.fullmatch(name) or name in UNSAFE_ALONE]
        elif isinstance(node, ast.Call):
            found += [(node.lineno, name) for name in unsafe_call(node)]
            continue
        else:
            continue
        found += [(node.lineno, name) for name in names if name.partition(".")[0] in UNSAFE_MODULES]
    return found


def unsafe_call(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    found = [name] if UNSAFE_CALLS.fullmatch(name) else []
    if name == "torch.load" and not is_constant(given.get("weights_only"), True):
        found.append("torch.load without weights_only=True")
    if name in ("np.load", "numpy.load") and not is_constant(given.get("allow_pickle", ast.Constant(False)), False):
        found.append("numpy.load with pickles")
    if "shell" in given and not is_constant(given["shell"], False):
        found.append("shell=")
    if PROCESS_CALLS.fullmatch(name) and is_text(call.args[:1]):
        found.append(f"{name} of a string")
    return found


def is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def is_text(arguments: list[ast.expr]) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for node in arguments
    )


def test_no_source_does() -> None:
    assert len(SOURCES) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in unsafe(path.read_text(encoding="utf-8"))
        if (path.relative_to(ROOT).as_posix(), name) not in ALLOWED
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import *",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "import torch\ntorch.load(path, weights_only=False)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "eval(text)",
        "import os\nos.system(text)",
        "import subprocess\nsubprocess.run(command, shell=True)",
        "import subprocess\nsubprocess.check_output(f'ls {folder}')",
        "import subprocess\nsubprocess.getoutput(text)",
    ],
)
def test_each_is_found(source: str) -> None:
    assert unsafe(source)

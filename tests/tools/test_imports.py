"""Imports go one way: no circle among our modules; cute_kernels follows its layers, nsa.common knows no op.

Kernels import neither each other nor what calls them, tests import no tests, and the PTX interpreter nothing of ours.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dispatch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("nsa", "dispatch", "cute_kernels", "ascend_kernels", "bench")

LAYERS = (
    "limits",
    "runtime",
    "mma",
    "pool",
    "lists",
    "select",
    "gate",
    "attend",
    "decode",
    "fa4",
    "refusals",
    "plan",
    "support",
    "neighborhood",
    "block_sparse",
    "call",
    "forward",
    "prefill",
    "decoding",
    "backward",
)
"""Modules and packages of cute_kernels: each imports itself and earlier ones only."""


def modules(package: str) -> dict[str, Path]:
    paths = sorted((ROOT / package).rglob("*.py"))
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in paths}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): path for path, p in parts.items()}


@cache
def names_imported(package: str) -> dict[str, frozenset[str]]:
    """By module, the modules and names of modules that it imports; also in functions and for types alone."""
    imports = {}
    for module, path in modules(package).items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parent = module.split(".")[: -node.level] if node.level else []
                base = ".".join([*parent, *filter(None, [node.module])])
                found |= {f"{base}.{alias.name}" for alias in node.names}
        imports[module] = frozenset(found)
    return imports


def graph(package: str) -> dict[str, set[str]]:
    """Modules of a package that each of them imports."""
    imports = names_imported(package)
    return {
        module: {name if name in imports else name.rpartition(".")[0] for name in names} & {*imports} - {module}
        for module, names in imports.items()
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_no_imports_in_a_circle(package: str) -> None:
    imports = graph(package)
    assert any(imports.values())
    TopologicalSorter(imports).prepare()  # raises CycleError with the modules of a circle


def test_what_the_ops_of_nsa_share_knows_none_of_them() -> None:
    for module, others in graph("nsa").items():
        if module.startswith("nsa.common"):
            assert all(other.startswith("nsa.common") for other in others), (module, others)
        if not module.startswith("nsa.integrations"):
            assert not any(other.startswith("nsa.integrations") for other in others), (module, others)


NEVER = {"bench", "examples", "tools", "tests"}
KNOWS = {"cute_kernels": set(), "ascend_kernels": set(), "dispatch": set(), "nsa": {"dispatch"}}
"""What modules of a package import of ours; dispatch's table names the others as strings."""
OURS = NEVER | set(KNOWS)


@pytest.mark.parametrize("package", KNOWS)
def test_packages_know_no_more_than_those_below_them(package: str) -> None:
    for module, names in names_imported(package).items():
        if module == "dispatch":  # the public functions, for type checkers alone
            names = names - {target.replace(":", ".") for target in dispatch.FUNCTIONS.values()}
        assert {name.partition(".")[0] for name in names} & OURS <= KNOWS[package] | {package}, module


def test_tests_import_no_tests_and_the_ptx_interpreter_nothing_else_of_ours() -> None:
    for module, others in graph("tests").items():
        assert not any(other.rpartition(".")[2].startswith("test_") for other in others), (module, others)
    of_ptx = {
        module: names for module, names in names_imported("tests").items() if f"{module}.".startswith("tests.ptx.")
    }
    assert {"tests.ptx", "tests.ptx.program", "tests.ptx.test_order"} <= set(of_ptx)
    for module, names in of_ptx.items():
        ours = {name for name in names if name.partition(".")[0] in OURS}
        assert all(f"{name}.".startswith("tests.ptx.") for name in ours), (module, ours)


def test_layers_of_cute_kernels() -> None:
    imports = {module: others for module, others in graph("cute_kernels").items() if module != "cute_kernels"}
    assert {module.split(".")[1] for module in imports} == set(LAYERS)
    for module, others in imports.items():
        for other in others:
            assert LAYERS.index(other.split(".")[1]) <= LAYERS.index(module.split(".")[1]), (module, other)


def test_flash_attention_is_imported_in_one_place() -> None:
    for module, names in names_imported("cute_kernels").items():
        imports_it = any(name.partition(".")[0] == "flash_attn" for name in names)
        assert not imports_it or module.startswith("cute_kernels.fa4"), module


def test_no_source_loads_pickles() -> None:
    """ruff has rules for pickle itself; torch.load and numpy.load refuse pickles by default."""
    unsafe = re.compile(
        r"weights_only\s*=\s*(?!True)|allow_pickle\s*=\s*(?!False)|(import|from) (pickle|dill|shelve)\b"
    )
    for folder in sorted(OURS):
        for path in modules(folder).values():
            found = unsafe.search(path.read_text(encoding="utf-8"))
            assert found is None or path == Path(__file__).resolve(), (path, found)

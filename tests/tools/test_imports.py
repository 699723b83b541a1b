"""Imports go one way: no circle among our modules; cute_kernels follows its layers, nsa.common knows no op.

Kernels import neither each other nor what calls them, tests import no tests, and the PTX interpreter nothing of ours.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
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

Graph = Mapping[str, set[str]]


def modules(package: str) -> dict[str, Path]:
    paths = sorted((ROOT / package).rglob("*.py"))
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in paths}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): path for path, p in parts.items()}


def names_imported(source: str, module: str) -> Iterator[str]:
    """Modules, and names of modules, that the source of `module` imports; also in functions and for types alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported(source: str, module: str, known: Mapping[str, object]) -> Iterator[str]:
    """Modules that the source of `module` imports, of those known."""
    for name in names_imported(source, module):
        found = name if name in known else name.rpartition(".")[0]
        if found in known and found != module:
            yield found


def graph(package: str) -> Graph:
    files = modules(package)
    return {name: set(imported(path.read_text(encoding="utf-8"), name, files)) for name, path in files.items()}


def circle(imports: Graph) -> list[str]:
    """Modules of one circle of imports, the first also as the last; [] where there is none."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(imports[module]):
            if found := search(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next(filter(None, (search(module, []) for module in imports)), [])


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1])


def upward(imports: Graph) -> list[str]:
    """Imports against the order of the layers."""
    return [
        f"{module} imports {other}"
        for module, others in imports.items()
        for other in sorted(others)
        if module != "cute_kernels" and layer(other) > layer(module)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_imports_in_a_circle(package: str) -> None:
    assert circle(graph(package)) == []


def test_what_the_ops_of_nsa_share_knows_none_of_them() -> None:
    for module, others in graph("nsa").items():
        if module.startswith("nsa.common"):
            assert all(other.startswith("nsa.common") for other in others), (module, others)


def test_nothing_of_nsa_needs_its_integrations() -> None:
    for module, others in graph("nsa").items():
        if not module.startswith("nsa.integrations"):
            assert not any(other.startswith("nsa.integrations") for other in others), (module, others)


NEVER = {"bench", "examples", "tools", "tests"}
KNOWS = {"cute_kernels": set(), "ascend_kernels": set(), "dispatch": set(), "nsa": {"dispatch"}}
"""What modules of a package import of ours; dispatch's table names the others as strings."""
OURS = NEVER | set(KNOWS)


@pytest.mark.parametrize("package", KNOWS)
def test_packages_know_no_more_than_those_below_them(package: str) -> None:
    ours = OURS - KNOWS[package] - {package}
    for module, path in modules(package).items():
        names = set(names_imported(path.read_text(encoding="utf-8"), module))
        if module == "dispatch":  # the public functions, for type checkers alone
            names -= {target.replace(":", ".") for target in dispatch.FUNCTIONS.values()}
        assert {name for name in names if name.partition(".")[0] in ours} == set(), module


def test_tests_import_no_tests() -> None:
    files = modules("tests")
    for module, path in files.items():
        for other in imported(path.read_text(encoding="utf-8"), module, files):
            assert not other.rpartition(".")[2].startswith("test_"), f"{module} imports {other}"


def test_the_ptx_interpreter_imports_nothing_else_of_ours() -> None:
    files = modules("tests/ptx")
    assert {"tests.ptx", "tests.ptx.program", "tests.ptx.test_order"} <= set(files)
    for module, path in files.items():
        ours = {name for name in names_imported(path.read_text("utf-8"), module) if name.split(".")[0] in OURS}
        assert {name for name in ours if not f"{name}.".startswith("tests.ptx.")} == set(), module


def test_layers_of_cute_kernels() -> None:
    imports = graph("cute_kernels")
    assert {module.split(".")[1] for module in imports if module != "cute_kernels"} == set(LAYERS)
    assert sum(map(len, imports.values())) > 100
    assert upward(imports) == []


def test_flash_attention_is_imported_in_one_place() -> None:
    for module, path in modules("cute_kernels").items():
        names = names_imported(path.read_text(encoding="utf-8"), module)
        imports_it = any(name.partition(".")[0] == "flash_attn" for name in names)
        assert not imports_it or module.startswith("cute_kernels.fa4"), module


SOURCE = """
from typing import TYPE_CHECKING

from cute_kernels import limits
from cute_kernels.fa4.masks import Mask

if TYPE_CHECKING:
    import cute_kernels.lists.worklist

def plan():
    from cute_kernels.forward import nsa
"""


def test_every_kind_of_import_is_found() -> None:
    known = dict.fromkeys([f"cute_kernels.{name}" for name in ("limits", "fa4.masks", "lists.worklist", "forward")])
    assert set(imported(SOURCE, "cute_kernels.plan", known)) == set(known)
    relative = "from . import masks\nfrom ..limits import MAX_SIZE"
    assert set(imported(relative, "cute_kernels.fa4.interface", known)) == {
        "cute_kernels.fa4.masks",
        "cute_kernels.limits",
    }

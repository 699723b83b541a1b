"""Imports between modules of `nsa` and `dispatch` go one way."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imports() -> dict[str, set[str]]:
    """The modules of `nsa` and `dispatch` that each of them imports, by name."""
    files = [*(ROOT / "nsa").rglob("*.py"), *(ROOT / "dispatch").rglob("*.py")]
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & set(modules)
            elif isinstance(node, ast.ImportFrom) and node.module in modules:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= submodules & set(modules) or {node.module}
    return found


def test_there_is_no_import_circle() -> None:
    found, done = imports(), set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for imported in sorted(found[module]):
                visit(imported, (*path, module))
            done.add(module)

    for module in found:
        visit(module, ())


def test_shared_code_imports_no_op_and_dispatch_nothing_of_nsa() -> None:
    for module, imported in imports().items():
        if module.startswith("nsa.common"):
            assert all(name.startswith(("nsa.common", "dispatch")) for name in imported), (module, imported)
        if module.partition(".")[0] == "dispatch":
            assert all(name.startswith("dispatch") for name in imported), (module, imported)


def test_every_op_has_the_same_modules() -> None:
    """One place for the public functions, checks, autograd, operators, the meta device and layers of each op."""
    for op in ("", "neighborhood", "residual"):
        names = {file.stem for file in (ROOT / "nsa" / op).glob("*.py")}
        assert {"api", "validate", "autograd", "ops", "meta", "module"} <= names, op

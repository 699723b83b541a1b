"""Kernels of cute_kernels, as its sources define them: what must be compiled and launched."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

HOPPER_ONLY = re.compile(
    r"attend\.((compressed|selected|window)_backward|window_combine|window_dq_combine)\.|lists\.selected_worklist\."
    r"|.*(use_wgmma|warpgroups)=True"
)
"""Forms of kernels that no sm_100 GPU runs."""
OTHERS = "cute_kernels.fa4"
"""Module whose kernels are not ours."""


def our_kernels(arch: str = "sm_90a") -> set[str]:
    """Classes with a form for the architecture."""
    forms = (form for form in every_form() if arch == "sm_90a" or not HOPPER_ONLY.match(form))
    return {form.partition(" ")[0].rpartition(".")[2] for form in forms}


@cache
def every_form() -> set[str]:
    """Kernel classes of ours, once for each value of each flag of `compile`."""
    found = set()
    for path in sorted((ROOT / "cute_kernels").rglob("*.py")):
        package, *module = path.relative_to(ROOT).with_suffix("").parts
        if ".".join([package, *module]).startswith(OTHERS):
            continue
        classes = [x for x in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(x, ast.ClassDef)]
        for kernel, node in [(x.name, member) for x in classes for member in x.body]:
            if not isinstance(node, ast.FunctionDef) or "compiled_once" not in map(ast.unparse, node.decorator_list):
                continue
            arguments = (*node.args.args, *node.args.kwonlyargs)
            flags = [a.arg for a in arguments if a.annotation is not None and ast.unparse(a.annotation) == "bool"]
            for value in (True, False):
                found |= forms(".".join([*module, kernel]), dict.fromkeys(flags, value))
    return found


def forms(kernel: str, flags: Mapping[str, bool]) -> set[str]:
    """Names of the forms of a kernel with these flags. `kernel`: its module and class."""
    return {f"{kernel} {flag}={value}" for flag, value in flags.items()} or {kernel}


def forms_of(compile_: Callable[..., Any], arguments: Mapping[str, Any]) -> set[str]:
    """Names of the forms of a kernel, from `compile` of its class and the arguments with all defaults."""
    flags = [flag for flag, of in inspect.signature(compile_).parameters.items() if of.annotation == "bool"]
    name = f"{compile_.__module__.removeprefix('cute_kernels.')}.{compile_.__qualname__.removesuffix('.compile')}"
    return forms(name, {flag: arguments[flag] for flag in flags})

"""Triton's interpreter without work that it repeats: a pytest plugin of the child processes in which it runs.

It replaces triton.language's functions by interpreted ones at each call of a device function, though the launch around
the call has done so, which is two fifths of the time that our kernels take. Here, a module that has interpreted
functions is left as it is; what a launch replaces it puts back, as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch: Callable[[Any], Any] = interpreter._patch_lang


@cache
def languages(function: Any) -> list[ModuleType]:
    """Of `tl` and `tl.core`, those that a function's module sees."""
    return [x for x in function.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]


def patch_once(function: Any) -> Any:
    """In place of `_patch_lang`. Args: what is about to be called."""
    seen = languages(function)
    if seen and not any(tl.core.is_builtin(language.load) for language in seen):
        return interpreter._LangPatchScope()
    return _patch(function)


interpreter._patch_lang = patch_once

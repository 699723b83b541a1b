"""FlashAttention-4's kernels on disk, found without FlashAttention-4: importing it takes longer than loading them.

Each kernel is an entry of runtime/disk_cache.py under FA4's own key, which FA4 has to be imported and called for. So
launch.py notes besides which of them the calls of a signature take. A later process that makes such a call finds the
note, and by it the kernels. Where one of them is missing, the call is recorded again.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cutlass.utils
import torch

from cute_kernels.runtime import disk_cache, jit
from cute_kernels.runtime.compiling import COMPILING
from cute_kernels.runtime.device import compute_capability, multiprocessors, positional

PACKAGE = "flash_attn.cute"

TARGET_VARIABLES = ("FLASH_ATTENTION_ARCH", "FLASH_ATTENTION_NUM_SMS")
"""Of FA4: what to choose kernels for, where that is not the GPU."""

LOADED: dict[str, Callable[..., None]] = {}
"""Kernels that notes named, by their keys."""


@cache
def fingerprint() -> str | None:
    """Hash of FA4's sources, which are not imported for it, and of what they compile with; None: none are found."""
    parent = find_spec(PACKAGE.partition(".")[0])
    places = None if parent is None else parent.submodule_search_locations
    if places is None:
        return None
    specs = (finder.find_spec(PACKAGE, places) for finder in sys.meta_path)
    origin = next((spec.origin for spec in specs if spec is not None), None)
    if origin is None:
        return None
    return f"{disk_cache.sources(Path(origin).parent)} {disk_cache.installed().get('quack-kernels')}"


def folder(kernels: Any = None) -> Path | None:
    """Where kernels are kept; None: they are not, or FA4 keeps them itself.

    Args:
        kernels: FA4's cache of them. Default: its forward's, if it is imported. That of a test is kept nowhere.
    """
    where = disk_cache.folder()
    if f"{PACKAGE}.interface" not in sys.modules:
        plain = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") != "1"
    else:
        from flash_attn.cute.cache_utils import JITCache
        from flash_attn.cute.interface import _flash_attn_fwd

        plain = type(_flash_attn_fwd.compile_cache if kernels is None else kernels) is JITCache
    return None if where is None or not plain or fingerprint() is None else where


def key_of_kernel(stage: str, key: Any) -> str:
    """FA4's key tells its kernels apart on one GPU; the number of multiprocessors is compiled in besides."""
    return disk_cache.key_of(f"{stage} {key!r}", **_facts())


def note(call: str, signature: Any, where: Path, kernels: Sequence[tuple[str, Any]], sizes: Sequence[int]) -> None:
    """Note what calls of a signature take: kernels, each by FA4's stage and key, and sizes that launches need."""
    keys = [key_of_kernel(stage, key) for stage, key in kernels]
    disk_cache.note(where, _key_of_calls(call, signature), json.dumps([keys, sizes]))


def find(call: str, signature: Any) -> tuple[list[Callable[..., None]], list[int]] | None:
    """What `note` was given, the kernels loaded; None where that is not on disk. The caller holds COMPILING."""
    where = folder()
    text = None if where is None else disk_cache.noted(where, _key_of_calls(call, signature))
    if where is None or text is None:
        return None
    keys, sizes = json.loads(text)
    for key in keys:
        if key not in LOADED:
            with disk_cache.Entry(where, key) as entry:
                if entry.found is None:
                    return None
                LOADED[key] = positional(entry.found)
    return [LOADED[key] for key in keys], sizes


def check_import() -> None:
    """Raises what importing FA4 raises. It is known to be importable if it was with the packages installed now."""
    where = folder()
    key = "" if where is None else disk_cache.key_of(f"import {PACKAGE}", fa4=fingerprint(), all=disk_cache.installed())
    if where is None or disk_cache.noted(where, key) is None:
        with COMPILING, warnings.catch_warnings():  # filters are the process's: two threads would mix theirs up
            warnings.simplefilter("ignore")  # its own deprecations
            importlib.import_module(PACKAGE)
        if where is not None:
            disk_cache.note(where, key, "")


def _key_of_calls(call: str, signature: Any) -> str:
    """A signature holds all that FA4's choice of kernels depends on in one process, in the place of the GPU its device.

    FA4 chooses by the GPU's capability and multiprocessors or by TARGET_VARIABLES, and by torch's CUDA.
    """
    device, *rest = signature
    capability = compute_capability(device.index or 0)
    arch, count = map(os.environ.get, TARGET_VARIABLES)
    chosen_for = "".join(filter(str.isdigit, arch)) if arch else f"{capability[0]}{capability[1]}"
    return disk_cache.key_of(
        f"{call} {rest!r}",
        **_facts(),
        capability=capability,
        chosen_for=(chosen_for, int(count or multiprocessors(device))),
        cuda_of_torch=torch.version.cuda,
    )


def _facts() -> dict[str, Any]:
    """What kernels and FA4's choice of them depend on, beside what `disk_cache.key_of` adds."""
    unimportant = (*TARGET_VARIABLES, "FA_LOG_LEVEL")
    return {
        "options": jit.OPTIONS,
        "fa4": fingerprint(),
        "sms": cutlass.utils.HardwareInfo().get_device_multiprocessor_count(),
        "switches": sorted(
            (name, value)
            for name, value in os.environ.items()
            if name.startswith(("FLASH_ATTENTION_", "FA_")) and name not in unimportant
        ),
    }

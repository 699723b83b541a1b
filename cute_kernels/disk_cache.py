"""Compiled kernels in a folder, so that later processes need not compile them again.

Off unless NSA_KERNELS_JIT_CACHE is set: to 1, for ~/.cache/nsa-kernels/jit (or under XDG_CACHE_HOME), or to a folder.

An entry is an object file, KEY-CONTENT.o: KEY is a hash of all that it depends on (what was asked for, the sources
here, architecture, options, versions), CONTENT that of its bytes. It is loaded as native code, so before every load

- the folder must be this user's own, no link, and closed to everybody else (mode 0700), as must the file be (0600);
- its bytes must have the hash that its name says; an entry where they have not is compiled anew.

Processes that want the same entry wait for each other (a lock held by the operating system, so gone with its process):
one compiles, the others load. Whatever else goes wrong with the folder is told once, and kernels are compiled without
it. Nothing is ever removed: entries of versions that are no longer used can be deleted at any time.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cutlass.cute as cute

VARIABLE = "NSA_KERNELS_JIT_CACHE"
FUNCTION = "kernel"
"""Name of the function in an object file."""
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
PRIVATE = 0o077
"""What neither group nor others may do."""


class Untrusted(OSError):
    """Others could have written what would be loaded."""


def folder() -> Path | None:
    """Where the environment says that compiled kernels are kept; None: nowhere."""
    value = os.environ.get(VARIABLE, "0")
    if value in ("", "0"):
        return None
    if value != "1":
        return Path(value).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nsa-kernels" / "jit"


def key_of(asked: str, **facts: object) -> str:
    """Of what is compiled for `asked`, here and with these facts."""
    facts |= {
        "asked": asked,
        "machine": platform.machine(),
        "python": sys.version_info[:2],
        "sources": _sources(),
        "versions": {name: version(name) for name in PACKAGES},
    }
    return _hash(json.dumps(facts, sort_keys=True).encode())


def load_or_make(where: Path, key: str, make: Callable[[], Any]) -> Any:
    """The function that is kept under a key, or what `make` compiles, kept from now on.

    Args:
        make: returns what CuTe DSL compiled, with `export_to_c`.
    """
    made: Any = None
    try:
        _open(where)
        with _lock(where / f"{key}.lock"):
            found = _load(where, key)
            if found is not None:
                return found
            made = make()
            _keep(where, key, made)
    except OSError as problem:
        _tell_once(f"compiled kernels are not kept in {where}: {problem}")
    return make() if made is None else made


def _open(where: Path) -> None:
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(where, stat.S_ISDIR, 0o700)


def _check(path: Path, is_kind: Callable[[int], bool], mode: int) -> None:
    facts = path.lstat()
    if not is_kind(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & PRIVATE:
        raise Untrusted(f"{path} must be this user's own, and of no one else: chmod {mode:o} {path}")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _load(where: Path, key: str) -> Any:
    """None where there is no entry that is whole."""
    for path in sorted(where.glob(f"{key}-*.o")):
        _check(path, stat.S_ISREG, 0o600)
        if path.stem.partition("-")[2] == _hash(path.read_bytes()):
            _load_runtime()
            return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), FUNCTION)
        path.unlink()
    return None


def _keep(where: Path, key: str, compiled: Any) -> None:
    new = where / f"{key}.{os.getpid()}.new.o"
    try:
        new.touch(mode=0o600)
        compiled.export_to_c(object_file_path=str(new), function_name=FUNCTION)
        new.replace(where / f"{key}-{_hash(new.read_bytes())}.o")
    finally:
        new.unlink(missing_ok=True)


@cache
def _load_runtime() -> None:
    """Objects call CuTe DSL's runtime, which `load_module` does not make visible to them."""
    for library in cute.runtime.find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


@cache
def _sources() -> str:
    """Hash of all that is compiled here."""
    here = Path(__file__).parent
    files = {str(path.relative_to(here)): _hash(path.read_bytes()) for path in sorted(here.rglob("*.py"))}
    return _hash(json.dumps(files).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache
def _tell_once(problem: str) -> None:
    warnings.warn(problem, stacklevel=2)

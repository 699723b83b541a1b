"""Compiled kernels in a folder, so that later processes need not compile them again.

Stored in ~/.cache/nsa-kernels/jit (or under XDG_CACHE_HOME), or in the folder named by NSA_KERNELS_JIT_CACHE; 0 turns
the cache off. Holds our kernels and FlashAttention-4's.

An entry is an object file, KEY-CONTENT.o: KEY is a hash of everything it depends on (function and arguments, sources of
cute_kernels, target, options, versions), CONTENT a hash of its bytes. Least recently used entries are evicted when all
entries exceed LIMIT bytes. A note, KEY-CONTENT.json, is an entry that holds text. An entry is loaded as native code, so
before every load

- the folder must be owned by this user, be no link, and be inaccessible to others (mode 0700), as must the file (0600);
- its bytes must have the hash in its name.

An entry whose bytes do not match, or that does not load, is compiled again. Processes that need the same entry wait for
each other: one compiles, the others load. They hold a POSIX lock, which is released when its process ends and is not
inherited by a forked child; threads of a process wait for compiling.COMPILING. Notes need no lock: files appear
atomically, and all writers of a key write the same text. Any other problem with the folder is reported once, and
kernels are compiled without it. Entries may be deleted at any time.
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
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cutlass_dsl import CuTeDSL

from cute_kernels.runtime.compiling import COMPILING

VARIABLE = "NSA_KERNELS_JIT_CACHE"
LIMIT = 1 << 30
"""Bytes of all entries: some thousand kernels."""
FUNCTION = "kernel"
"""Name of the function in an object file."""
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "quack-kernels")
"""Prefixes of distributions that take part in compiling: CuTe DSL's own only depends on those that hold its code."""
PRIVATE = 0o077
"""Permissions of group and others, none of which may be set."""


class Untrusted(OSError):
    """The file may have been written by other users."""


def folder() -> Path | None:
    """Folder of the cache; None if it is off."""
    value = os.environ.get(VARIABLE) or "1"
    if value == "0":
        return None
    where = (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "nsa-kernels" / "jit" if value == "1" else Path(value)
    )
    try:
        return where.expanduser()
    except RuntimeError as problem:  # a user without a home
        _tell_once(f"compiled kernels are not kept in {where}: {problem}")
        return None


def key_of(asked: str, **facts: object) -> str:
    """Key of an entry. Args: `asked`: function and arguments. `facts`: all other dependencies."""
    facts |= {
        "asked": asked,
        "machine": platform.machine(),
        "python": sys.version_info[:2],
        "sources": sources(),
        "target": _target(),
        "cuda": str(cutlass.CUDA_VERSION),
        "versions": _versions(),
    }
    return _hash(json.dumps(facts, sort_keys=True).encode())


def load_or_make(where: Path, key: str, make: Callable[[], Any]) -> Any:
    """Load the function stored under a key, or compile it with `make` and store it.

    Args:
        make: returns a compiled function of CuTe DSL, with `export_to_c`.
    """
    with COMPILING, Entry(where, key) as entry:
        return entry.keep(make()) if entry.found is None else entry.found


class Entry:
    """Location of a kernel in the folder. Inside `with`, which requires COMPILING, no other process compiles it."""

    operation = fcntl.LOCK_EX
    """Operation of fcntl.lockf."""

    def __init__(self, where: Path, key: str) -> None:
        self.where, self.key = where, key
        self.found: Any = None
        """The stored function, if there is one."""
        self._lock: int | None = None
        self._usable = False

    def __enter__(self) -> Entry:
        try:
            _open(self.where)
            self._lock = _lock(self.where / f"{self.key}.lock", self.operation)
            self.found = _load(self.where, self.key)
            self._usable = True
        except OSError as problem:
            self._tell(problem)
        except BaseException:  # an interrupt, after which no `with` lets others go on
            self.__exit__()
            raise
        return self

    def keep(self, compiled: Any) -> Any:
        """Store a compiled function, and return it."""
        try:
            if self._usable:
                _keep(self.where, self.key, compiled)
                _evict(self.where)
        except OSError as problem:
            self._tell(problem)
        return compiled

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _tell(self, problem: OSError) -> None:
        _tell_not_kept(self.where, problem)


def note(where: Path, key: str, text: str) -> None:
    """Store a text under a key."""
    try:
        _open(where)
        _put(where, key, "json", lambda path: path.write_text(text))
    except OSError as problem:
        _tell_not_kept(where, problem)


def noted(where: Path, key: str) -> str | None:
    """Text stored under a key, if any."""
    try:
        _open(where)
        return next((content.decode() for _, content in _unchanged(where, key, "json")), None)
    except OSError as problem:
        _tell_not_kept(where, problem)
        return None


def _open(where: Path) -> None:
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(where, stat.S_ISDIR, 0o700)


def _check(path: Path, is_kind: Callable[[int], bool], mode: int) -> None:
    facts = path.lstat()
    if not is_kind(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & PRIVATE:
        raise Untrusted(f"{path} must be this user's own, and of no one else: chmod {mode:o} {path}")


def _lock(path: Path, operation: int) -> int:
    """Lock a file for this process, until the descriptor is closed.

    COMPILING is held, since closing any descriptor of the file releases a POSIX lock.
    """
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(held, operation)
    except BaseException:
        os.close(held)
        raise
    return held


def _unchanged(where: Path, key: str, kind: str) -> Iterator[tuple[Path, bytes]]:
    """Entries of a key with matching bytes. Others are removed, and so are those that the caller could not load."""
    for path in sorted(where.glob(f"{key}-*.{kind}")):
        try:
            _check(path, stat.S_ISREG, 0o600)
            content = path.read_bytes()
            os.utime(path)  # `_evict` removes the least recently used
        except FileNotFoundError:  # removed by another process
            continue
        if path.stem.partition("-")[2] == _hash(content):
            yield path, content
        path.unlink(missing_ok=True)


def _load(where: Path, key: str) -> Any:
    """Load an entry; None if none loads."""
    for path, _ in _unchanged(where, key, "o"):
        _load_runtime()
        try:
            return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), FUNCTION)
        except Exception as problem:  # CuTe DSL raises various types on load failures
            _tell_once(f"{path} does not load and is compiled anew: {type(problem).__name__}: {problem}")
    return None


def _keep(where: Path, key: str, compiled: Any) -> None:
    _put(where, key, "o", lambda path: compiled.export_to_c(object_file_path=str(path), function_name=FUNCTION))


def _put(where: Path, key: str, kind: str, write: Callable[[Path], object]) -> None:
    # Unique even among threads, and among processes with equal ids, as in two containers
    opened, name = tempfile.mkstemp(f".new.{kind}", f"{key}.", where)
    os.close(opened)
    new = Path(name)
    try:
        write(new)
        new.replace(where / f"{key}-{_hash(new.read_bytes())}.{kind}")
    finally:
        new.unlink(missing_ok=True)


def _evict(where: Path) -> None:
    """Remove least recently used entries until the others fit LIMIT.

    Another process may do the same, or recompile a removed entry: neither does harm.
    """
    found = []
    for path in [*where.glob("*.o"), *where.glob("*.json")]:
        with suppress(FileNotFoundError):
            found.append((path.lstat(), path))
    total = sum(facts.st_size for facts, _ in found)
    for facts, path in sorted(found, key=lambda one: one[0].st_mtime_ns):
        if total <= LIMIT:
            break
        path.unlink(missing_ok=True)
        path.with_name(f"{path.stem.partition('-')[0]}.lock").unlink(missing_ok=True)
        total -= facts.st_size


@cache
def _load_runtime() -> None:
    """Make CuTe DSL's runtime visible to loaded objects, which `load_module` does not do."""
    for library in cute.runtime.find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def _target() -> str:
    """CuTe DSL's exact target: sm_90a is not sm_90."""
    return str(CuTeDSL._get_dsl().envar.arch)


@cache
def installed() -> dict[str, str]:
    """Versions of all distributions; for duplicate names, the first one found."""
    found: dict[str, str] = {}
    for distribution in distributions():
        found.setdefault((distribution.metadata["Name"] or "").lower().replace("_", "-"), distribution.version)
    return found


def _versions() -> dict[str, str]:
    """Versions of the distributions matching PACKAGES."""
    return {name: version for name, version in installed().items() if name.startswith(PACKAGES)}


@cache
def sources(folder: Path = Path(__file__).parents[1]) -> str:
    """Hash of all Python sources in a folder, by default cute_kernels."""
    files = {str(path.relative_to(folder)): _hash(path.read_bytes()) for path in sorted(folder.rglob("*.py"))}
    return _hash(json.dumps(files).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _tell_not_kept(where: Path, problem: OSError) -> None:
    _tell_once(f"compiled kernels are not kept in {where}: {problem}")


@cache
def _tell_once(problem: str) -> None:
    warnings.warn(problem, stacklevel=2)

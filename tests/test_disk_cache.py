"""Compiled kernels on disk (disk_cache.py): kept, found again, refused where others could have written them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels import device, disk_cache, jit

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported and while it compiles

LOOK = """
from cute_kernels import jit, segments
kernel = segments._mark(64, False)
try:
    kernel.run(1)
except TypeError as error:
    assert "mIndices" in str(error), error
assert segments._mark(64, False) is kernel
assert jit.num_compiled() == 1
print(len(jit.COMPILED))
"""
"""Gets one kernel, sees by its complaint that it can be called, and says how many were compiled, not found."""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    disk_cache._tell_once.cache_clear()
    monkeypatch.setenv(device.TARGET_VARIABLE, "sm_90a")
    device.compute_capability.cache_clear()
    yield
    device.compute_capability.cache_clear()


def look(where: Path) -> int:
    """Kernels that a new process compiles."""
    environment = {**os.environ, disk_cache.VARIABLE: str(where)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def entries(where: Path) -> list[Path]:
    return sorted(where.glob("*.o"))


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    where = tmp_path / "new" / "cache"
    assert look(where) == 1
    (entry,) = entries(where)
    assert entry.stat().st_mode & 0o777 == 0o600
    assert where.stat().st_mode & 0o777 == 0o700
    assert look(where) == 0


def test_changed_entry_is_compiled_again(tmp_path: Path) -> None:
    where = tmp_path / "cache"
    look(where)
    (entry,) = entries(where)
    whole = entry.read_bytes()
    for content in (whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], b""):
        entry.write_bytes(content)
        assert look(where) == 1
        assert entries(where) == [entry]
        assert disk_cache._hash(entry.read_bytes()) in entry.name
    assert look(where) == 0


def test_processes_wait_for_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        compiled = list(pool.map(lambda _: look(tmp_path / "cache"), range(3)))
    assert sorted(compiled) == [0, 0, 1]


# What is loaded. Entries here are not objects, and loading them is replaced.


class Compiled:
    """What CuTe DSL compiles, as far as disk_cache.py knows it."""

    def export_to_c(self, *, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_bytes(function_name.encode())


def keep(where: Path, key: str = "a") -> Any:
    return disk_cache.load_or_make(where, key, Compiled)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that are loaded."""
    names: list[str] = []

    class Module:
        kernel = "loaded"

        def __init__(self, path: str, **_: Any) -> None:
            names.append(Path(path).name)

    monkeypatch.setattr(disk_cache.cute.runtime, "load_module", Module)
    return names


def test_nothing_is_kept_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for value, expected in ((None, None), ("0", None), ("", None), ("1", tmp_path / "nsa-kernels" / "jit")):
        if value is None:
            monkeypatch.delenv(disk_cache.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(disk_cache.VARIABLE, value)
        assert disk_cache.folder() == expected


def test_kept_and_loaded(tmp_path: Path, loaded: list[str]) -> None:
    assert isinstance(keep(tmp_path / "cache"), Compiled)
    assert isinstance(keep(tmp_path / "cache", "b"), Compiled)
    assert keep(tmp_path / "cache") == "loaded"
    assert loaded == [f"a-{disk_cache._hash(b'kernel')}.o"]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_open_folders_are_not_used(mode: int, tmp_path: Path, loaded: list[str]) -> None:
    where = tmp_path / "cache"
    keep(where)
    where.chmod(mode)
    with pytest.warns(UserWarning, match=f"must be this user's own, and of no one else: chmod 700 {where}"):
        assert isinstance(keep(where), Compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        assert isinstance(keep(where, "b"), Compiled)
    assert not loaded
    assert len(entries(where)) == 1


def test_open_files_are_not_loaded(tmp_path: Path, loaded: list[str]) -> None:
    where = tmp_path / "cache"
    keep(where)
    (entry,) = entries(where)
    entry.chmod(0o640)
    with pytest.warns(UserWarning, match=f"chmod 600 {entry}"):
        assert isinstance(keep(where), Compiled)
    assert not loaded


def test_links_are_not_followed(tmp_path: Path, loaded: list[str]) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    keep(real)
    link.symlink_to(real)
    with pytest.warns(UserWarning, match="must be this user's own"):
        assert isinstance(keep(link), Compiled)
    (entry,) = entries(real)
    entry.rename(real / "elsewhere")
    entry.symlink_to(real / "elsewhere")
    disk_cache._tell_once.cache_clear()
    with pytest.warns(UserWarning, match="must be this user's own"):
        assert isinstance(keep(real), Compiled)
    assert not loaded


def test_folders_of_others_are_not_used(tmp_path: Path, loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "cache"
    keep(where)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.warns(UserWarning, match="must be this user's own"):
        assert isinstance(keep(where), Compiled)
    assert not loaded


def test_full_disk_changes_nothing(tmp_path: Path) -> None:
    class Full(Compiled):
        def export_to_c(self, *, object_file_path: str, function_name: str) -> None:
            super().export_to_c(object_file_path=object_file_path, function_name=function_name[:1])
            raise OSError(28, "No space left on device")

    where = tmp_path / "cache"
    with pytest.warns(UserWarning, match="No space left on device"):
        assert isinstance(disk_cache.load_or_make(where, "a", Full), Full)
    assert not entries(where)


def test_key_tells_everything_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        disk_cache.key_of("f (64,) []", architecture=(9, 0), options="a"),
        disk_cache.key_of("f (65,) []", architecture=(9, 0), options="a"),
        disk_cache.key_of("f (64,) []", architecture=(10, 0), options="a"),
        disk_cache.key_of("f (64,) []", architecture=(9, 0), options="b"),
    ]
    for name, other in (("version", "0"), ("_sources", "changed")):
        with monkeypatch.context() as patch:
            patch.setattr(disk_cache, name, lambda *_, other=other: other)
            keys.append(disk_cache.key_of("f (64,) []", architecture=(9, 0), options="a"))
    assert len(set(keys)) == len(keys)
    assert disk_cache.key_of("f (64,) []", architecture=(9, 0), options="a") == keys[0]


def test_arguments_tell_kernels_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of every kind that kernels here are made for."""
    from cute_kernels.best_blocks import Blocks
    from cute_kernels.block_lists import Keys

    asked: list[str] = []
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(disk_cache, "key_of", lambda text, **_: asked.append(text) or "key")
    monkeypatch.setattr(disk_cache, "load_or_make", lambda *_: None)

    @jit.compiled_once
    def build(*arguments: Any, **keywords: Any) -> jit.Kernel:
        raise AssertionError

    calls = [
        (1, torch.bfloat16),
        (1, torch.float16),
        (Blocks(32, 16, 64, 16), None),
        (Blocks(32, 16, 64, 16, init=1), None),
        (Keys(32, 16), (64, 128)),
        (Keys(32, 16, causal=False), (64, 128)),
    ]
    for arguments in calls:
        build(*arguments, packed=True)
        build(*arguments, packed=False)
    assert len(set(asked)) == 2 * len(calls)
    assert not any(" at 0x" in text for text in asked)

"""Compiled kernels on disk (runtime/disk_cache.py): kept, found again, refused where others could have written them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cutlass.cutlass_dsl import CuTeDSL

from cute_kernels.runtime import device, disk_cache, jit
from tests.support.helpers import in_threads

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported and while it compiles

LOOK = """
from cute_kernels.lists import kv_to_query
from cute_kernels.runtime import jit
kernel = kv_to_query.TileBits.compile(64, entries=False, packed=False)
try:
    kernel.run(1)
except TypeError as error:
    assert "mIndices" in str(error), error
assert kv_to_query.TileBits.compile(64, entries=False, packed=False) is kernel
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


def test_processes_wait_for_each_other(tmp_path: Path) -> None:
    where = tmp_path / "new" / "cache"
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(lambda _: look(where), range(2)))
    assert sorted(compiled) == [0, 1]
    (entry,) = entries(where)
    assert entry.stat().st_mode & 0o777 == 0o600
    assert where.stat().st_mode & 0o777 == 0o700
    assert disk_cache._hash(entry.read_bytes()) in entry.name


# What is loaded. Entries here are not objects, and loading them is replaced.


class Compiled:
    """What CuTe DSL compiles, as far as runtime/disk_cache.py knows it."""

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


def test_kept_in_the_users_cache_unless_turned_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = tmp_path / "nsa-kernels" / "jit"
    for value, expected in ((None, own), ("", own), ("1", own), ("0", None), (f"{tmp_path}/here", tmp_path / "here")):
        if value is None:
            monkeypatch.delenv(disk_cache.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(disk_cache.VARIABLE, value)
        assert disk_cache.folder() == expected


@pytest.mark.parametrize("value", ["~no such user/kernels", None])
def test_without_a_home_kernels_are_not_kept(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(disk_cache.VARIABLE, value or "1")
    disk_cache._tell_once.cache_clear()
    with pytest.warns(UserWarning, match=f"not kept in {value or '~/.cache'}.*: Could not determine home directory"):
        assert disk_cache.folder() is None
    assert disk_cache.folder() is None  # said once


def test_threads_may_note_the_same_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, both, told = tmp_path / "cache", threading.Barrier(2), []

    def content_hash(content: bytes, own: Any = disk_cache._hash) -> Any:
        both.wait(10)  # both have written, and neither has renamed
        return own(content)

    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "_hash", content_hash)
        patch.setattr(disk_cache, "_tell_not_kept", lambda *problem: told.append(problem))
        in_threads(2, lambda _: disk_cache.note(where, "a", "text"))
    assert told == []
    assert disk_cache.noted(where, "a") == "text"
    assert [path.suffix for path in where.iterdir()] == [".json"]


def link_folder(where: Path) -> None:
    where.symlink_to(where.rename(where.with_name("elsewhere")))


def link_file(where: Path) -> None:
    (entry,) = entries(where)
    entry.symlink_to(entry.rename(where / "elsewhere"))


OTHERS_MAY: dict[str, tuple[Callable[[Path], None], str]] = {
    "read the folder": (lambda where: where.chmod(0o755), "chmod 700 {where}"),
    "write to the folder": (lambda where: where.chmod(0o770), "chmod 700 {where}"),
    "open the folder": (lambda where: where.chmod(0o701), "chmod 700 {where}"),
    "replace the folder": (link_folder, "must be this user's own"),
    "read a file": (lambda where: entries(where)[0].chmod(0o640), "chmod 600 {where}/a-"),
    "replace a file": (link_file, "must be this user's own"),
    "own the folder": (lambda where: None, "must be this user's own"),
}


@pytest.mark.parametrize("what", OTHERS_MAY)
def test_nothing_is_loaded_that_others_may_change(
    what: str, tmp_path: Path, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are not kept in such a folder, either; one warning says so."""
    where = tmp_path / "cache"
    keep(where)
    allow, told = OTHERS_MAY[what]
    allow(where)
    uid = os.getuid() + (what == "own the folder")
    monkeypatch.setattr(os, "getuid", lambda: uid)
    with pytest.warns(UserWarning, match=re.escape(told.format(where=where))):
        assert isinstance(keep(where), Compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(keep(where, "b"), Compiled)
    assert not loaded
    assert any(path.name.startswith("b-") for path in entries(where)) == what.endswith("a file")


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
    def key(text: str = "f (64,) []", options: str = "a") -> str:
        return disk_cache.key_of(text, options=options)

    keys = []
    for target in ("sm_90", "sm_90a", "sm_100a", "sm_100f"):
        monkeypatch.setattr(CuTeDSL._get_dsl().envar, "arch", target)
        keys.append(key())
    assert key() == keys[-1]
    keys += [key("f (65,) []"), key(options="b")]
    monkeypatch.setattr(disk_cache, "sources", lambda: "changed")
    assert len({*keys, key()}) == 7


@pytest.mark.parametrize(
    "distribution",
    ["nvidia_cutlass_dsl", "nvidia_cutlass_dsl_libs_base", "nvidia_cutlass_dsl_libs_cu13", "apache_tvm_ffi"],
)
def test_key_depends_on_every_package_that_compiles(
    distribution: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = disk_cache.key_of("f (64,) []")
    described = tmp_path / f"{distribution}-0.0.1.dist-info" / "METADATA"
    described.parent.mkdir()
    described.write_text(f"Metadata-Version: 2.1\nName: {distribution.replace('_', '-')}\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    disk_cache.installed.cache_clear()
    assert disk_cache.key_of("f (64,) []") != before
    monkeypatch.undo()
    disk_cache.installed.cache_clear()
    assert disk_cache.key_of("f (64,) []") == before


def test_entries_that_do_not_load_are_compiled_again(tmp_path: Path) -> None:
    """Their bytes are those that were written: objects for another linker, say, or of another runtime."""
    where = tmp_path / "cache"
    keep(where)
    (entry,) = entries(where)
    with pytest.warns(
        UserWarning, match=f"{re.escape(str(entry))} does not load and is compiled anew: RuntimeError: .*object file"
    ):
        assert isinstance(keep(where), Compiled)
    assert entries(where) == [entry]


@pytest.mark.parametrize("content", [b"", b"kerne", b"kerNel"])
def test_changed_entries_are_not_loaded(content: bytes, tmp_path: Path, loaded: list[str]) -> None:
    where = tmp_path / "cache"
    keep(where)
    (entry,) = entries(where)
    entry.write_bytes(content)
    assert isinstance(keep(where), Compiled)
    assert not loaded
    assert entry.read_bytes() == b"kernel"


def test_a_forked_child_holds_no_lock(tmp_path: Path, loaded: list[str]) -> None:
    """One that was forked while its parent compiled, and lives longer."""
    where, children = tmp_path / "cache", []

    def make() -> Compiled:
        children.append(fork(lambda: time.sleep(60)))
        return Compiled()

    disk_cache.load_or_make(where, "a", make)
    children.append(fork(lambda: keep(where)))
    try:
        end = time.monotonic() + 20
        while (done := os.waitpid(children[1], os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            time.sleep(0.01)
        assert done == (children.pop(), 0), "another process waits for a lock that a child keeps"
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def fork(work: Callable[[], object]) -> int:
    """A child that does this and ends."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def test_arguments_tell_kernels_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of every kind that kernels here are made for."""
    from cute_kernels.lists.query_to_kv import Keys
    from cute_kernels.select.topk import Blocks

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
        assert build(*arguments, packed=True).compiled is build(*arguments, packed=False).compiled is None
    assert len(set(asked)) == 2 * len(calls)
    assert not any(" at 0x" in text for text in asked)


def test_what_was_not_used_for_longest_is_removed(
    tmp_path: Path, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "cache"
    monkeypatch.setattr(disk_cache, "LIMIT", 2 * len(disk_cache.FUNCTION))  # two entries

    def age(key: str, seconds: int) -> None:
        (path,) = where.glob(f"{key}-*.o")
        os.utime(path, (time.time() - seconds,) * 2)

    for key, seconds in (("a", 300), ("b", 200)):
        keep(where, key)
        age(key, seconds)
    assert keep(where, "a") == "loaded"  # and used now
    keep(where, "c")
    assert [path.name[0] for path in entries(where)] == ["a", "c"]
    assert sorted(path.name for path in where.glob("*.lock")) == ["a.lock", "c.lock"]


@pytest.mark.parametrize("where", ["", "0"])
def test_slow_compilation_is_told_of_once(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(disk_cache.VARIABLE, where)
    monkeypatch.setattr(jit, "_spent", 0.0)
    clock = iter([0.0, 2.0, 10.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr(jit.time, "monotonic", lambda: next(clock))
    for told in (0, 1, 1):
        with jit.told_if_slow():
            pass
        assert len(caplog.records) == told
    kept = "is 0: they are not kept" if where else f"keeps them in {tmp_path}/nsa-kernels/jit (0 turns that off)"
    assert f"{disk_cache.VARIABLE} {kept}" in caplog.text

"""FlashAttention-4's kernels found on disk without it (fa4/kept.py): by what, and what happens where one is missing."""

from __future__ import annotations

import importlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.fa4 import interface, kept
from cute_kernels.fa4.launch import Aux, Mask, MaskMod, _signature
from cute_kernels.runtime import device, disk_cache
from tests.support.helpers import in_threads

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL and FlashAttention-4 warn while they are imported

KERNELS = [("fwd", (torch.bfloat16, 64)), ("bwd", (torch.bfloat16, 128))]
SIGNATURE = (torch.device("meta"), torch.bfloat16, (8, 128, False))


class Compiled:
    def export_to_c(self, *, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_bytes(function_name.encode())


class Hardware:
    multiprocessors = 132

    def get_device_multiprocessor_count(self) -> int:
        return self.multiprocessors


@pytest.fixture(autouse=True)
def where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder of kernels, of a process that has loaded none, on a machine with a GPU."""
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "cache"))
    for name, value in ((device.TARGET_VARIABLE, "sm_90a"), *zip(kept.TARGET_VARIABLES, ("sm_90", "132"), strict=True)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kept, "LOADED", {})
    monkeypatch.setattr(kept.cutlass.utils, "HardwareInfo", Hardware)
    monkeypatch.setattr(disk_cache, "_load_runtime", lambda: None)
    monkeypatch.setattr(
        disk_cache.cute.runtime, "load_module", lambda path, **_: type("", (), {"kernel": Path(path).name[:64]})
    )
    kept.fingerprint.cache_clear()
    disk_cache._tell_once.cache_clear()
    device.compute_capability.cache_clear()
    yield tmp_path / "cache"
    kept.fingerprint.cache_clear()
    device.compute_capability.cache_clear()


def keep(where: Path) -> list[str]:
    """Kernels and the note of them."""
    keys = [kept.key_of_kernel(*kernel) for kernel in KERNELS]
    for key in keys:
        disk_cache.load_or_make(where, key, Compiled)
    kept.note("forward", SIGNATURE, where, [*KERNELS, KERNELS[0]], [64, 128])
    return keys


def find(call: str = "forward", signature: Any = SIGNATURE) -> Any:
    """As a new process does."""
    kept.LOADED.clear()
    with disk_cache.COMPILING:
        return kept.find(call, signature)


def test_found_by_signature(where: Path) -> None:
    assert find() is None
    one, other = keep(where)
    assert find() == ([one, other, one], [64, 128])
    assert interface.num_compiled() >= len(kept.LOADED) == 2
    assert find("backward") is None
    assert find(signature=(*SIGNATURE[:2], (8, 64, False))) is None
    assert find(signature=(torch.device("cuda", 0), *SIGNATURE[1:])) is not None


@pytest.mark.parametrize("pattern", ["{}-*.o", "*.json"])
def test_what_is_missing_or_damaged_is_not_found(pattern: str, where: Path) -> None:
    keys = keep(where)
    (path,) = where.glob(pattern.format(keys[1]))
    path.write_bytes(path.read_bytes()[:-1])
    assert find() is None
    assert not path.exists()
    assert keep(where) == keys
    assert find() is not None
    path.unlink()
    assert find() is None


def test_notes_of_others_are_not_read(where: Path) -> None:
    keep(where)
    (note,) = where.glob("*.json")
    assert note.stat().st_mode & 0o777 == 0o600
    note.chmod(0o620)
    with pytest.warns(UserWarning, match=f"chmod 600 {re.escape(str(note))}"):
        assert find() is None
    note.chmod(0o600)
    where.chmod(0o755)
    disk_cache._tell_once.cache_clear()
    with pytest.warns(UserWarning, match=f"chmod 700 {re.escape(str(where))}"):
        assert find() is None


def test_notes_are_removed_with_what_was_not_used_for_longest(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(where)
    for path in where.glob("*.json"):
        os.utime(path, (0, 0))
    monkeypatch.setattr(disk_cache, "LIMIT", 3 * len(disk_cache.FUNCTION))
    disk_cache.load_or_make(where, "a", Compiled)
    assert not list(where.glob("*.json"))
    assert len(list(where.glob("*.o"))) == 3


def test_kept_nowhere(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(where)
    with monkeypatch.context() as patch:
        patch.setenv(disk_cache.VARIABLE, "0")
        assert find() is None
    with monkeypatch.context() as patch:
        patch.setattr(kept, "fingerprint", lambda: None)
        assert find() is None
    with monkeypatch.context() as patch:
        patch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        patch.delitem(kept.sys.modules, "flash_attn.cute.interface", raising=False)
        assert find() is None
    from flash_attn.cute.interface import _flash_attn_fwd

    monkeypatch.setattr(_flash_attn_fwd, "compile_cache", {})  # of a test
    assert find() is None


def test_keys_tell_everything_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls, and of kernels where these are compiled with it."""

    def keys() -> tuple[str, str]:
        device.compute_capability.cache_clear()
        return kept._key_of_calls("forward", SIGNATURE), kept.key_of_kernel(*KERNELS[0])

    before = keys()
    changes: list[tuple[bool, Callable[[pytest.MonkeyPatch], None]]] = [
        (True, lambda patch: patch.setenv("FLASH_ATTENTION_SWITCH", "1")),
        (True, lambda patch: patch.setenv("FA_DISABLE_2CTA", "1")),
        (True, lambda patch: patch.setattr(Hardware, "multiprocessors", 114)),
        (True, lambda patch: patch.setattr(kept, "fingerprint", lambda: "another")),
        (True, lambda patch: patch.setattr(disk_cache, "sources", lambda *_: "another")),
        (False, lambda patch: patch.setenv(device.TARGET_VARIABLE, "sm_100a")),
        (False, lambda patch: patch.setenv("FLASH_ATTENTION_ARCH", "sm_100")),
        (False, lambda patch: patch.setenv("FLASH_ATTENTION_NUM_SMS", "114")),
        (False, lambda patch: patch.setattr(torch.version, "cuda", "12.9")),
    ]
    calls = {before[0]}
    for compiled_in, change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            call, kernel = keys()
            calls.add(call)
            assert (kernel != before[1]) is compiled_in
    assert len(calls) == 1 + len(changes)
    monkeypatch.setenv("FA_LOG_LEVEL", "2")
    monkeypatch.delenv("FLASH_ATTENTION_ARCH")  # that of the GPU then
    assert keys() == before


def test_masks_tell_calls_apart() -> None:
    """By names that are the same in every process."""
    q = torch.empty(1, 128, 8, 128, dtype=torch.bfloat16, device="meta")
    makers = (interface._ended, interface._ended_in_tile, interface._chosen)
    masks = [MaskMod(make, constants) for make in makers for constants in ((32, 16), (32, 8))]
    signatures = [_signature(q, q, q, Mask(mask_mod=mask_mod), False) for mask_mod in (*masks, None)]
    assert len({kept._key_of_calls("forward", signature) for signature in signatures}) == len(signatures)
    assert not any(" at 0x" in repr(signature) for signature in signatures)
    assert repr(masks[0]) == "cute_kernels.fa4.interface._ended(32, 16)"


def test_fingerprint_changes_with_that_of_flash_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute import cache_utils

    here = tmp_path / "flash_attn" / "cute"
    (here / "part").mkdir(parents=True)
    for name in ("__init__.py", "interface.py", "part/one.py"):
        (here / name).write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cache_utils, "__file__", str(here / "cache_utils.py"))

    def fingerprints() -> tuple[str | None, str]:
        kept.fingerprint.cache_clear()
        disk_cache.sources.cache_clear()
        cache_utils._compute_source_fingerprint.cache_clear()
        return kept.fingerprint(), cache_utils._compute_source_fingerprint()

    seen = [fingerprints()]
    changes: list[Callable[[], object]] = [
        lambda: (here / "interface.py").write_text("changed"),
        lambda: (here / "part" / "two.py").write_text("added"),
        lambda: (here / "part" / "two.py").rename(here / "two.py"),
        lambda: (here / "two.py").unlink(),
        lambda: (here / "part" / "one.py").write_text(""),
    ]
    for change in changes:
        change()
        seen.append(fingerprints())
    ours, theirs = map(set, zip(*seen, strict=True))
    assert len(ours) == len(theirs) == 1 + len(changes) - 1  # an added file was removed again
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "installed", lambda: {"quack-kernels": "99"})
        assert fingerprints()[0] not in ours
    monkeypatch.undo()
    cache_utils._compute_source_fingerprint.cache_clear()
    disk_cache.sources.cache_clear()


def test_an_import_is_checked_once(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []

    def fail(name: str) -> None:
        imported.append(name)
        raise ModuleNotFoundError("No module named 'quack'", name="quack")

    kept.fingerprint()
    monkeypatch.setattr(importlib, "import_module", fail)
    for _ in range(2):  # what fails is tried again
        with pytest.raises(ModuleNotFoundError, match="quack"):
            kept.check_import()
    monkeypatch.setattr(importlib, "import_module", imported.append)
    for _ in range(2):
        kept.check_import()
    assert len(imported) == 3
    packages = disk_cache.installed()
    monkeypatch.setattr(disk_cache, "installed", lambda: {**packages, "quack-kernels": "99"})
    kept.check_import()
    monkeypatch.setenv(disk_cache.VARIABLE, "0")
    kept.check_import()
    assert imported == ["flash_attn.cute"] * 5


def test_threads_that_import_at_once_leave_the_filters_of_warnings(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(disk_cache.VARIABLE, "0")
    first, second, ended = (threading.Event() for _ in range(3))

    def import_module(name: str) -> None:
        """The first begins, the second if it may, the first ends, the second ends."""
        if not first.is_set():
            first.set()
            second.wait(1)
        else:
            second.set()
            ended.wait(10)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with warnings.catch_warnings():
        before = list(warnings.filters)

        def check(number: int) -> None:
            if number == 1:
                first.wait(10)
            kept.check_import()
            ended.set()

        in_threads(2, check)
        assert warnings.filters == before


def test_kernels_are_given_what_flash_attention_gives_them() -> None:
    import tvm_ffi
    from cutlass import Int32
    from flash_attn.cute.utils import AuxData

    def seen(x: Any) -> Any:
        """By a compiled function."""
        if isinstance(x, tvm_ffi.Array):
            return [seen(part) for part in x]
        return type(x).__name__ if isinstance(x, tvm_ffi.Tensor) else x

    assert Aux._fields == AuxData._fields
    given: list[Any] = []
    function = tvm_ffi.convert(lambda x: given.append(seen(x)))
    table = torch.zeros(2, dtype=torch.int32)
    for make in (AuxData, Aux):
        for tensors, scalars in ((None, None), (None, (Int32(3),)), ([table], (Int32(1), Int32(2)))):
            function(make(tensors, scalars))
    assert given == [[None, None], [None, [3]], [["Tensor"], [1, 2]]] * 2

"""The commit that results name: git's, or in a copy without git that of a stamp whose files are all unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import commit as module
from bench.commit import STAMP_NAME, commit, write_stamp


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *named, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With a git that knows nothing of the user's: a hook that runs tests names a repository of its own."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    module.commit.cache_clear()
    yield
    module.commit.cache_clear()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a source, a result, and a file that git ignores."""
    folder = tmp_path / "checkout"
    (folder / "bench" / "results").mkdir(parents=True)
    (folder / "source.py").write_text("one\n")
    (folder / "bench" / "b c.py").write_text("two\n")
    (folder / "bench" / "results" / "run.json").write_text("{}\n")
    (folder / ".gitignore").write_text(f"{STAMP_NAME}\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def copy_of(checkout: Path) -> Path:
    """Without git."""
    folder = checkout.parent / "copy"
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
    return folder


def looked_up(folder: Path) -> str:
    commit.cache_clear()
    return commit(folder)


def test_git_tells_without_a_stamp(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert looked_up(checkout) == head[:12]
    (checkout / "untracked.py").touch()
    (checkout / "bench" / "results" / "run.json").write_text("what a run wrote\n")
    assert looked_up(checkout) == head[:12], "neither is a changed source"
    (checkout / "source.py").write_text("other\n")
    assert looked_up(checkout) == f"{head[:12]}+changes"
    assert looked_up(copy_of(checkout)) == "unknown"
    assert capsys.readouterr().err == ""


def test_a_copy_without_git_knows_its_commit(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert write_stamp(checkout) == f"{STAMP_NAME}: {head[:12]}, 3 files"
    assert set(json.loads((checkout / STAMP_NAME).read_text())["files"]) == {".gitignore", "bench/b c.py", "source.py"}
    copy = copy_of(checkout)
    (copy / "bench" / "results" / "run.json").write_text("what a run wrote\n")
    (copy / "wheels").touch()
    assert looked_up(copy) == head[:12]
    assert capsys.readouterr().err == ""
    (copy / "source.py").write_text("one \n")
    (copy / "bench" / "b c.py").unlink()
    assert looked_up(copy) == f"{head[:12]}+changes"
    assert "2 files differ from .commit.json, such as bench/b c.py, source.py" in capsys.readouterr().err


def test_a_checkout_with_changes_gets_no_stamp(checkout: Path) -> None:
    (checkout / "source.py").write_text("other\n")
    with pytest.raises(ValueError, match=r"commit these changes first, or take them back:\n M source\.py"):
        write_stamp(checkout)
    assert not (checkout / STAMP_NAME).exists()
    with pytest.raises(ValueError, match="is no git checkout"):
        write_stamp(copy_of(checkout))
    inside = checkout / "bench"
    with pytest.raises(ValueError, match="is no git checkout"):
        write_stamp(inside)

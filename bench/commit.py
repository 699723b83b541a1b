"""The commit whose sources run here: from git, or from a file that was written before the sources were copied.

Results of benchmarks are no sources: files in bench/results make no difference. As a script (`make stamp`) it writes
.commit.json: the commit, and a digest of each of its files. Take it along where sources are copied without git, or with
an older one, as to a GPU machine: results then name the true commit, and "+changes" only where a file differs. Standard
library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP_NAME = ".commit.json"
SOURCES = (".", ":(exclude)bench/results")  # Paths as arguments of git
DIGITS, DIGEST_DIGITS = 12, 16  # Digits of a commit's name that are shown, and of a file's digest


@cache
def commit(root: Path = ROOT) -> str:
    """The commit, with "+changes" when sources differ from it; "unknown" where neither git nor a stamp tells.

    A stamp counts unless git knows a later commit to be checked out. Looked up once for each process.
    """
    head, path = _head(root), root / STAMP_NAME
    stamp = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if stamp is None or _came_before(root, stamp["commit"], head):
        return "unknown" if head is None else f"{head[:DIGITS]}{'+changes' * bool(changes(root))}"
    named, files = stamp["commit"][:DIGITS], stamp["files"]
    differing = [path for path, digest in files.items() if digest_of(root / path) != digest]
    if differing:
        examples = ", ".join(differing[:3])
        print(f"{len(differing)} files differ from {STAMP_NAME}, such as {examples}: {named}+changes", file=sys.stderr)
    return f"{named}{'+changes' * bool(differing)}"


def write_stamp(root: Path = ROOT) -> str:
    """Write STAMP_NAME, which goes along with a copy of the checkout. Raises ValueError for one with changes."""
    head = _head(root)
    if head is None:
        raise ValueError(f"{root} is no git checkout with a commit")
    if changed := changes(root):
        raise ValueError(f"commit these changes first, or take them back:\n{changed}")
    listed = _git(root, "ls-files", "-z", "--", *SOURCES).split("\0")
    files = {path: digest_of(root / path) for path in sorted(filter(None, listed))}
    content = {"commit": head, "files": files}
    (root / STAMP_NAME).write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")
    return f"{STAMP_NAME}: {head[:DIGITS]}, {len(files)} files"


def changes(root: Path) -> str:
    """Files of the commit that differ from it, a line each, as `git status` has them."""
    return _git(root, "status", "--porcelain", "--untracked-files=no", "--", *SOURCES).rstrip()


def digest_of(path: Path) -> str | None:
    """Digest of a file's content; None if there is no file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST_DIGITS]
    except OSError:
        return None


def _head(root: Path) -> str | None:
    """The commit that is checked out at `root` itself, not in a folder above it."""
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").strip()) != root.resolve():
            return None
        return _git(root, "rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _came_before(root: Path, stamped: str, head: str | None) -> bool:
    if head is None or head == stamped:
        return False
    command = ["git", "-C", str(root), "merge-base", "--is-ancestor", stamped, head]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    try:
        print(write_stamp())
    except ValueError as refusal:
        sys.exit(str(refusal))

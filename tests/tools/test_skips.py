"""What the tests do without packages of the extras `cuda` and `hf`: skip, and say why; where required, fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HIDING = """
import sys
from importlib import metadata

real = metadata.version

def version(name):
    if name in ("nvidia-cutlass-dsl", "flash-attn-4", "transformers", "accelerate", "peft"):
        raise metadata.PackageNotFoundError(name)
    return real(name)

metadata.version = version

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "flash_attn", "transformers", "peft"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
NEED_IT = {
    "at import": "tests/cute/test_interpreted_nsa.py",
    "in a test": "tests/cute/test_split_backwards.py::test_nothing_to_do",
    "transformers": "tests/nsa/test_transformers_models.py",
}
REQUIRED = ("--require-cuda-extra", "--require-hf-extra")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Pytest in a process that has not these packages, on tests that need them and on one that does not."""
    (folder / "hiding.py").write_text(HIDING, encoding="utf-8")
    others = "tests/docs/test_pages.py::test_commands_exist"
    options = ["-p", "no:cacheprovider", "-p", "hiding", "-q", "--continue-on-collection-errors", *arguments]
    code = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; import pytest; sys.exit(pytest.main())"
    command = [sys.executable, "-c", code, *options, *NEED_IT.values(), others]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_required_it_fails(tmp_path: Path) -> None:
    done = run(tmp_path, *REQUIRED)
    assert done.returncode == 1, done.stdout
    assert (
        "1 failed, 1 passed, " + ("2 errors" if sys.version_info >= (3, 11) else "1 skipped, 1 error")
    ) in done.stdout

"""What the tests do without packages of the extras `cuda` and `hf`: skip, and say why; where required, fail.

And on a GPU of another architecture than they need.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.fa4.rules import STRATEGY_VARIABLE
from tests.support.hardware import DETERMINISTIC, without_sm_90

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
BLACKWELL = """
import os
import torch

os.environ["CUTE_DSL_ARCH"] = "sm_100a"
torch.cuda.is_available = lambda: True
"""
NEED_IT = {
    "at import": "tests/cute/test_forward_steps.py",
    "in a test": "tests/cute/test_window_backward.py::test_nothing_to_do",
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


@pytest.mark.full
def test_without_extras_what_needs_them_skips_and_says_so(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 3 skipped" in done.stdout
    reason = 'needs nvidia-cutlass-dsl, flash-attn-4, not installed here: pip install -e ".[cuda]"'
    assert done.stdout.count(reason) == 2
    if sys.version_info >= (3, 11):
        assert 'needs transformers, accelerate, peft, not installed here: pip install -e ".[hf]"' in done.stdout
    else:
        assert "needs Python 3.11" in done.stdout


def test_required_it_fails(tmp_path: Path) -> None:
    done = run(tmp_path, *REQUIRED)
    assert done.returncode == 1, done.stdout
    assert (
        "1 failed, 1 passed, " + ("2 errors" if sys.version_info >= (3, 11) else "1 skipped, 1 error")
    ) in done.stdout


def test_make_requires_it_where_it_exists() -> None:
    """And on a GPU, where tests that skip would look as if they had run."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    on_linux, elsewhere = makefile.partition("Linux x86_64)")[2].partition("endif")[0].split("\nelse\n")
    required, of_hf = REQUIRED
    assert "TEST_EXTRAS := dev,bench,cuda,hf\n" in on_linux
    assert f"TEST_SCOPE := {required} {of_hf}" in on_linux
    assert required not in elsewhere
    assert of_hf in elsewhere
    of_gpus = re.findall(r"^\t.*-m pytest .*-m cuda(?:.*\\\n)?.*$", makefile, re.MULTILINE)
    assert len(of_gpus) == 3
    assert all(required in command for command in of_gpus)


def test_on_blackwell_tests_of_hopper_skip_and_say_why(tmp_path: Path) -> None:
    (tmp_path / "blackwell.py").write_text(BLACKWELL, encoding="utf-8")
    path = {**os.environ, "PYTHONPATH": str(tmp_path)}
    asked = "tests/cute/test_forward.py::test_tiles_of_128", "tests/cute/test_backward.py::test_deterministic"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "blackwell", "--no-cov", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 skipped" in done.stdout
    assert "passed" not in done.stdout
    for option in ("q_tile_size=128", "deterministic=True"):
        assert f"needs sm_90, this GPU has other tiles and kernels: {option}" in done.stdout


@pytest.mark.usefixtures("hopper")
def test_on_hopper_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STRATEGY_VARIABLE, raising=False)
    assert without_sm_90([DETERMINISTIC.mark]) is None
    monkeypatch.setenv(STRATEGY_VARIABLE, "sm_100")
    assert "deterministic=True" in (without_sm_90([DETERMINISTIC.mark]) or "")
    assert without_sm_90([]) is None

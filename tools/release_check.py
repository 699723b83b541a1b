"""Install the built wheel with each extra into a fresh environment, as a stranger would, and try it there.

    wheel -> environment of each extra in build/release-check -> pip install "wheel[extra]" -> its trial, elsewhere

Without constraints, so with the packages that users get today. TORCH_INDEX as in tools/bootstrap.py. Standard library
only, beside `build` for the wheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from tools import bootstrap  # noqa: E402

ROOT = bootstrap.ROOT
PLACE = ROOT / "build" / "release-check"

BASE = """
import sys
from importlib.metadata import files, version
from pathlib import Path
import dispatch, nsa, torch
assert Path(nsa.__file__).is_relative_to(sys.prefix), nsa.__file__
assert nsa.__version__ == version("nsa-kernels")
(page,) = (file for file in files("nsa-kernels") if file.name == "semantics.md")
assert page.locate().resolve().is_file()
q = torch.randn(1, 80, 2, 8, requires_grad=True)
nsa.nsa(q, q, q, config=nsa.NSAConfig.paper()).sum().backward()
assert q.grad.shape == dispatch.neighborhood_attention(q, q, q).shape
"""
HF = """
from transformers import LlamaConfig, LlamaForCausalLM
from nsa.integrations.transformers import convert
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=50)
model = convert(LlamaForCausalLM(LlamaConfig(**sizes)))
ids = torch.randint(3, 50, (1, 20))
assert model(ids, labels=ids).loss.isfinite()
assert model.generate(ids, max_new_tokens=3, min_new_tokens=3).shape == (1, 23)
"""
PACKAGES = """
from dispatch.device import package_problem
problems = [package_problem(module, {device!r}) for module in {modules}]
assert not any(problems), problems
"""
CUDA = PACKAGES.format(modules=("cutlass.cute", "flash_attn.cute"), device="cuda")
TRIALS = {
    "base": BASE,
    "hf": BASE + HF,
    "cuda": BASE + CUDA,
    "cuda12": BASE + CUDA,
    "npu": BASE + PACKAGES.format(modules=("triton",), device="npu"),
    "bench": BASE + "import matplotlib, numpy, rich",
    "docs": BASE + "import material, mkdocs, mkdocstrings",
    "dev": BASE + "import build, hypothesis, mypy, pytest, xdist",
}
"""Python code that must run with each extra installed."""


def build_wheel(out: Path, sources: Path = ROOT) -> Path:
    """The wheel of a checkout, from a copy: build outputs of before would slip in."""
    packages = (path.parent.name for path in sources.glob("*/py.typed"))
    with tempfile.TemporaryDirectory() as copy:
        for name in (*packages, "docs", "pyproject.toml", "README.md", "LICENSE"):
            take = shutil.copytree if (sources / name).is_dir() else shutil.copy
            take(sources / name, Path(copy) / name)
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), copy]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = out.glob("*.whl")
    return wheel


def try_wheel(python: Path, extra: str, elsewhere: Path) -> None:
    """Run an extra's trial in a folder that is not the checkout."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-W", "ignore", "-c", TRIALS[extra]], check=True, cwd=elsewhere, env=environ)


def check(extra: str, wheel: Path) -> None:
    place = PLACE / extra
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    torch = bootstrap.torch_requirement(bootstrap.NPU if extra == "npu" else bootstrap.CPU)
    package = f"nsa-kernels{'' if extra == 'base' else f'[{extra}]'} @ {wheel.as_uri()}"
    for what in ([*bootstrap.torch_index(), torch], [package]):
        subprocess.run(bootstrap.pip_install(place, "--quiet", *what), check=True)
    try_wheel(bootstrap.venv_python(place), extra, place)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", help=f"of {', '.join(TRIALS)}; base: none. Default: all")
    wanted = parser.parse_args(argv).extras or [*TRIALS]
    if unknown := [name for name in wanted if name not in TRIALS]:
        parser.error(f"argument extras: must be of {', '.join(TRIALS)}, got {unknown[0]!r}")
    PLACE.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as out:
        wheel = build_wheel(Path(out))
        for extra in wanted:
            try:
                check(extra, wheel)
                print(f"{extra}: works")
            except subprocess.CalledProcessError as error:
                failed.append(extra)
                print(f"{extra}: failed: {error}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

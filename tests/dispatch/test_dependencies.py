"""Optional packages that are absent, too old, too new, or broken: the message says what to install, the rest works."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from bench import extras
from dispatch import OPS, Call, Impl, device, explain
from dispatch.device import PACKAGES, TRITON_ASCEND, TRITON_TESTED, Package, fits, package_advice, package_problem
from tests.support.cases import rest

ROOT = Path(__file__).resolve().parents[2]
KNOWN = (*PACKAGES, TRITON_ASCEND)
CUDA_FIX, NPU_FIX = 'pip install "nsa-kernels[cuda]"', 'pip install "nsa-kernels[npu]"'
TRITON_FIX = f'pip install "triton=={TRITON_TESTED}"'
DSL_NEEDS = ">=4.6.2,<=4.8.1"
DSL_PIN, FA4_PIN = f'pip install "nvidia-cutlass-dsl[cu13]{DSL_NEEDS}"', 'pip install "flash-attn-4==4.0.0b36"'
TORCH_NPU_PIN, TRITON_ASCEND_PIN = 'pip install "torch-npu==2.7.1.*"', 'pip install "triton-ascend==3.2.0"'


def newest_that_fits(package: Package) -> str:
    """The last version that its requirement names."""
    return re.split("[<=>]=", package.needs)[-1].removesuffix(".*")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("dispatch.device.NPU_PYTHON_BEFORE", (4, 0))
    monkeypatch.setattr(metadata, "requires", lambda _: ["sympy>=1.13.3"])  # a build of torch for CPUs
    package_problem.cache_clear()
    yield
    package_problem.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], error: BaseException | None = None) -> None:
    """These distributions alone are installed; importing any package raises the error, if one is given."""

    def version(distribution: str) -> str:
        if distribution not in versions:
            raise metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    def import_module(name: str) -> None:
        if error is not None:
            raise error
        if not versions:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(importlib, "import_module", import_module)


@pytest.mark.parametrize(
    ("module", "distribution", "version", "problem"),
    [
        ("cutlass.cute", "nvidia-cutlass-dsl", None, f"not installed: {CUDA_FIX}"),
        ("triton", "triton", None, f"not installed: {TRITON_FIX}"),
        ("torch_npu", "torch-npu", None, f"not installed: {NPU_FIX}"),
        ("cutlass.cute", "nvidia-cutlass-dsl", "4.6.1", f"{{}}, not {DSL_NEEDS}: {DSL_PIN}"),
        ("flash_attn.cute", "flash-attn-4", "4.0.0", f"{{}}, not ==4.0.0b36: {FA4_PIN}"),
        ("triton", "triton", "3.1.0", f"{{}}, not >=3.2: {TRITON_FIX}"),
        ("torch_npu", "torch-npu", "2.8.0", f"{{}}, not ==2.7.1.*: {TORCH_NPU_PIN}"),
        ("triton", "triton-ascend", "3.1.0", f"{{}}, not ==3.2.0: {TRITON_ASCEND_PIN}"),
        ("cutlass.cute", "nvidia-cutlass-dsl", "4.6.2", None),
        ("triton", "triton", "99.0", None),
        ("triton", "triton-ascend", "3.2.0", None),
        ("torch_npu", "torch-npu", "2.7.1.post2", None),
    ],
)
def test_absent_old_and_new(
    module: str, distribution: str, version: str | None, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another version is not imported, which could take the process down."""
    misfit = AssertionError("was imported") if version and problem else None
    pretend(monkeypatch, {distribution: version} if version else {}, misfit)
    expected = problem and f"needs {distribution}, {problem.format(f'{version} is installed')}"
    assert package_problem(module, "npu" if distribution == "triton-ascend" else "cuda") == expected


def test_an_npu_needs_its_own_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"triton": "3.9.0"})
    assert package_problem("triton", "npu") == f"needs triton-ascend, not installed: {NPU_FIX}"


@pytest.mark.parametrize("error", [OSError("no libcuda\nat all"), SystemExit("no libcuda")], ids=["raises", "leaves"])
@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.distribution)
def test_raising_at_import(known: Package, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {known.distribution: newest_that_fits(known)}, error)
    wanted = f'"{known.requirement}"' if known.distribution != "triton" else f'"triton=={TRITON_TESTED}"'
    options = "--no-deps " if known.distribution == "flash-attn-4" else ""
    assert package_problem(known.module, "npu" if known is TRITON_ASCEND else "cuda") == (
        f"needs {known.distribution}, broken: {type(error).__name__}: no libcuda: "
        f"pip install --force-reinstall {options}{wanted}"
    )


def test_each_package_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call comes by here."""
    pretend(monkeypatch, {"nvidia-cutlass-dsl": "4.6.1"})
    first = package_problem("cutlass.cute", "cuda")
    monkeypatch.setattr(metadata, "version", None)
    assert package_problem("cutlass.cute", "cuda") is first


def test_a_build_of_torch_names_its_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ['triton==3.7.1; platform_system == "Linux"'])
    pretend(monkeypatch, {})
    assert package_problem("triton", "cuda") == 'needs triton, not installed: pip install "triton==3.7.1"'


def test_what_a_new_package_no_longer_has_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too new for us, though it can be imported: one of our own modules cannot."""
    row = Impl("op", "fast", "no_such_module_here:run", "nsa.reference:check", packages=("triton",))
    with monkeypatch.context() as patch:
        pretend(patch, {"triton": "99.0"})
        assert package_problem("triton", "cpu") is None  # and is remembered
        advice = f'; triton is 99.0: pip install --force-reinstall "triton=={TRITON_TESTED}"'
        assert package_advice(row.packages) == advice
    monkeypatch.setattr("dispatch.impl.package_advice", lambda _: advice)
    (verdict,) = explain(Call("op", "cpu", torch.float32), rows=(row,))
    assert verdict.reason == (
        f"importing no_such_module_here failed: ModuleNotFoundError: No module named 'no_such_module_here'{advice}"
    )


@pytest.mark.parametrize(
    ("version", "needs", "fit"),
    [
        ("4.8.10", "==4.8.1", False),
        ("3.10.0", ">=3.2", True),
        ("3.1.9", ">=3.2", False),
        ("4.0.0b35", "==4.0.0b36", False),
        ("2.6.0", "==2.7.1.*", False),
        *((version, DSL_NEEDS, True) for version in ("4.6.2+cu13", "4.7.0", "4.8.1", "4.8.1.post1")),
        *((version, DSL_NEEDS, False) for version in ("4.8.2", "4.10.0", "5.0")),
    ],
)
def test_versions(version: str, needs: str, fit: bool) -> None:
    assert fits(version, needs) is fit


def test_versions_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    written = [line.partition(";")[0] for line in re.findall(r'"([^"]+)"', text)]
    for package in KNOWN:
        if package.distribution != "triton":  # the dev extra asks for one that Python 3.14 has wheels of
            assert package.requirement in written
    for distribution, needs in extras.NEEDS.items():
        assert f"{distribution}{needs}" in written
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert all(f"{distribution}=={version}" in pinned for distribution, version in extras.TESTED.items())
    told = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8").partition("## Versions")[2].partition("\n## ")[0]
    newest = {TRITON_TESTED, *(newest_that_fits(package) for package in KNOWN if package.distribution != "triton")}
    assert [version for version in newest if version not in told] == []
    # The oldest is what triton-ascend is made from
    assert fits(newest_that_fits(TRITON_ASCEND), next(each.needs for each in PACKAGES if each.module == "triton"))


@pytest.mark.parametrize(("cuda", "extra"), [("12.9", "cuda12"), ("13.0", "cuda"), (None, "cuda")])
def test_advice_is_for_the_cuda_of_torch(cuda: str | None, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    spec = importlib.util.spec_from_file_location("another_device", str(device.__file__))
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "another_device", other)
    spec.loader.exec_module(other)
    pretend(monkeypatch, {})
    for module in ("cutlass.cute", "flash_attn.cute"):
        assert str(other.package_problem(module, "cuda")).endswith(f'not installed: pip install "nsa-kernels[{extra}]"')
    rows = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    (written,) = (re.findall(r'"([^"]+)"', row) for row in rows if row.startswith(f"{extra} = "))
    assert [package.requirement for package in other.PACKAGES if package.extra == extra] == written


# All of them at once, as Python finds them


STATES = {
    "absent": (None, ""),
    "too-old": ("0.1", ""),
    "too-new": ("99.0", ""),
    "raising": (None, "raise RuntimeError('driver too old\\nand more')"),
    "leaving": (None, "raise SystemExit('driver too old')"),
}
STUBS = {package.distribution: package.module.split(".") for package in PACKAGES} | {
    name: [name] for name in ("matplotlib", "rich", "transformers")
}
ABSENT = {top for top, *_ in STUBS.values()} | {"numpy", "hypothesis"}
JOBS = """
import sys
sys.path.insert(0, sys.argv[1])  # not by PYTHONPATH: CuTe DSL puts itself before that
tried = set()
class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        tried.add(top)
        if top in sys.argv[2].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import torch
tried.clear()  # by torch
import cute_kernels, ascend_kernels, dispatch, nsa
assert tried.isdisjoint(["cutlass", "flash_attn", "torch_npu"])
from nsa import nsa_forward
q, k = torch.randn(1, 100, 4, 16), torch.randn(1, 100, 2, 16)
assert nsa_forward(q, k, k).shape == q.shape
assert dispatch.neighborhood_attention(q, k, k, kernel_size=9).shape == q.shape
assert dispatch.attention_residual([q[0], q[0]], torch.randn(16)).shape == q[0].shape
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
for op in ("nsa", "neighborhood_attention", "attention_residual"):
    for verdict in dispatch.explain(dispatch.Call(op, "cuda", torch.bfloat16)):
        print(op, verdict.impl.backend, verdict.reason)
from dispatch.__main__ import main
torch.cuda.is_available = lambda: False
main(["--all"])
from bench import extras
for name in extras.NEEDS:
    try:
        with extras.needed(name):
            __import__(name).rc
    except SystemExit as error:
        print("bench", error)
"""


def with_stubs(folder: Path, state: str) -> subprocess.CompletedProcess[str]:
    version, body = STATES[state]
    fitting = {package.distribution: newest_that_fits(package) for package in PACKAGES} | extras.TESTED
    for distribution, (top, *inner) in STUBS.items() if state != "absent" else ():
        place = folder / top
        for name in ("", *inner):
            place = place / name
            place.mkdir(exist_ok=True)
            (place / "__init__.py").write_text(body + "\n")
        info = folder / f"{distribution.replace('-', '_')}-1.dist-info"
        info.mkdir()
        shown = version or fitting[distribution]
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {shown}\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUTE_DSL_ARCH": "sm_90a"}
    command = [sys.executable, "-c", JOBS, str(folder), ",".join(ABSENT if state == "absent" else ())]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("state", ["absent", "raising", *rest("too-old", "too-new", "leaving")])
def test_every_op_works_beside_packages_that_do_not(state: str, tmp_path: Path) -> None:
    done = with_stubs(tmp_path, state)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.endswith("runs") for line in lines) == len(OPS), done.stdout  # the references on the CPU
    refusals = {op: [line for line in lines if line.startswith(f"{op} ")] for op in ("nsa", "attention_residual")}
    (nsa,) = (line for line in refusals["nsa"] if "cute" in line)
    (residual,) = (line for line in refusals["attention_residual"] if "triton" in line)
    bench = [line for line in lines if line.startswith("bench ")]
    assert len(bench) == len(extras.NEEDS)
    for line in (nsa, residual, *bench):
        assert "pip install" in line
    for line, distribution in ((nsa, "nvidia-cutlass-dsl"), (residual, "triton")):
        assert distribution in line
        assert {"absent": "not installed", "too-old": "0.1", "too-new": "99.0"}.get(state, "driver too old") in line

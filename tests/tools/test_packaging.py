"""The wheel: what is in it, and that it works in an empty environment with torch alone."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import nsa
from tools import package_readme

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("nsa", "dispatch", "cute_kernels", "ascend_kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):  # not in place: old build outputs would slip in
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_version_is_the_packages_own(wheel: Path) -> None:
    """From one place, which a checkout that is not installed has too."""
    assert wheel.name.startswith(f"nsa_kernels-{nsa.__version__}-")
    tree = ast.parse((ROOT / "nsa" / "__init__.py").read_text(encoding="utf-8"))
    named = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert [ast.literal_eval(node.value) for node in named] == [nsa.__version__], "a build without torch cannot read it"


def test_base_needs_torch_only(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    assert [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line] == [
        "Requires-Dist: torch>=2.6"
    ]
    assert {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra")} == {
        "cuda",
        "cuda12",
        "npu",
        "bench",
        "dev",
        "docs",
        "hf",
    }


def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """An environment with nothing but the wheel and, by a path entry, this one's torch."""
    environ = dict(os.environ)
    environ.pop("PYTHONPATH", None)  # what it names would come before the wheel
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True, env=environ)
    (site_packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (site_packages / "torch.pth").write_text(str(Path(torch.__file__).resolve().parents[1]) + "\n")
    script = (
        "import nsa, dispatch, torch; from importlib.metadata import version; from nsa import nsa_forward; "
        "q = torch.randn(1, 80, 2, 8); print(nsa.__file__, nsa_forward(q, q, q).shape); "
        "print(nsa.__version__ == version('nsa-kernels'))"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path, env=environ)
    assert str(site_packages) in done.stdout
    assert "torch.Size([1, 80, 2, 8])" in done.stdout
    assert done.stdout.endswith("True\n")


def test_links_of_the_package_page_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(package_readme, "README", readme)
    package_readme.main(["https://example.org/nsa/"])
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", readme.read_text(encoding="utf-8"))
    assert len(links) > 20
    ours = {}
    for picture, target in links:
        assert target.startswith("https://")
        if target.startswith("https://example.org/"):
            kind, path = target.removeprefix("https://example.org/nsa/").split(f"/v{nsa.__version__}/")
            assert kind == ("raw" if picture else "blob")
            ours[path] = kind
    assert ours["bench/results/e2e-h200.png"] == "raw"
    assert ours["docs/usage.md#install"] == "blob"
    assert all((ROOT / path.partition("#")[0]).is_file() for path in ours)


@pytest.mark.parametrize("address", ["http://example.org", "example.org/nsa", "https://example.org/nsa#readme"])
def test_addresses_of_nothing_are_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        package_readme.main([address])
    assert f"must be an address that begins with https://, got {address!r}" in capsys.readouterr().err

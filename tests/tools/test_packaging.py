"""The wheel: what is in it, and that it works in an empty environment with torch alone."""

from __future__ import annotations

import ast
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
from tools import package_links, release_check

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("nsa", "dispatch", "cute_kernels", "ascend_kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_check.build_wheel(tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    outside = (".dist-info", ".data/data/share/doc/")
    assert {name.split("/")[0] for name in names if not any(place in name for place in outside)} == set(PACKAGES)
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


def test_base_needs_torch_only_and_every_extra_is_tried(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert needed == ["Requires-Dist: torch>=2.6"]
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra")}
    assert {"base", *extras} == set(release_check.TRIALS)


def test_wheel_holds_the_pages_that_docstrings_name(wheel: Path) -> None:
    pages = {name.partition("/share/doc/nsa-kernels/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    named = {
        page
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for page in re.findall(r"\bdocs/\w+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert named <= pages
    assert "share/doc/nsa-kernels" in (nsa.__doc__ or "")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel alone and, by a path entry, the packages that are installed here."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--ignore-installed", str(wheel)], check=True, capture_output=True)
    (site_packages,) = place.glob("lib/python3*/site-packages")
    (site_packages / "torch.pth").write_text(str(Path(torch.__file__).resolve().parents[1]) + "\n")
    return python


@pytest.mark.parametrize("extra", ["base", pytest.param("hf", marks=[pytest.mark.hf_extra, pytest.mark.full])])
def test_wheel_works_elsewhere(extra: str, installed: Path, tmp_path: Path) -> None:
    """Every extra, with what pip chooses for it: `make release-check`."""
    release_check.try_wheel(installed, extra, tmp_path)


def test_links_of_the_package_page_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    pyproject = tmp_path / "pyproject.toml"
    shutil.copy(ROOT / "pyproject.toml", pyproject)
    monkeypatch.setattr(package_links, "README", readme)
    monkeypatch.setattr(package_links, "PYPROJECT", pyproject)
    package_links.main(["https://example.org/nsa/"])
    urls = pyproject.read_text(encoding="utf-8").partition("[project.urls]\n")[2].partition("\n\n")[0]
    assert 'Repository = "https://example.org/nsa"\n' in urls
    assert f'Changelog = "https://example.org/nsa/blob/v{nsa.__version__}/CHANGELOG.md"\n' in urls
    assert "arxiv.org/abs/2502.11089" in urls
    text = readme.read_text(encoding="utf-8")
    assert not re.findall(r'(?:\]\(|src(?:set)?=")(?!https://)', text)
    places = set(re.findall(rf"https://example.org/nsa/(raw|blob)/v{nsa.__version__}/([^#)\"]*)", text))
    assert {("raw", "docs/speed-light.svg"), ("raw", "docs/speed-dark.svg"), ("blob", "docs/usage.md")} <= places
    assert all((ROOT / path).is_file() and (kind == "raw") == path.endswith(".svg") for kind, path in places)

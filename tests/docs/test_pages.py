"""What the documents say is so: their code runs, links lead somewhere, commands exist."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dispatch
import nsa

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
README_LINES = 120


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


OF_TRANSFORMERS = [
    pytest.mark.hf_extra,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),  # what peft still calls
]


def with_code() -> Iterator[Any]:
    """Pages with code, marked by the extra that it needs."""
    for page in PAGES:
        blocks = "".join(python_blocks(page))
        needs = OF_TRANSFORMERS if "transformers" in blocks else []
        if blocks:
            yield pytest.param(page, marks=needs, id=name_of(page))


@pytest.mark.parametrize("page", list(with_code()))
def test_example_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what it saves
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), {})  # noqa: S102


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and MkDocs both make them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text)
    for target, anchor in links + [(target, "") for target in re.findall(r'\bsrc(?:set)?="([^"]+)"', text)]:
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors(path), f"{name_of(page)} links to {target}#{anchor}"


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, f"{name_of(page)} names {sorted(named - targets)}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE)) == {"demo", "test"}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_the_readme_says_speed_ups_of_its_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (fwd.*?) \| ([\d.]+) \| (.+?) \|$", readme, re.MULTILINE)
    ratios = {
        (op, done, peer): float(time.replace(",", "")) / float(ms)
        for op, done, ms, peers in rows
        for peer, time in re.findall(r"(\w[\w ]*?) ~?([\d.,]+\d)(?:,|$)", peers)
    }
    token, tile = "NSA per token (paper), 64 over 4, 64K", "NSA per tile, 8 heads over 2,"
    near, mixed = "neighborhood attention, [4, 8K, 32, 128], k=9", "attention residual, 8 blocks of [8K, 4096]"
    both = "fwd + bwd"
    stated = {
        (token, "fwd", "dense FA4"): "4.2x (forward)",
        (token, both, "dense FA4"): "5.0x (with backward)",
        (token, "fwd", "fla"): "2.5x and",
        (token, both, "fla"): "3.0x over fla",
        (f"{tile} 128K", "fwd", "dense FA4"): "15x over dense at 128K",
        (f"{tile} 1M", "fwd", "dense FA4"): "45x at 1M (forward)",
        (near, both, "FA4 window"): "1.7x over FlashAttention-4's window",
        (near, both, "flex"): "2.8x over flex_attention",
        (mixed, both, "Liger"): "2.9x over Liger",
        (mixed, both, "eager"): "36x over eager PyTorch",
    }
    for case, text in stated.items():
        factor = text.partition("x")[0]
        assert text in readme
        assert f"{ratios[case]:.{1 if '.' in factor else 0}f}" == factor


SHOWN = re.compile(r"^::: ([\w.]+)$((?:\n +.+)*)", re.MULTILINE)
"""What the API reference shows, and how."""


def names_shown(page: str) -> list[str]:
    """Names of an API page or of all, as users import them."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob(page))
    return [heading[1] if (heading := re.search(r"heading: (.+)", how)) else name for name, how in SHOWN.findall(text)]


NEED_TRANSFORMERS = ("nsa.integrations.transformers", "nsa.integrations.minimax_m3")


@pytest.mark.parametrize("extra", [False, pytest.param(True, marks=pytest.mark.hf_extra)])
def test_every_public_name_is_in_the_api_reference(extra: bool) -> None:
    """Names that need transformers are on a page of their own, in the extra `hf`."""
    shown = [name for name in names_shown("*.md") if name.startswith(NEED_TRANSFORMERS) == extra]
    assert len(shown) == len(set(shown))
    if extra:
        public = {f"{name}.{x}" for name in NEED_TRANSFORMERS for x in importlib.import_module(name).__all__}
        assert set(shown) == public
    else:
        assert {*nsa.__all__, *dispatch.__all__} <= {name.rpartition(".")[2] for name in shown}
    for name in shown:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, f"{name} has no docstring"


def test_every_function_of_dispatch_is_named_in_its_reference() -> None:
    page = (ROOT / "docs" / "api" / "dispatch.md").read_text(encoding="utf-8")
    assert set(dispatch.FUNCTIONS) <= set(re.findall(r"`(?:dispatch\.)?(\w+)`", page))


def test_the_site_is_made_of_pages_and_pictures() -> None:
    """Everything below docs/ gets there, so no code may lie in it: its bytecode would, too."""
    assert {path.suffix for path in (ROOT / "docs").rglob("*") if path.is_file()} <= {".md", ".svg", ".png"}


def test_the_site_leads_to_every_page() -> None:
    places = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    own = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert places == own | {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"}

"""Hooks of MkDocs for pages and files outside docs/, with README.md as the first page, whose links work in both places.

A picture comes once for each of the theme's palettes. Links to sources, which the site lacks, become text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Place on the site by place in the checkout."""
RESULTS = "bench/results"
PICTURE = re.compile(r'<picture>.*?srcset="(.*?)".*?src="(.*?)" alt="(.*?)".*?</picture>', re.DOTALL)
"""A picture for dark and one for light pages, as GitHub shows them."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for path in sorted((ROOT / RESULTS).iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"{RESULTS}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    place = page.file.src_uri
    source = next((name for name, site in OUTSIDE.items() if site == place), f"docs/{place}")

    def replace(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        if "://" in target:
            return match[0]
        wanted = os.path.normpath(os.path.join(os.path.dirname(source), target))
        wanted = OUTSIDE.get(wanted, wanted.removeprefix("docs/"))
        if files.get_file_from_path(wanted) is None:
            return text if not picture else match[0]
        return f"{picture}[{text}]({os.path.relpath(wanted, os.path.dirname(place) or '.')}{anchor or ''})"

    return LINK.sub(replace, PICTURE.sub(r"![\3](\2#only-light)\n![\3](\1#only-dark)", markdown))

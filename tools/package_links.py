#!/usr/bin/env python3
"""Writes the repository's address into README.md and pyproject.toml, before a release is built.

A package's page has none of the other files: links of README.md lead to those of the version's tag in the repository,
pictures to what they hold, and the metadata lists the address. The files of a checkout have no address, so that they
fit every fork and the documentation site: `git checkout README.md pyproject.toml` afterwards. Standard library only.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, PYPROJECT = ROOT / "README.md", ROOT / "pyproject.toml"
URLS = {
    "Repository": "{repository}",
    "Documentation": "{repository}/blob/{tag}/docs/usage.md",
    "Changelog": "{repository}/blob/{tag}/CHANGELOG.md",
    "Issues": "{repository}/issues",
}
"""What the metadata lists."""
LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)\s]+)\)")
SOURCE = re.compile(r'(src(?:set)?)="([^"]+)"')


def tag_of_version() -> str:
    (version,) = re.findall(r'^__version__ = "(.*?)"', (ROOT / "nsa/__init__.py").read_text(encoding="utf-8"), re.M)
    return f"v{version}"


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    def replace(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        return f"{picture}{label}({repository}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return SOURCE.sub(rf'\1="{repository}/raw/{tag}/\2"', LINK.sub(replace, text))


def with_urls(text: str, repository: str, tag: str) -> str:
    lines = "".join(f'{name} = "{url.format(repository=repository, tag=tag)}"\n' for name, url in URLS.items())
    return text.replace("[project.urls]\n", f"[project.urls]\n{lines}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", nargs="?", help="its address, such as https://github.com/OWNER/nsa-kernels")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"https://[^\s?#]+", args.repository or ""):
        parser.error(f"argument repository: must be an address that begins with https://, got {args.repository!r}")
    for path, change in ((README, with_absolute_links), (PYPROJECT, with_urls)):
        text = path.read_text(encoding="utf-8")
        path.write_text(change(text, args.repository.rstrip("/"), tag_of_version()), encoding="utf-8")


if __name__ == "__main__":
    main()

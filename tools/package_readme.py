#!/usr/bin/env python3
"""Makes the links of README.md absolute, before a release is built: a package's page has none of the other files.

Links lead to the files of the version's tag in the repository, pictures to what they hold. The README of a checkout
keeps its relative links, which work in every fork and on the documentation site: `git checkout README.md` afterwards.
Standard library only.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)\s]+)\)")


def tag_of_version() -> str:
    (version,) = re.findall(r'^__version__ = "(.*?)"', (ROOT / "nsa/__init__.py").read_text(encoding="utf-8"), re.M)
    return f"v{version}"


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    def replace(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        return f"{picture}{label}({repository}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return LINK.sub(replace, text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", nargs="?", help="its address, such as https://github.com/OWNER/nsa-kernels")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"https://[^\s?#]+", args.repository or ""):
        parser.error(f"argument repository: must be an address that begins with https://, got {args.repository!r}")
    text = README.read_text(encoding="utf-8")
    README.write_text(with_absolute_links(text, args.repository.rstrip("/"), tag_of_version()), encoding="utf-8")


if __name__ == "__main__":
    main()

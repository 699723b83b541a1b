"""Write the repository's address into README.md and pyproject.toml, before a release is built.

Links of README.md, which becomes the package's page, then lead to the version's tag, and the metadata lists the
address. A checkout has none, so that it fits every fork: `git checkout README.md pyproject.toml` afterwards.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, PYPROJECT = ROOT / "README.md", ROOT / "pyproject.toml"
URLS = {  # of the metadata
    "Repository": "{repository}",
    "Documentation": "{repository}/blob/{tag}/docs/usage.md",
    "Changelog": "{repository}/blob/{tag}/CHANGELOG.md",
    "Issues": "{repository}/issues",
}
LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)\s]+)\)")
SOURCE = re.compile(r'(src(?:set)?)="([^"]+)"')


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
    (version,) = re.findall(r'^__version__ = "(.*?)"', (ROOT / "nsa/__init__.py").read_text(encoding="utf-8"), re.M)
    for path, change in ((README, with_absolute_links), (PYPROJECT, with_urls)):
        text = path.read_text(encoding="utf-8")
        path.write_text(change(text, args.repository.rstrip("/"), f"v{version}"), encoding="utf-8")


if __name__ == "__main__":
    main()

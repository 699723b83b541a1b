"""What is installed here on behalf of nsa-kernels."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required_distributions() -> dict[str, metadata.Distribution]:
    """By name, what the extras of `make test` require, and what that requires; without what is not installed."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [
        (line, extra) for extra in ("bench", "cuda", "dev", "hf") for line in metadata.requires("nsa-kernels") or []
    ]
    while waiting:
        text, extra = waiting.pop()
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker is not None and not wanted.marker.evaluate({"extra": extra})):
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        waiting += [(line, each) for line in found[name].requires or () for each in ("", *wanted.extras)]
    return found

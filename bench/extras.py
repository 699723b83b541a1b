"""Packages of the `bench` extra: what a script says when one is absent, too old, too new or broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dispatch.device import first_line, fits, version_of

INSTALL = 'pip install "nsa-kernels[bench]"'
NEEDS = {"rich": ">=13", "matplotlib": ">=3.8"}
TESTED = {"rich": "15.0.0", "matplotlib": "3.11.2"}


@contextmanager
def needed(name: str) -> Iterator[None]:
    """Around imports of a package: whatever they raise ends the script with what to install.

    Raises:
        SystemExit: with the package, its version, what is wrong, and the command that mends it.
    """
    version = version_of(name)
    if version is not None and not fits(version, NEEDS[name]):
        raise SystemExit(f"{name} {version} is too old, {name}{NEEDS[name]} is needed: {INSTALL}")
    try:
        yield
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is missing: {INSTALL}") from error
    except (Exception, SystemExit) as error:  # a broken package can raise anything
        raise SystemExit(
            f"{name} {version} is broken: {type(error).__name__}: {first_line(error)}: "
            f'pip install --force-reinstall "{name}=={TESTED[name]}"'
        ) from error

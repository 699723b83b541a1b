"""Packages of the extras `bench` and `hf`: the message if one is absent, too old, too new or broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dispatch.device import first_line, fits, version_of

NEEDS = {"rich": ">=13", "matplotlib": ">=3.8", "transformers": ">=5.23"}
TESTED = {"rich": "15.0.0", "matplotlib": "3.11.2", "transformers": "5.24.0"}
EXTRAS = {"transformers": "hf"}  # Extras of packages that are not in `bench`


@contextmanager
def needed(name: str) -> Iterator[None]:
    """Around imports of a package: whatever they raise ends the script with what is wrong and what mends it."""
    version, install = version_of(name), f'pip install "nsa-kernels[{EXTRAS.get(name, "bench")}]"'
    if version is not None and not fits(version, NEEDS[name]):
        raise SystemExit(f"{name} {version} is too old, {name}{NEEDS[name]} is needed: {install}")
    try:
        yield
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is missing: {install}") from error
    except (Exception, SystemExit) as error:  # a broken package can raise anything
        raise SystemExit(
            f"{name} {version} is broken: {type(error).__name__}: {first_line(error)}: "
            f'pip install --force-reinstall "{name}=={TESTED[name]}"'
        ) from error

"""Check licences and known vulnerabilities of the packages beside this script's Python; `make lint` ends with it.

Licences: every distribution's own statement (License-Expression, else its classifiers, else the first line of License)
must hold terms of ALLOWED only. Advisories: `pip-audit`; it is no failure if that cannot reach its index.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import metadata

ALLOWED = {
    *("Apache-2.0", "Apache-2.0 WITH LLVM-exception", "Apache 2.0", "Apache 2.0 License", "Apache Software License"),
    *("MIT", "MIT-CMU", "MIT License", "BSL-1.0", "Zlib", "CC0-1.0", "ISC", "ISC License (ISCL)", "CNRI-Python"),
    *("0BSD", "BSD-2-Clause", "BSD-3-Clause", "BSD", "BSD License", "3-Clause BSD License"),
    *("PSF-2.0", "Python Software Foundation License"),
    *("MPL-2.0", "MPL-2.0 AND MIT", "Mozilla Public License 2.0 (MPL 2.0)"),
}
EXCEPTIONS = {
    "nvidia-*": "NVIDIA's own licences: CuTe DSL (the `cuda` extra), CUDA's libraries (torch for GPUs)",
    "cuda-toolkit": "names no licence and holds no files; it asks for nvidia-*",
    "quack-kernels": "Apache-2.0 by its LICENSE file; its metadata names none",
}
"""By name or pattern."""
ADVISORY_SECONDS = 120


def statement(distribution: metadata.Distribution) -> list[str]:
    """Terms that a distribution gives for itself."""
    facts = distribution.metadata
    if expression := facts.get("License-Expression"):
        return [term.strip("() ") for term in re.split(r"\b(?:AND|OR)\b", str(expression))]
    classifiers = [line.rpartition(" :: ")[2] for line in facts.get_all("Classifier") or [] if line.startswith("Licen")]
    return classifiers or (facts.get("License") or "").strip().splitlines()[:1]


def licence_problems(distributions: Iterable[metadata.Distribution]) -> list[str]:
    """One line for each distribution whose licence is not allowed or not stated."""
    problems = []
    for distribution in sorted(distributions, key=lambda each: each.name.lower()):
        terms = statement(distribution)
        unknown = [term for term in terms if term not in ALLOWED]
        name = re.sub(r"[-_.]+", "-", distribution.name).lower()
        excepted = any(fnmatchcase(name, pattern) for pattern in EXCEPTIONS)
        if (unknown or not terms) and not excepted:
            shown = ", ".join(unknown) or "no licence in its metadata"
            problems.append(f"{distribution.name} {distribution.version}: {shown}")
    return problems


def advisories() -> tuple[bool, str]:
    """True unless a vulnerability of an installed package is known, and what to print."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--skip-editable"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=ADVISORY_SECONDS, check=False)
        audited = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        return True, f"not checked, since pip-audit gave no list: {error}"
    skipped = [each["name"] for each in audited if "skip_reason" in each]
    known = [f"\n  {one['name']} {one['version']}: {bug['id']}" for one in audited for bug in one.get("vulns", ())]
    shown = f"{len(audited) - len(skipped)} packages checked, {len(known)} known vulnerabilities"
    return not known, shown + (f"; not checked: {', '.join(skipped)}" if skipped else "") + "".join(known)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    distributions = list(metadata.distributions())
    problems = licence_problems(distributions)
    print(f"Licences: {len(distributions)} packages checked, {len(problems)} not allowed")
    for problem in problems:
        print(f"  {problem}\n    Add its terms to ALLOWED or its name to EXCEPTIONS, or do without the package.")
    safe, shown = advisories()
    print(f"Advisories: {shown}")
    return 0 if safe and not problems else 1


if __name__ == "__main__":
    sys.exit(main())

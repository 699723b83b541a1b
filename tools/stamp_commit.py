#!/usr/bin/env python3
"""Writes .commit.json: the commit, and a digest of each of its files. Take it along where sources are copied without
git, or with an older one, as to a GPU machine: results of benchmarks then name the true commit, and "+changes" only
where a file differs. A checkout with changes is refused. Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.commit import write_stamp


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    try:
        print(write_stamp())
    except ValueError as refusal:
        print(refusal, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

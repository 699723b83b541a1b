"""Benchmarks, run as scripts: `python bench/bench_sparse_attn_e2e.py`, `python bench/probe_max_seqlen.py`."""

import io
import sys

# Benchmarks and examples import this first. They print "?" for characters that stdout's encoding lacks.
if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
    sys.stdout.reconfigure(errors="replace")

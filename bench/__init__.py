"""Benchmarks, run as scripts: `python bench/bench_sparse_attn_e2e.py`, `python bench/probe_max_seqlen.py`."""

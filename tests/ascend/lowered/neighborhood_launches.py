"""The cases in which neighborhood attention's lowered kernels are executed, and the launches that they make.

test_flash.py, test_band.py and test_backward.py execute them; test_specialisations.py asks whether that is all of them.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from ascend_kernels.launch import Launch, recording
from ascend_kernels.neighborhood import tiling
from dispatch import neighborhood_attention_backward
from tests.ascend.lowered.neighborhood_gates import DTYPES
from tests.support import backward_cases, band_cases, neighborhood_cases


def widest(block_d: int, tier: int) -> dict[str, Any]:
    """The largest head dim and window that tiles are chosen for together."""
    return {"tokens": 150, "dim": block_d, "kernel_size": tier, "boundary": "shift"}


FLASH: dict[str, dict[str, Any]] = {
    "2304 tokens": {"tokens": 2304, "kernel_size": 7, "dim": 64},
    "long": {"tokens": 4096, "kernel_size": 63, "dim": 128, "boundary": "shift", "heads": 1},
    "dilated, grouped, even": {"tokens": 301, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 64},
    "fewer tokens than keys, features padded": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 123},
    "one token, one feature": {"tokens": 1, "dim": 1},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "head_major": True, "batch": 2},
}


def flash_launches() -> list[Launch]:
    """The launches that test_flash.py executes, only recorded."""
    cases = [widest(block_d, tier) for block_d in tiling.BLOCKS_D for tier in tiling.TIERS]
    with recording(run=False) as found:
        for dtype, case in product(DTYPES, [*cases, *FLASH.values()]):
            inputs, do, options = neighborhood_cases.make(dtype=dtype, **case)
            neighborhood_cases.results("ascend", inputs, do, **options)
    return found


BAND: dict[str, dict[str, Any]] = {
    "2304 tokens": {"tokens": 2304, "kernel_size": 7, "dim": 64},
    "long": {"tokens": 4096, "kernel_size": 33, "dim": 128, "boundary": "shift", "heads": 1},
    "dilated, grouped, even": {"tokens": 150, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "moved, dilated": {"tokens": 151, "kernel_size": 40, "dilation": 2, "boundary": "shift", "dim": 32},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 64},
    "widest features": {"tokens": 50, "kernel_size": 9, "boundary": "shift", "dim": 256},
    "fewer tokens than keys": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 64},
    "fewer tokens than keys, truncated, features padded": {"tokens": 5, "kernel_size": 64, "dim": 123},
    "one token, one feature": {"tokens": 1, "dim": 1},
    "one key": {"tokens": 40, "kernel_size": 1, "dim": 16},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "layout": "head-major", "batch": 2},
}


def band_launches() -> list[Launch]:
    """The launches that test_band.py executes, only recorded."""
    with recording(run=False) as found:
        for dtype, case in product(DTYPES, BAND.values()):
            band_cases.results(lambda function: function(), "ascend", *band_cases.make(dtype=dtype, **case))
    return found


PATHS = ["dense", "sparse"]
BACKWARD: dict[str, dict[str, Any]] = {
    "a band": {"tokens": 150, "dim": 64, "kernel_size": 16, "boundary": "shift"},
    "all pairs": {"tokens": 150, "dim": 128, "kernel_size": 9, "dense": True},
    "the longest": {"tokens": 2048, "dim": 64, "kernel_size": 63, "heads": 1, "dense": True},
    "dilated, grouped, even": {"tokens": 201, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 256},
    "fewer tokens than keys, features padded": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 123},
    "one token, one feature": {"tokens": 1, "dim": 1},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "head_major": True, "batch": 2, "dense": True},
}


def backward_launches() -> list[Launch]:
    """The launches that test_backward.py executes, only recorded."""
    with recording(run=False) as found:
        for dtype, path, case in product(DTYPES, PATHS, BACKWARD.values()):
            inputs, window = backward_cases.make(dtype=dtype, **case)
            neighborhood_attention_backward(*inputs, **window, path=path, backend="ascend")
    return found

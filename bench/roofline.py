"""The least time that arithmetic and memory traffic allow a forward pass, at a device's peak rates."""

from __future__ import annotations

from dataclasses import dataclass

from bench.inputs import Sizes
from nsa import NSAConfig


@dataclass(frozen=True)
class Peaks:
    """TFLOP/s of dense 16-bit matrix products, and TB/s of memory."""

    tflops: float
    tbs: float


PEAKS = {"H200": Peaks(989, 4.8), "H100": Peaks(989, 3.35)}
"""By a part of the device's name: NVIDIA's data sheets, for the SXM modules."""
DEFAULT_TBS = 4.8
SCORE_PRODUCTS = 3
"""16-bit products that make one score: the mean query of a tile is a float32 number, in three parts."""


def choose_peaks(device: str, tflops: float | None, tbs: float | None) -> Peaks | None:
    """What is given, then what is known of the device of this name; None when that is no TFLOP/s."""
    known = next((peaks for name, peaks in PEAKS.items() if name in device), None)
    if known is None:
        return None if tflops is None else Peaks(tflops, tbs or DEFAULT_TBS)
    return Peaks(tflops or known.tflops, tbs or known.tbs)


def nsa_floor_ms(sizes: Sizes, config: NSAConfig, peaks: Peaks, itemsize: int = 2) -> float:
    """Milliseconds of NSA's causal forward in separate branches: FLOPs at peak plus bytes at peak.

    FLOPs: 4·D·H for each pair of a query and a key, over the compressed entries (with num_cmp_selected_blocks at most
    that many blocks of them), the selected blocks and the window; and the scores of all past entries for each tile.
    Bytes: the branches read q, k, v once and write three outputs; the gate reads q and these and writes out.
    """
    n, entries = sizes.tokens, config.num_compressed(sizes.tokens)
    chosen = config.num_cmp_selected_blocks
    compressed = mean_keys(entries, entries if chosen is None else chosen * config.n_block_size)
    selected = mean_keys(n, config.num_selected_blocks * config.select_size)
    window = mean_keys(n, config.window_size)
    flops = score_flops(sizes, config) + attention_flops(sizes, compressed + selected + window)
    values = n * sizes.dim * (9 * sizes.heads + 2 * sizes.kv_heads)
    return sizes.batch * (flops / (peaks.tflops * 1e12) + values * itemsize / (peaks.tbs * 1e12)) * 1e3


def dense_floor_ms(sizes: Sizes, peaks: Peaks) -> float:
    """Milliseconds of dense causal attention's arithmetic at peak."""
    return sizes.batch * attention_flops(sizes, sizes.tokens / 2) / (peaks.tflops * 1e12) * 1e3


def attention_flops(sizes: Sizes, keys: float) -> float:
    """Of one sequence whose rows see that many keys on average."""
    return 4 * sizes.tokens * keys * sizes.dim * sizes.heads


def score_flops(sizes: Sizes, config: NSAConfig) -> float:
    """Of scoring all past compressed entries for each tile, in one sequence."""
    tiles = -(-sizes.tokens // config.q_tile_size)
    return 2 * SCORE_PRODUCTS * tiles * config.num_compressed(sizes.tokens) / 2 * sizes.dim * sizes.heads


def mean_keys(keys: int, most: int) -> float:
    """Keys that a row has on average, when rows see from none to all of `keys` and take the last `most` at most."""
    if most >= keys:
        return keys / 2
    return most - most * most / (2 * keys)

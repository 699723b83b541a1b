"""The least time that arithmetic and memory traffic allow, at a device's peak rates: forward, and forward + backward.

Attention multiplies matrices over every visible pair of a query and a key: two products forward (scores, output) and
five backward (scores again, dP, dV, dQ, dK), each 2·D FLOPs a pair and head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ascend_kernels.tiling import Tiles, ascend_tiles
from bench.inputs import Neighborhood, Sizes
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

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


def choose_peaks(device: str, tflops: float | None, tbs: float | None) -> Peaks | None:
    """What is given, then what is known of the device of this name; None when that is no TFLOP/s."""
    known = next((peaks for name, peaks in PEAKS.items() if name in device), None)
    if known is None:
        return None if tflops is None else Peaks(tflops, tbs or DEFAULT_TBS)
    return Peaks(tflops or known.tflops, tbs or known.tbs)


def nsa_floor_ms(sizes: Sizes, config: NSAConfig, peaks: Peaks, itemsize: int = 2, *, backward: bool = False) -> float:
    """Milliseconds of NSA's causal forward in separate branches: FLOPs at peak plus bytes at peak.

    FLOPs: two products for each pair of a query and a key, over the compressed entries (with num_cmp_selected_blocks at
    most that many blocks of them), the selected blocks and the window; and scores of all past entries for each tile.
    Bytes: the branches read q, k, v once and write three outputs; the gate reads q and these and writes out.

    Args:
        backward: forward + backward: five products more for each pair; and q, k, v, the three outputs and do read
            once, dq, dk and dv written once. What `recompute` computes again does not count.
    """
    n, products = sizes.tokens, FORWARD_PRODUCTS + BACKWARD_PRODUCTS * backward
    flops = score_flops(sizes, config) + attention_flops(sizes, sum(branch_keys(n, config)), products)
    values = 9 * sizes.heads + 2 * sizes.kv_heads
    if backward:
        values += 6 * sizes.heads + 4 * sizes.kv_heads
    moved = n * sizes.dim * values * itemsize
    return sizes.batch * (flops / (peaks.tflops * 1e12) + moved / (peaks.tbs * 1e12)) * 1e3


def dense_floor_ms(sizes: Sizes, peaks: Peaks, *, backward: bool = False) -> float:
    """Milliseconds of dense causal attention's arithmetic at peak."""
    products = FORWARD_PRODUCTS + BACKWARD_PRODUCTS * backward
    return sizes.batch * attention_flops(sizes, sizes.tokens / 2, products) / (peaks.tflops * 1e12) * 1e3


def branch_keys(tokens: int, config: NSAConfig) -> tuple[float, float, float]:
    """Keys that a row sees on average: compressed, selected, window."""
    entries, chosen = config.num_compressed(tokens), config.num_cmp_selected_blocks
    return (
        mean_keys(entries, entries if chosen is None else chosen * config.n_block_size),
        mean_keys(tokens, config.num_selected_blocks * config.select_size),
        mean_keys(tokens, config.window_size),
    )


class Work(NamedTuple):
    """What a stage must move and compute."""

    bytes: float
    flops: float = 0

    def floor_ms(self, tbs: float, tflops: float) -> float:
        """The longer of the two."""
        return max(self.bytes / tbs, self.flops / tflops) / 1e9


def backward_work(sizes: Sizes, config: NSAConfig) -> dict[str, Work]:
    """Of the stages of NSA's backward on CUDA, for 16-bit inputs with projected gates; lse's, delta's and logits fp32.

    A branch reads q, o, do, k, v and writes dq, dk, dv (compressed entries' in fp32); the split kernels read delta, not
    o, and make S and dP in both halves. Lists: bits are cleared, set and read, and each choice is read and listed once.
    """
    n, batch, heads, kv_heads, dim = sizes.tokens, sizes.batch, sizes.heads, sizes.kv_heads, sizes.dim
    number = 4 * batch * n * heads  # bytes of one fp32 number for each row and head
    row, key = 2 * batch * n * heads * dim, 2 * batch * n * kv_heads * dim
    entry = 2 * batch * config.num_compressed(n) * kv_heads * dim
    compressed, selected, window = (batch * attention_flops(sizes, keys, 1) for keys in branch_keys(n, config))
    tiles, blocks = -(-n // config.q_tile_size), -(-n // config.select_size)
    of_choice = 4 * batch * (kv_heads if config.shares_heads else heads)
    choices, bits = of_choice * tiles * config.num_selected_blocks, of_choice * blocks * -(-tiles // 32)
    statistics = 2 * number
    return {
        # q, do, three o's; three lse's read and written, delta, gates and their logits' gradients
        "gate gradients": Work(5 * row + (3 + 3 + 1 + 3 + 3) * number),
        "selected, lists": Work(3 * bits + 2 * choices),
        "compressed": Work(4 * row + number + (1 + 2) * 2 * entry, BACKWARD_PRODUCTS * compressed),
        "selected, FA4": Work(4 * row + number + 4 * key, BACKWARD_PRODUCTS * selected),
        "selected, split": Work(3 * row + statistics + 4 * key, BACKWARD_PRODUCTS * selected),
        "split, dq": Work(3 * row + statistics + 2 * key, 3 * selected),
        "split, dk dv": Work(2 * row + statistics + 4 * key, 4 * selected),
        "window": Work(4 * row + number + 4 * key, BACKWARD_PRODUCTS * window),
        "query sums": Work(4 * row + 3 * number),
        "key sums": Work((4 + 2) * key + 2 * 2 * entry),
    }


def attention_flops(sizes: Sizes, keys: float, products: int = FORWARD_PRODUCTS) -> float:
    """Of one sequence whose rows see that many keys on average."""
    return 2 * products * sizes.tokens * keys * sizes.dim * sizes.heads


def score_flops(sizes: Sizes, config: NSAConfig) -> float:
    """Of scoring all past compressed entries for each tile, in one sequence."""
    tiles = -(-sizes.tokens // config.q_tile_size)
    return 2 * SCORE_PRODUCTS * tiles * config.num_compressed(sizes.tokens) / 2 * sizes.dim * sizes.heads


def mean_keys(keys: int, most: int) -> float:
    """Keys that a row has on average, when rows see from none to all of `keys` and take the last `most` at most."""
    if most >= keys:
        return keys / 2
    return most - most * most / (2 * keys)


# Neighborhood attention


def neighborhood_bytes(shape: Neighborhood, direction: str, itemsize: int = 2) -> int:
    """The byte floor: forward reads q, k, v and writes o; backward reads q, k, v, o, do and writes dq, dk, dv.

    Args:
        direction: "fwd", "bwd" or "fwd+bwd".
    """
    tensors = {"fwd": 4, "bwd": 8, "fwd+bwd": 12}[direction]
    return tensors * itemsize * shape.batch * shape.tokens * shape.heads * shape.dim


class AscendWork(NamedTuple):
    """What one pass takes on an NPU, by the model of docs/neighborhood_attention.md."""

    l1_bytes: float
    """Operands of the cube, from global memory."""
    ub_bytes: float
    """In and out of the vector unit's memory, what comes from the cube and goes there included."""
    cube_flops: float
    vector_flops: float
    """Of products; masks and exponentials are left out."""
    kept_bytes: float
    """Beside inputs and outputs: what lies in global memory between kernels or passes."""

    def times(self, rows: int) -> AscendWork:
        return AscendWork(*(rows * value for value in self))


DENSE_TILES = Tiles(64, 64, 0)
"""An example, for the dense path; its features do not matter here."""


def neighborhood_work(shape: Neighborhood, algorithm: str, *, backward: bool) -> AscendWork:
    """Of "flash", "band" or "dense" on 16-bit tensors, with the flash kernels' own tiles, away from borders.

    Raises:
        ValueError: for the dense forward, which does not exist: it is the band's.
    """
    if algorithm == "flash":
        kernels = ("dq", "dkdv") if backward else ("forward",)
        parts = [_flash_row(shape, kernel) for kernel in kernels]
        kept = parts[0].kept_bytes
        row = AscendWork(*(sum(values) for values in zip(*parts, strict=True)))._replace(kept_bytes=kept)
    elif algorithm == "band":
        row = _band_row(shape, backward)
    elif algorithm == "dense" and backward:
        row = _dense_row(shape)
    else:
        raise ValueError(f"no {algorithm!r} {'backward' if backward else 'forward'} is modelled")
    return row.times(shape.batch * shape.tokens * shape.heads)


ITEM = 2
"""Bytes of a 16-bit number."""
FP32 = 4


def _flash_row(shape: Neighborhood, kernel: str) -> AscendWork:
    """Of one row that a kernel keeps; a tile of BLOCK_M walks over `walked` rows, BLOCK_N at a time."""
    tiles = ascend_tiles(kernel, torch.bfloat16, shape.dim, shape.kernel_size)
    steps = -(-(tiles.block_m + shape.kernel_size - 1) // tiles.block_n)
    walked = steps * tiles.block_n
    row: float = shape.dim * ITEM
    share = walked / tiles.block_m
    if kernel == "forward":
        # s in, p out, p v in; o, lse
        ub = walked * (FP32 + ITEM) + steps * shape.dim * FP32 + row + FP32
        return AscendWork(row + 2 * share * row, ub, 4 * walked * shape.dim, 0, FP32)
    if kernel == "dq":
        # o, do; s and dp in, ds out, ds k in; dq, lse, delta
        ub = 2 * row + walked * (2 * FP32 + ITEM) + steps * shape.dim * FP32 + row + 2 * FP32
        return AscendWork(2 * row + 2 * share * row, ub, 6 * walked * shape.dim, 0, 2 * FP32)
    # s and dp in, p and ds out, p do and ds q in; dk, dv; lse and delta of walked rows
    ub = walked * (2 * FP32 + 2 * ITEM) + steps * 2 * shape.dim * FP32 + 2 * row + share * 2 * FP32
    return AscendWork(2 * row + 2 * share * row, ub, 8 * walked * shape.dim, 0, 2 * FP32)


def _band_row(shape: Neighborhood, backward: bool) -> AscendWork:
    """Of one row: a key for each slot, no cube. The band is fp32."""
    k, row = shape.kernel_size, shape.dim * ITEM
    if not backward:
        # q and keys, band written; band, values, o
        return AscendWork(0, (2 * k + 2) * row + 2 * k * FP32, 0, 4 * k * shape.dim, k * FP32)
    # do, values, band, ds written; ds, keys, dq; ds, band, queries, do's, dk, dv
    return AscendWork(0, (4 * k + 4) * row + 5 * k * FP32, 0, 8 * k * shape.dim, 2 * k * FP32)


def _dense_row(shape: Neighborhood) -> AscendWork:
    """Of one row: fp32 probabilities spread out of the band, then four kernels' worth of products over tiles in reach.

    Dilation does not help: rows between the neighbors are multiplied, too.
    """
    reach = DENSE_TILES.block_m + (shape.kernel_size - 1) * shape.dilation
    steps = -(-min(reach, shape.tokens) // DENSE_TILES.block_n)
    walked, row = steps * DENSE_TILES.block_n, shape.dim * ITEM
    share = walked / DENSE_TILES.block_m
    spread = shape.kernel_size * FP32 + walked * FP32
    dv = walked * (FP32 + ITEM) + steps * shape.dim * FP32 + row
    ds = walked * (2 * FP32 + 2 * FP32 + ITEM)  # p twice, dp twice
    dqdk = walked * 2 * 2 * ITEM + 2 * steps * shape.dim * FP32 + 2 * row
    l1 = share * row + (row + 2 * share * row) + 2 * share * row
    kept = shape.kernel_size * FP32 + shape.tokens * (FP32 + ITEM)
    return AscendWork(l1, spread + dv + ds + dqdk, 10 * walked * shape.dim, 0, kept)


def neighborhood_table(shapes: Iterable[Neighborhood]) -> str:
    """The model's figures as a table in Markdown: 10^9 bytes and FLOPs."""
    lines = [
        "| B,H,S,D,k,dilation | pass | algorithm | floor GB | L1 GB | UB GB | cube GFLOP | vector GFLOP | kept GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        for direction, algorithms in (("fwd", ("flash", "band")), ("bwd", ("flash", "band", "dense"))):
            for algorithm in algorithms:
                work = neighborhood_work(shape, algorithm, backward=direction == "bwd")
                figures = (neighborhood_bytes(shape, direction), *work)
                cells = " | ".join(
                    f"{figure / 1e9:.3g}" if figure < 1e12 else f"{figure / 1e9:,.0f}" for figure in figures
                )
                lines.append(f"| {shape} | {direction} | {algorithm} | {cells} |")
    return "\n".join(lines)

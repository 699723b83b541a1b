"""The least time that arithmetic and memory traffic allow, at a device's peak rates: forward, and forward + backward.

Attention multiplies matrices over every visible pair of a query and a key: two products forward (scores, output) and
five backward (scores again, dP, dV, dQ, dK), each 2·D FLOPs a pair and head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ascend_kernels.neighborhood.tiling import DENSE_TILES, MAX_TOKENS, Tiles, ascend_tiles, band_tiles
from bench.inputs import Neighborhood, Residual, Sizes
from nsa import NSAConfig


@dataclass(frozen=True)
class Peaks:
    """TFLOP/s of dense 16-bit matrix products, and TB/s of memory."""

    tflops: float
    tbs: float


PEAKS = {
    "H200": Peaks(989, 4.8),
    "H100": Peaks(989, 3.35),
    "A100": Peaks(312, 2.04),
    "L40S": Peaks(362, 0.864),
    "RTX 4090": Peaks(165, 1.01),
    "RTX 5090": Peaks(210, 1.79),
}
"""By a part of the device's name: NVIDIA's data sheets, of H200, H100 and A100 (80 GB) for the SXM modules."""
DEFAULT_TBS = 4.8
SCORE_PRODUCTS = 3
"""16-bit products that make one score of a tile: its mean query is a float32 number, in three parts. Tokens: one."""

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


def choose_peaks(device: str, tflops: float | None, tbs: float | None) -> Peaks | None:
    """Given peaks, else those of the named device; None if its TFLOP/s are unknown."""
    known = next((peaks for name, peaks in PEAKS.items() if name in device), None)
    if known is None:
        return None if tflops is None else Peaks(tflops, tbs or DEFAULT_TBS)
    return Peaks(tflops or known.tflops, tbs or known.tbs)


def nsa_floor_ms(sizes: Sizes, config: NSAConfig, peaks: Peaks, itemsize: int = 2, *, backward: bool = False) -> float:
    """Milliseconds of NSA's causal forward in separate branches: FLOPs at peak plus bytes at peak.

    FLOPs: two products for each pair of a query and a key, over the compressed entries (with num_cmp_selected_blocks at
    most that many blocks of them), the selected blocks and the window; and scores of all past entries for each tile, in
    token mode for each token, which are the compressed branch's logits made a second time.
    Bytes: the branches read q, k, v once and write three outputs; the gate reads q and these and writes out.
    Backward: five products more for each pair; and q, k, v, the three outputs and do read once, dq, dk and dv written
    once. What `recompute` computes again does not count.
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
    """Bytes that a stage must move, and FLOPs that it must compute."""

    bytes: float
    flops: float = 0

    def floor_ms(self, tbs: float, tflops: float) -> float:
        return max(self.bytes / tbs, self.flops / tflops) / 1e9


def backward_work(sizes: Sizes, config: NSAConfig) -> dict[str, Work]:
    """Work of the stages of NSA's backward on CUDA, for 16-bit inputs with projected gates; lse, delta and logits fp32.

    A branch reads q, o, do, k, v and writes dq, dk, dv (compressed entries' in fp32). The selected branch is one stage
    in token mode and reads delta, not o. Per tile it has several: the split kernels read delta, too, and make S and dP
    in both halves; of lists, bits are cleared, set and read, and each choice is read and listed once.
    """
    n, batch, heads, kv_heads, dim = sizes.tokens, sizes.batch, sizes.heads, sizes.kv_heads, sizes.dim
    number = 4 * batch * n * heads  # bytes of one fp32 number for each row and head
    row, key = 2 * batch * n * heads * dim, 2 * batch * n * kv_heads * dim
    entry = 2 * batch * config.num_compressed(n) * kv_heads * dim
    compressed, selected, window = (batch * attention_flops(sizes, keys, 1) for keys in branch_keys(n, config))
    statistics = 2 * number
    whole = Work(3 * row + statistics + 4 * key, BACKWARD_PRODUCTS * selected)
    chosen = {"selected": whole}
    if not config.token_mode:
        tiles, blocks = -(-n // config.q_tile_size), -(-n // config.select_size)
        of_choice = 4 * batch * (kv_heads if config.shares_heads else heads)
        choices, bits = of_choice * tiles * config.num_selected_blocks, of_choice * blocks * -(-tiles // 32)
        chosen = {
            "selected, lists": Work(3 * bits + 2 * choices),
            "selected, FA4": Work(4 * row + number + 4 * key, BACKWARD_PRODUCTS * selected),
            "selected, split": whole,
            "split, dq": Work(3 * row + statistics + 2 * key, 3 * selected),
            "split, dk dv": Work(2 * row + statistics + 4 * key, 4 * selected),
        }
    return {
        # q, do, three o's; three lse's read and written, delta, gates and their logits' gradients
        "gate gradients": Work(5 * row + (3 + 3 + 1 + 3 + 3) * number),
        "compressed": Work(4 * row + number + (1 + 2) * 2 * entry, BACKWARD_PRODUCTS * compressed),
        **chosen,
        "window": Work(4 * row + number + 4 * key, BACKWARD_PRODUCTS * window),
        "query sums": Work(4 * row + 3 * number),
        "key sums": Work((4 + 2) * key + 2 * 2 * entry),
    }


def attention_flops(sizes: Sizes, keys: float, products: int = FORWARD_PRODUCTS) -> float:
    """FLOPs of one sequence whose rows see that many keys on average."""
    return 2 * products * sizes.tokens * keys * sizes.dim * sizes.heads


def score_flops(sizes: Sizes, config: NSAConfig) -> float:
    """FLOPs of scoring all past compressed entries for each tile, in one sequence."""
    tiles, products = -(-sizes.tokens // config.q_tile_size), 1 if config.token_mode else SCORE_PRODUCTS
    return 2 * products * tiles * config.num_compressed(sizes.tokens) / 2 * sizes.dim * sizes.heads


def mean_keys(keys: int, most: int) -> float:
    """Keys that a row has on average, when rows see from none to all of `keys` and take the last `most` at most."""
    if most >= keys:
        return keys / 2
    return most - most * most / (2 * keys)


# Neighborhood attention


def neighborhood_bytes(shape: Neighborhood, direction: str, itemsize: int = 2) -> int:
    """The byte floor: forward reads q, k, v, writes o; backward reads q, k, v, o, do, writes dq, dk, dv."""
    tensors = {"fwd": 4, "bwd": 8, "fwd+bwd": 12}[direction]
    return tensors * itemsize * shape.batch * shape.tokens * shape.heads * shape.dim


ITEM, FP32 = 2, 4  # Bytes of a number: of the inputs, and on the chip
SLOT_TILES = band_tiles("band_scores", torch.bfloat16, MAX_TOKENS)
"""Tiles of the kernels that write a band or spread it out."""
BAND_TILES = band_tiles("band_rows", torch.bfloat16, MAX_TOKENS)
"""Tiles of the kernels that multiply a band with rows, for long sequences."""


def neighborhood_work(shape: Neighborhood, algorithm: str, *, backward: bool) -> Tensor:
    """Work of "flash", "band" or, backward, "dense" on an NPU, by the model of docs/neighborhood_attention.md.

    Of 16-bit tensors with truncated windows, away from borders. Returns four figures (`_work`).
    """
    per_row = {"flash": _flash_row, "band": _band_row, "dense": _dense_row}[algorithm](shape, backward)
    return per_row * (shape.batch * shape.tokens * shape.heads)


def _work(l1: float, ub: float, cube: float = 0, kept: float = 0) -> Tensor:
    """Figures of a row, float64 `[4]`: bytes, but FLOPs of the cube.

    `l1`: the cube's operands, from global memory; `ub`: in and out of the vector unit's memory, what comes from the
    cube and goes there included; `kept`: in global memory between kernels or passes, beside inputs and outputs.
    """
    return torch.tensor([l1, ub, cube, kept], dtype=torch.float64)


def _flash_row(shape: Neighborhood, backward: bool) -> Tensor:
    """A tile of BLOCK_M rows walks over the rows of the other side, BLOCK_N at a time, all features at once."""
    row = shape.dim * ITEM

    def kernel(name: str, products: int, held: int, scores: int, results: int, once: int, beside: int = 0) -> Tensor:
        """Args: operands held; what crosses the UB: bytes a pair, fp32 rows a step, bytes once, bytes a walked row."""
        tiles = ascend_tiles(name, torch.bfloat16, shape.dim, shape.kernel_size)
        steps = _steps(shape, tiles)
        walked = steps * tiles.block_n
        ub = walked * scores + steps * results * shape.dim * FP32 + once + walked / tiles.block_m * beside
        return _work((held + 2 * walked / tiles.block_m) * row, ub, products * 2 * walked * shape.dim)

    if not backward:
        # s in and p out; p v in; o, lse
        return kernel("forward", 2, 1, FP32 + ITEM, 1, row + FP32) + _work(0, 0, kept=FP32)
    # s, dp in and ds out; ds k in; o and do for delta, dq, lse, delta
    dq = kernel("dq", 3, 2, 2 * FP32 + ITEM, 1, 3 * row + 2 * FP32)
    # s, dp in and p, ds out; p do and ds q in; dk, dv; lse and delta of walked rows
    dkdv = kernel("dkdv", 4, 2, 2 * FP32 + 2 * ITEM, 2, 2 * row, 2 * FP32)
    return dq + dkdv + _work(0, 0, kept=2 * FP32)


def _band_row(shape: Neighborhood, backward: bool) -> Tensor:
    """The band is fp32; a window beyond one tile of slots is multiplied twice: for its sums, and to be stored."""
    tiles, slots, row = SLOT_TILES, shape.kernel_size * FP32, shape.dim * ITEM
    products, slices = -(-shape.kernel_size // tiles.block_m), -(-shape.dim // tiles.block_d)
    rounds = 1 if products == 1 else 2
    products *= rounds
    crossing = products * slices * tiles.block_n * FP32 + slots
    share = tiles.block_n / tiles.block_m
    write = _work(products * (1 + share) * row, crossing, products * 2 * tiles.block_n * shape.dim)
    multiply = _times_rows(shape, _steps(shape, BAND_TILES), BAND_TILES, FP32 + ITEM)
    if not backward:
        return write + multiply + _work(0, 0, kept=slots)
    return write + 3 * multiply + _work(0, rounds * slots, kept=2 * slots)  # for ds, p is read


def _dense_row(shape: Neighborhood, backward: bool) -> Tensor:
    """Backward: the band spread out in zeros, then products over the tiles that hold a key in reach.

    Dilation does not help: rows between the neighbors are multiplied, too.
    """
    tiles, slices, row = DENSE_TILES, -(-shape.dim // DENSE_TILES.block_d), shape.dim * ITEM
    sides = sum(-(-side * shape.dilation // tiles.block_n) for side in (shape.left, shape.right))
    steps = min(1 + sides, -(-shape.tokens // tiles.block_n))
    walked, share = steps * tiles.block_n, steps * tiles.block_n / tiles.block_m
    spread = shape.tokens * FP32 + 2 * _steps(shape, SLOT_TILES) * SLOT_TILES.block_n * FP32
    dv = _times_rows(shape, steps, tiles, FP32 + ITEM)
    # twice, for delta and for ds: p, dp in; do is read again with every tile of v
    twice = 2 * _work((steps + share) * row, (1 + slices) * walked * FP32, 2 * walked * shape.dim)
    dq_dk = 2 * _times_rows(shape, steps, tiles, 2 * ITEM)  # ds in, masked and out
    kept = shape.kernel_size * FP32 + shape.tokens * (FP32 + ITEM)
    return _work(0, spread + walked * ITEM, kept=kept) + dv + twice + dq_dk


def _steps(shape: Neighborhood, tiles: Tiles) -> int:
    """Tiles of BLOCK_N rows of a class over the windows of BLOCK_M rows."""
    return -(-(tiles.block_m + shape.kernel_size - 1) // tiles.block_n)


def _times_rows(shape: Neighborhood, steps: int, tiles: Tiles, crossing: int) -> Tensor:
    """A matrix in memory times rows, of whose elements `crossing` bytes cross the UB for each slice of features."""
    walked, slices, row = steps * tiles.block_n, -(-shape.dim // tiles.block_d), shape.dim * ITEM
    ub = slices * walked * crossing + steps * shape.dim * FP32 + row
    return _work(walked / tiles.block_m * row, ub, 2 * walked * shape.dim)


def neighborhood_table(shapes: Iterable[Neighborhood]) -> str:
    """The model's figures as a table in Markdown: 10^9 bytes and FLOPs."""
    heading = ("B,H,S,D,k,dilation", "pass", "algorithm", "floor GB", "L1 GB", "UB GB", "cube GFLOP", "kept GB")
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for shape in shapes:
        for direction, algorithms in (("fwd", ("flash", "band")), ("bwd", ("flash", "band", "dense"))):
            for algorithm in algorithms:
                work = neighborhood_work(shape, algorithm, backward=direction == "bwd")
                counts = neighborhood_bytes(shape, direction), *work.tolist()
                figures = [f"{count / 1e9:.3g}" if count < 1e12 else f"{count / 1e9:,.0f}" for count in counts]
                lines.append(f"| {' | '.join((str(shape), direction, algorithm, *figures))} |")
    return "\n".join(lines)


# Attention residual


def residual_bytes(shape: Residual, direction: str, itemsize: int = 2) -> int:
    """The byte floor without weights: forward reads L blocks, writes out; backward reads these, do, writes dblocks."""
    tensors = {"fwd": shape.blocks + 1, "bwd": 2 * shape.blocks + 1, "fwd+bwd": 3 * shape.blocks + 2}[direction]
    return tensors * itemsize * shape.batch * shape.tokens * shape.dim


def residual_held(shape: Residual, direction: str, itemsize: int = 2) -> int:
    """Bytes of inputs and outputs: blocks and out; with a backward also do and the blocks' gradients."""
    tensors = shape.blocks + 1 if direction == "fwd" else 2 * shape.blocks + 2
    return tensors * itemsize * shape.batch * shape.tokens * shape.dim

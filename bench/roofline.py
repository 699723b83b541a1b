"""The least time that arithmetic and memory traffic allow, at a device's peak rates: forward, and forward + backward.

Attention multiplies matrices over every visible pair of a query and a key: two products forward (scores, output) and
five backward (scores again, dP, dV, dQ, dK), each 2·D FLOPs a pair and head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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


# Other ops


def neighborhood_bytes(shape: Neighborhood, direction: str, itemsize: int = 2) -> int:
    """The byte floor: forward reads q, k, v, writes o; backward reads q, k, v, o, do, writes dq, dk, dv."""
    tensors = {"fwd": 4, "bwd": 8, "fwd+bwd": 12}[direction]
    return tensors * itemsize * shape.batch * shape.tokens * shape.heads * shape.dim


def residual_bytes(shape: Residual, direction: str, itemsize: int = 2) -> int:
    """The byte floor without weights: forward reads L blocks, writes out; backward reads these, do, writes dblocks."""
    tensors = {"fwd": shape.blocks + 1, "bwd": 2 * shape.blocks + 1, "fwd+bwd": 3 * shape.blocks + 2}[direction]
    return tensors * itemsize * shape.batch * shape.tokens * shape.dim

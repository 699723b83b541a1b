"""Attention residual in plain Triton: for Ascend NPUs, and for NVIDIA GPUs.

Definition (residual/reference.py has it in PyTorch). A token has a row x_i of D features of each of L blocks.

    rstd_i = 1 / sqrt(mean(x_i^2) + eps)     score_i = rstd_i * sum(w * x_i), w = w_query * w_norm
    alpha  = softmax of score over i         out = sum_i alpha_i * x_i

    dp_i = sum(do * x_i)    delta = sum_i alpha_i * dp_i    ds_i = alpha_i * (dp_i - delta)    f_i = ds_i * rstd_i
    dx_i = alpha_i * do + f_i * w - f_i * rstd_i * score_i / D * x_i
    t    = sum over tokens and i of f_i * x_i        dw_query = w_norm * t        dw_norm = w_query * t

Kernels. A program strides over tokens and takes ROWS rows of a token at a time, whole rows of at most BLOCK_D features:
one loop over all rows of all its tokens, so that a GPU loads STAGES - 1 tiles ahead whatever L is. `forward` keeps a
running softmax and the output that goes with it, as flash attention does over keys, so that a row is read once and
forgotten. `backward` needs delta before it can write a gradient: it takes a token's rows twice, or once where all of
them are one tile. It sums its share of t in registers, and `weights` adds the shares in a fixed order: no atomics, the
same bits in every run on one device with one number of programs. Everything is fp32 from load to store.
Longer rows take the kernels of tiled.py.

Forward keeps 2 L fp32 numbers per token: rstd, and alpha as the scores that it is the softmax of, which backward takes
again: a running softmax has no alpha before its last row, and dx needs the scores too.

Floor, in elements of the blocks' dtype. Forward reads V, T L D, and writes out, T D. Backward reads V and do and writes
dV, T (2 L + 1) D. The rest is small: fp32, 2 L per token, and D per program.

Traffic. Forward reads V once wherever a row fits (residual/tiling.py says where). Backward reads do once, and V once
where a token is one tile; else its second reading of a token comes right after the first, from the L2 of a GPU as long
as the tokens in flight fit there (docs/attention_residual.md says up to which L), and from global memory on an NPU.

Limits: fp16, bf16 or fp32; L <= 64, T L <= 2^30; features contiguous, others are copied. On NPUs rows are padded to
multiples of 16 features, by a copy where D is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.device import gpu_cores, npu_of
from ascend_kernels.launch import Repeat, launch
from ascend_kernels.neighborhood.rows import features_of, is_readable, readable, readable_copy
from ascend_kernels.residual import tiled, tiling
from ascend_kernels.residual.rows import (
    MAX_POINTERS,
    OFFSETS,
    POINTERS,
    STACKED,
    TABLE,
    WIDE,
    load_lse,
    load_scores,
    load_tile,
    load_weight,
    log_sum_exp,
    sum_of_rows,
    sums_of_rows,
    table_kernel,
    token_offset,
)

POINTER_NAMES = tuple(f"p_{i}" for i in range(MAX_POINTERS))
SIZES = ("num_tokens", "num_blocks", "tokens_per_batch", "num_partials")
"""Run-time values that must not make builds of their own; strides, D and norm_dim may, for their alignment."""


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    p_0,
    p_table,
    p_w_query,
    p_w_norm,
    p_out,
    p_scores,
    p_rstd,
    num_tokens,
    num_blocks,
    tokens_per_batch,
    dim,
    norm_dim,
    inverse_dim,
    eps,
    block_stride,
    batch_stride,
    token_stride,
    p_1,
    p_2,
    p_3,
    p_4,
    p_5,
    p_6,
    p_7,
    p_8,
    p_9,
    p_10,
    p_11,
    p_12,
    p_13,
    p_14,
    p_15,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ADDRESS: tl.constexpr,
    UNIT: tl.constexpr,
    BRANCHES: tl.constexpr,
    FLAT: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_TILE: tl.constexpr,
) -> None:
    """out, scores and rstd.

    ONE_TILE: a token has no more than ROWS rows, whose softmax is plain. Otherwise it runs over a token's steps.
    """
    o_dim = tl.arange(0, BLOCK_D)
    b_w = load_weight(p_w_query, p_w_norm, o_dim, dim, norm_dim)
    num_steps = 1 if ONE_TILE else tl.cdiv(num_blocks, ROWS)
    my_tokens = tl.cdiv(num_tokens - tl.program_id(0), tl.num_programs(0))
    i_token = tl.program_id(0)
    i_step = 0
    b_max = float("-inf")
    b_sum = 0.0
    b_out = tl.zeros([BLOCK_D], dtype=tl.float32)
    for _ in tl.range(0, my_tokens * num_steps, num_stages=STAGES):
        i_offset = token_offset(i_token, tokens_per_batch, batch_stride, token_stride, FLAT)
        b_x = load_tile(
            i_step, num_blocks, i_offset, block_stride, o_dim, dim, p_table,
            p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
            ROWS, ADDRESS, UNIT, BRANCHES,
        )  # fmt: skip
        b_x = b_x.to(tl.float32)
        o_row = i_step * ROWS + tl.arange(0, ROWS)
        there = o_row < num_blocks
        i_kept = tl.cast(i_token, tl.int64) * num_blocks
        b_squares, b_products = sums_of_rows(b_x, b_w[None, :], BRANCHES)
        b_rstd = tl.rsqrt(b_squares * inverse_dim + eps)
        b_score = b_products * b_rstd
        tl.store(p_scores + i_kept + o_row, b_score, mask=there)
        tl.store(p_rstd + i_kept + o_row, b_rstd, mask=there)
        b_score = tl.where(there, b_score, float("-inf"))
        p_row = p_out + tl.cast(i_token, tl.int64) * dim
        if ONE_TILE:
            b_largest = tl.max(b_score, 0)
            b_p = tl.exp(b_score - b_largest)
            b_total = tl.sum(b_p, 0)
            b_mixed = tl.sum((b_p * (1.0 / b_total))[:, None] * b_x, 0)
            tl.store(p_row + o_dim, b_mixed.to(p_out.dtype.element_ty), mask=o_dim < dim)
            i_token += tl.num_programs(0)
        else:
            b_largest = tl.maximum(b_max, tl.max(b_score, 0))
            b_scale = tl.exp(b_max - b_largest)
            b_p = tl.exp(b_score - b_largest)
            b_max = b_largest
            b_sum = b_sum * b_scale + tl.sum(b_p, 0)
            b_out = b_out * b_scale + tl.sum(b_p[:, None] * b_x, 0)
            if i_step == num_steps - 1:
                tl.store(p_row + o_dim, (b_out * (1.0 / b_sum)).to(p_out.dtype.element_ty), mask=o_dim < dim)
                b_max = float("-inf")
                b_sum = 0.0
                b_out = tl.zeros([BLOCK_D], dtype=tl.float32)
            i_token += tl.where(i_step == num_steps - 1, tl.num_programs(0), 0)
            i_step = tl.where(i_step == num_steps - 1, 0, i_step + 1)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    p_0,
    p_table,
    p_w_query,
    p_w_norm,
    p_do,
    p_scores,
    p_rstd,
    p_dblocks,
    p_partials,
    num_tokens,
    num_blocks,
    tokens_per_batch,
    dim,
    norm_dim,
    inverse_dim,
    do_batch_stride,
    do_token_stride,
    dblock_stride,
    block_stride,
    batch_stride,
    token_stride,
    p_1,
    p_2,
    p_3,
    p_4,
    p_5,
    p_6,
    p_7,
    p_8,
    p_9,
    p_10,
    p_11,
    p_12,
    p_13,
    p_14,
    p_15,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ADDRESS: tl.constexpr,
    UNIT: tl.constexpr,
    BRANCHES: tl.constexpr,
    FLAT: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_TILE: tl.constexpr,
) -> None:
    """dV, and this program's share of t.

    ONE_TILE: a token has no more than ROWS rows. Otherwise it has two turns of steps, for delta and for gradients.
    """
    o_dim = tl.arange(0, BLOCK_D)
    b_w = load_weight(p_w_query, p_w_norm, o_dim, dim, norm_dim)
    num_steps = 1 if ONE_TILE else tl.cdiv(num_blocks, ROWS)
    num_turns = 1 if ONE_TILE else 2 * num_steps
    my_tokens = tl.cdiv(num_tokens - tl.program_id(0), tl.num_programs(0))
    i_token = tl.program_id(0)
    i_turn = 0
    b_t = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_do = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_lse = 0.0
    b_delta = 0.0
    for _ in tl.range(0, my_tokens * num_turns, num_stages=STAGES):
        i_step = 0 if ONE_TILE else tl.where(i_turn < num_steps, i_turn, i_turn - num_steps)
        i_offset = token_offset(i_token, tokens_per_batch, batch_stride, token_stride, FLAT)
        b_x = load_tile(
            i_step, num_blocks, i_offset, block_stride, o_dim, dim, p_table,
            p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
            ROWS, ADDRESS, UNIT, BRANCHES,
        )  # fmt: skip
        b_x = b_x.to(tl.float32)
        o_row = i_step * ROWS + tl.arange(0, ROWS)
        there = o_row < num_blocks
        i_kept = tl.cast(i_token, tl.int64) * num_blocks
        if ONE_TILE or i_turn == 0:
            p_do_row = p_do + token_offset(i_token, tokens_per_batch, do_batch_stride, do_token_stride, FLAT)
            b_do = tl.load(p_do_row + o_dim, mask=o_dim < dim, other=0.0).to(tl.float32)
            b_delta = 0.0
        b_dp = sum_of_rows(b_x, b_do[None, :], BRANCHES)  # before the scores: fewer registers at a time, 7 % faster
        b_score = load_scores(p_scores, i_kept, o_row, num_blocks)
        b_rstd = tl.load(p_rstd + i_kept + o_row, mask=there, other=0.0)
        if ONE_TILE:
            b_lse = log_sum_exp(b_score)
        elif i_turn == 0:
            b_lse = load_lse(p_scores, i_kept, num_blocks)
        b_alpha = tl.exp(b_score - b_lse)
        b_score = tl.where(there, b_score, 0.0)
        if ONE_TILE or i_turn < num_steps:
            b_delta += tl.sum(b_alpha * b_dp, 0)
        if ONE_TILE or i_turn >= num_steps:
            b_f = b_alpha * (b_dp - b_delta) * b_rstd
            b_dx = b_alpha[:, None] * b_do[None, :] + b_f[:, None] * b_w[None, :]
            b_dx -= (b_f * b_rstd * b_score * inverse_dim)[:, None] * b_x
            b_t += tl.sum(b_f[:, None] * b_x, 0)
            p_rows = p_dblocks + o_row.to(tl.int64) * dblock_stride + tl.cast(i_token, tl.int64) * dim
            mask = there[:, None] & (o_dim < dim)[None, :]
            tl.store(p_rows[:, None] + o_dim[None, :], b_dx.to(p_dblocks.dtype.element_ty), mask=mask)
        if ONE_TILE:
            i_token += tl.num_programs(0)
        else:
            i_token += tl.where(i_turn == num_turns - 1, tl.num_programs(0), 0)
            i_turn = tl.where(i_turn == num_turns - 1, 0, i_turn + 1)
    tl.store(p_partials + tl.cast(tl.program_id(0), tl.int64) * dim + o_dim, b_t, mask=o_dim < dim)


@triton.jit(do_not_specialize=SIZES)
def weights_kernel(
    p_partials,
    p_w_query,
    p_w_norm,
    p_dw_query,
    p_dw_norm,
    num_partials,
    dim,
    norm_dim,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """dw_query and dw_norm of BLOCK_D features, from the programs' shares of t in their order."""
    o_part = tl.arange(0, BLOCK_P)
    for i_dim in range(tl.program_id(0) * BLOCK_D, dim, tl.num_programs(0) * BLOCK_D):
        o_dim = i_dim + tl.arange(0, BLOCK_D)
        b_t = tl.zeros([BLOCK_D], dtype=tl.float32)
        for i_part in range(0, num_partials, BLOCK_P):
            o_parts = i_part + o_part
            mask = (o_parts < num_partials)[:, None] & (o_dim < dim)[None, :]
            b_t += tl.sum(tl.load(p_partials + o_parts[:, None] * dim + o_dim[None, :], mask=mask, other=0.0), 0)
        b_query = tl.load(p_w_query + o_dim, mask=o_dim < dim, other=0.0).to(tl.float32)
        b_norm = tl.load(p_w_norm + o_dim, mask=o_dim < norm_dim, other=1.0).to(tl.float32)
        tl.store(p_dw_query + o_dim, (b_t * b_norm).to(p_dw_query.dtype.element_ty), mask=o_dim < dim)
        tl.store(p_dw_norm + o_dim, (b_t * b_query).to(p_dw_norm.dtype.element_ty), mask=o_dim < norm_dim)


# Launchers

KERNELS = {
    "forward": forward_kernel,
    "backward": backward_kernel,
    "weights": weights_kernel,
    "scores": tiled.scores_kernel,
    "mix": tiled.mix_kernel,
    "products": tiled.products_kernel,
    "gradients": tiled.gradients_kernel,
}


def forward(
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor | None,
    *,
    eps: float,
    backend: str,
    **overrides: int,
) -> tuple[Tensor, Tensor]:
    """Forward of checked inputs.

    Args:
        blocks: `[L,B,N,D]`, or L tensors `[B,N,D]` of the same strides. w_query, w_norm: `[D]`.
        backend: "triton" or "ascend", whose tiles and grid to use.
        overrides: of `residual_tiling.gpu_plan`, to try other tiles.

    Returns:
        out `[B,N,D]`, and what `backward` takes, one fp32 tensor: scores and rstd `[T,L]`.
    """
    first = _first(blocks)
    known = _Known.of(blocks, w_query, w_norm, "forward", eps, *overrides.items())
    if known is not None and known.repeats:
        out, kept = first.new_empty(first.shape[-3:]), kept_like(blocks)
        (repeat,) = known.repeats
        repeat((*known.inputs, out.data_ptr(), *_addresses(kept, blocks)), known.further)
        return out, kept
    *lead, dim = first.shape[-3:]
    wide = features_of(dim, backend)
    out = first.new_empty((*lead, wide))
    kept = kept_like(blocks)
    if out.numel():
        given, constants = _rows(blocks, w_query, w_norm, backend)
        plan = _plan(blocks, wide, backend, backward=False, **overrides)
        given |= {**_parts(kept, blocks), "p_out": out, "eps": float(eps)}
        names = ("scores", "mix") if plan.tiled else ("forward",)
        made = [_launch(name, plan, plan.grid, given, constants) for name in names]
        if known is not None and not plan.tiled:
            known.remember(made)
    return (out if wide == dim else out[..., :dim]), kept


def kept_like(blocks: Tensor | Sequence[Tensor]) -> Tensor:
    """Uninitialised: what `forward` keeps."""
    return _first(blocks).new_empty(2 * _aligned_rows(blocks), dtype=torch.float32)


def backward(
    do: Tensor,
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor | None,
    kept: Tensor,
    *,
    backend: str,
    **overrides: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients, from what `forward` took and kept. Bitwise the same in every run on one device.

    Returns:
        dV `[L,B,N,D]`, of lists too; dw_query, and dw_norm or None.
    """
    first = _first(blocks)
    known = _Known.of(blocks, w_query, w_norm, "backward", do.dtype, do.stride(), *overrides.items())
    if known is not None and known.repeats and do.data_ptr() % Repeat.ALIGNMENT == 0:
        return _again(known, do, blocks, w_query, w_norm, kept)
    *lead, dim = first.shape[-3:]
    wide = features_of(dim, backend)
    dblocks = first.new_empty((len(blocks), *lead, wide))
    if dblocks.numel() == 0:
        return dblocks[..., :dim], torch.zeros_like(w_query), None if w_norm is None else torch.zeros_like(w_norm)
    tokens = dblocks[0].numel() // wide
    given, constants = _rows(blocks, w_query, w_norm, backend)
    plan = _plan(blocks, wide, backend, backward=True, **overrides)
    given_do, do = do, readable(do, backend)
    constants["FLAT"] &= _is_flat(do)
    given |= {
        **_parts(kept, blocks),
        "p_do": do,
        "do_batch_stride": do.stride(0),
        "do_token_stride": do.stride(1),
        "p_dblocks": dblocks,
        "dblock_stride": dblocks.stride(0),
    }
    if plan.tiled:
        num_runs = -(-wide // plan.block_d)
        num_parts = max(1, plan.programs // num_runs)
        partials = kept.new_empty((num_parts, wide))
        given |= {"p_dp": kept.new_empty(tokens * len(blocks)), "p_delta": kept.new_empty(tokens)}
        _launch("products", plan, plan.grid, given, constants)
        _launch("gradients", plan, (num_runs * num_parts,), given | {"p_partials": partials}, constants)
    else:
        partials = kept.new_empty((plan.programs, wide))
        made = _launch("backward", plan, plan.grid, given | {"p_partials": partials}, constants)
    dw_query, dw_norm, last = _dweights(partials, given, w_query, w_norm, backend)
    if known is not None and not plan.tiled and do is given_do and do.data_ptr() % Repeat.ALIGNMENT == 0:
        known.remember([made, last], partials.shape[0])
    return (dblocks if wide == dim else dblocks[..., :dim]), dw_query, dw_norm


def _again(
    known: _Known, do: Tensor, blocks: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`backward` by launches that were made before."""
    first = _first(blocks)
    dblocks = first.new_empty((len(blocks), *first.shape[-3:]))
    partials = kept.new_empty((known.num_partials, first.shape[-1]))
    dw_query = torch.empty_like(w_query)
    dw_norm = None if w_norm is None else torch.empty_like(w_norm)
    gradients, weights = known.repeats
    to, shares = dblocks.data_ptr(), partials.data_ptr()
    gradients((*known.inputs, do.data_ptr(), *_addresses(kept, blocks), to, shares), known.further)
    of_query = dw_query.data_ptr()
    weights((shares, *known.inputs[2:], of_query, of_query if dw_norm is None else dw_norm.data_ptr()))
    return dblocks, dw_query, dw_norm


def _dweights(
    partials: Tensor, given: dict[str, Any], w_query: Tensor, w_norm: Tensor | None, backend: str
) -> tuple[Tensor, Tensor | None, Repeat | None]:
    """dw_query, dw_norm, and their launch."""
    weights = [w_query] if w_norm is None else [w_query, w_norm]
    dim = partials.shape[1]
    results = [partials.new_empty(dim, dtype=weight.dtype) for weight in weights]
    parts, plan = tiling.weights_plan(dim, npu_of(partials.device) if backend == "ascend" else None)
    given = given | {
        "p_partials": partials,
        "num_partials": partials.shape[0],
        "p_dw_query": results[0],
        "p_dw_norm": results[-1],
    }
    made = _launch("weights", plan, plan.grid, given, {"BLOCK_P": parts})
    dw_query, *dw_norm = (result[: w_query.shape[0]] for result in results)
    return dw_query, dw_norm[0] if dw_norm else None, made


def _first(blocks: Tensor | Sequence[Tensor]) -> Tensor:
    return blocks if isinstance(blocks, Tensor) else blocks[0]


def _aligned_rows(blocks: Tensor | Sequence[Tensor]) -> int:
    """Rows of all tokens, and up to three more: fp32 numbers after so many others begin at a multiple of 16 bytes."""
    rows = len(blocks) * _first(blocks).shape[-3:-1].numel()
    return -(-rows // 4) * 4


def _parts(kept: Tensor, blocks: Tensor | Sequence[Tensor]) -> dict[str, Tensor]:
    return {"p_scores": kept, "p_rstd": kept[_aligned_rows(blocks) :]}


def _addresses(kept: Tensor, blocks: Tensor | Sequence[Tensor]) -> tuple[int, int]:
    """Where `_parts` lie."""
    return kept.data_ptr(), kept.data_ptr() + kept.element_size() * _aligned_rows(blocks)


class _Known:
    """A call on a GPU by all that decides about its launches, and these launches if it was made before.

    Of calls that read tensors where they are: neither copies nor tables of addresses.
    """

    calls: ClassVar[dict[Any, tuple[int, list[Repeat]]]] = {}
    CALLS = 1024
    """At most; models have few, but lengths of batches may differ."""

    def __init__(self, key: Any, inputs: tuple[int, ...], further: tuple[int | None, ...]) -> None:
        self.key = key
        self.inputs = inputs
        """Addresses of the first block, of a table that there is none of, and of the weights."""
        self.further = further
        self.num_partials, self.repeats = self.calls.get(key, (0, []))

    @classmethod
    def of(cls, blocks: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, *rest: Any) -> _Known | None:
        """None where launches cannot be repeated."""
        first = _first(blocks)
        if not Repeat.possible(first.device):
            return None
        query = w_query.data_ptr()
        norm = query if w_norm is None else w_norm.data_ptr()
        further: tuple[int | None, ...]
        if isinstance(blocks, Tensor):
            count, further, together = 0, _NO_FURTHER, first.data_ptr() | query | norm
        elif len(blocks) <= MAX_POINTERS:
            count, addresses = len(blocks), [block.data_ptr() for block in blocks]
            further = (*addresses[1:], *[addresses[0]] * (MAX_POINTERS - count))
            together = reduce(or_, addresses, query | norm)
        else:
            return None
        strides = first.stride()
        if together % Repeat.ALIGNMENT or strides[-1] != 1 or not (w_query.stride(0) == 1 or w_query.numel() == 1):
            return None
        if w_norm is not None and w_norm.stride() != w_query.stride():
            return None
        dtypes = first.dtype, w_query.dtype, None if w_norm is None else w_norm.dtype
        key = (*rest, count, first.shape, strides, dtypes, first.device)
        return cls(key, (first.data_ptr(), query, query, norm), further)

    def remember(self, made: list[Repeat | None], num_partials: int = 0) -> None:
        repeats = [repeat for repeat in made if repeat is not None]
        if len(repeats) == len(made):
            if len(self.calls) >= self.CALLS:
                self.calls.clear()
            self.calls[self.key] = num_partials, repeats


_NO_FURTHER = (None,) * (MAX_POINTERS - 1)


def _is_flat(tensor: Tensor) -> bool:
    """Whether tokens of all sequences `[...,B,N,D]` are the same stride apart."""
    return tensor.shape[-3] == 1 or tensor.stride(-3) == tensor.shape[-2] * tensor.stride(-2)


def _rows(
    blocks: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor | None, backend: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What every kernel is given: pointers, strides and sizes; and how it addresses blocks."""
    first = _first(blocks)
    on_npu = backend == "ascend"
    weights = [weight for weight in (w_query, w_norm) if weight is not None]
    weights = [readable(weight.float() if on_npu else weight, backend) for weight in weights]
    constants: dict[str, Any] = {"ADDRESS": STACKED.value, "UNIT": 1, "BRANCHES": on_npu, "FLAT": False}
    pointers: dict[str, Any] = dict.fromkeys(POINTER_NAMES)
    table, members = weights[0], []
    if isinstance(blocks, Tensor):
        rows = readable(blocks, backend)
        pointers["p_0"], block_stride = rows, rows.stride(0)
    else:
        members = list(blocks)
        if not all(is_readable(block, backend) for block in blocks):  # copies of all have the same strides again
            members = [readable_copy(block, backend) for block in blocks]
        rows, block_stride = members[0], 0
        if len(members) <= MAX_POINTERS:
            constants["ADDRESS"] = POINTERS.value
            constants["UNIT"] = 1 if on_npu else _unit([member.data_ptr() for member in members], rows.element_size())
            pointers = {name: members[i] if i < len(members) else rows for i, name in enumerate(pointers)}
        else:
            pointers["p_0"], table, constants["UNIT"] = _table(members, on_npu)
            constants["ADDRESS"] = TABLE.value
    given = {
        **pointers,
        "members": members,  # no kernel takes them, but copies must live until the launch
        "p_table": table,
        "p_w_query": weights[0],
        "p_w_norm": weights[-1],
        "num_tokens": first.shape[-3] * first.shape[-2],
        "num_blocks": len(blocks),
        "tokens_per_batch": first.shape[-2],
        "dim": rows.shape[-1],
        "norm_dim": 0 if w_norm is None else rows.shape[-1],
        "inverse_dim": 1.0 / first.shape[-1],
        "block_stride": block_stride,
        "batch_stride": rows.stride(-3),
        "token_stride": rows.stride(-2),
    }
    constants["FLAT"] = not on_npu and _is_flat(rows)
    return given, constants


def _unit(addresses: list[int], itemsize: int) -> int:
    """Elements in 16 bytes, where all addresses, or distances of such, are multiples of 16 bytes; else 1."""
    return 16 // itemsize if all(address % 16 == 0 for address in addresses) else 1


def _table(members: list[Tensor], on_npu: bool) -> tuple[Tensor, Tensor, int]:
    """The tensor at the lowest address, offsets of all from it in units of elements, and the unit."""
    base = min(members, key=Tensor.data_ptr)
    itemsize = base.element_size()
    distances = [member.data_ptr() - base.data_ptr() for member in members]
    unit = 1 if on_npu else _unit(distances, itemsize)
    offsets = [distance // itemsize for distance in distances]
    table = torch.empty(len(members), dtype=torch.int64, device=base.device)
    for start in range(0, len(members), MAX_POINTERS):
        piece = [offset // unit for offset in offsets[start : start + MAX_POINTERS]]
        padded = [WIDE.value + offset for offset in piece + [0] * (MAX_POINTERS - len(piece))]
        given = {"p_table": table[start:], "num_offsets": len(piece), **dict(zip(OFFSETS, padded, strict=True))}
        launch(table_kernel, (1,), given, {})
    if len({member.untyped_storage().data_ptr() for member in members}) == 1:  # as a whole, if there is one
        base = base.as_strided((max(offsets) + _extent(base),), (1,))
    return base, table, unit


def _extent(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _plan(
    blocks: Tensor | Sequence[Tensor], dim: int, backend: str, *, backward: bool, **overrides: int
) -> tiling.Plan:
    first = _first(blocks)
    tokens = first.shape[-3] * first.shape[-2]
    shape = {"dim": dim, "blocks": len(blocks), "tokens": tokens}
    if backend == "ascend":
        listed = not isinstance(blocks, Tensor)
        npu = npu_of(first.device)
        return tiling.ascend_plan(backward=backward, dtype=first.dtype, **shape, listed=listed, device=npu)
    return tiling.gpu_plan(backward=backward, dtype=first.dtype, **shape, cores=gpu_cores(first.device), **overrides)


def _launch(
    name: str, plan: tiling.Plan, grid: tuple[int, ...], given: dict[str, Any], constants: dict[str, Any]
) -> Repeat | None:
    """With those of the arguments and constants that the kernel has."""
    kernel = KERNELS[name]
    runs = -(-given["dim"] // plan.block_d)
    given = {**given, "num_work": given["num_tokens"] * runs}
    constants = {
        **constants,
        "BLOCK_D": plan.block_d,
        "ROWS": plan.rows,
        "ONE_TILE": plan.one_tile,
        "STAGES": plan.stages,
    }
    arguments = {argument: given[argument] for argument in kernel.arg_names if argument in given}
    constants = {constant: constants[constant] for constant in kernel.arg_names if constant in constants}
    compiled = launch(kernel, grid, arguments, constants, **plan.options)
    repeatable = compiled is not None and Repeat.possible(given["p_w_query"].device)
    return Repeat(compiled, grid, arguments, constants) if repeatable else None

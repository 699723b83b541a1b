"""One step of attention on tiles of rows and keys, forward and backward; kernels differ in which keys a row sees.

    s = scale * q k^T        p = exp(s - lse)        o = p v        lse = log(sum(exp(s)))
    dp = do v^T        ds = p * (dp - delta), delta = sum(o * do)
    dq = scale * gate * ds k        dk = scale * (gate * ds)^T q        dv = (gate * p)^T do

`gate` weighs the branch in each row; do is the gradient of the gated sum. Scores, probabilities and sums are fp32,
operands of products in the inputs' dtype. Rows without keys have o = 0, lse = -inf, and no gradient.

Backwards read a row's statistics as one vector of four numbers, fp32 `[H,rows,4]`: lse in base 2, delta, gate, and 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(p_rows, o_rows, row_stride, o_dim, end_row, dim, WHOLE: tl.constexpr):
    """Rows below end_row, `[rows,D]`, else 0. WHOLE: BLOCK_D is D."""
    if WHOLE:
        mask = (o_rows < end_row)[:, None]
    else:
        mask = (o_rows < end_row)[:, None] & (o_dim < dim)[None, :]
    return tl.load(p_rows + o_rows.to(tl.int64)[:, None] * row_stride + o_dim[None, :], mask=mask, other=0.0)


@triton.jit
def last_keys(o_token, end, CAUSAL: tl.constexpr):
    """Last key that each token sees of those below `end`."""
    return tl.minimum(o_token, end - 1) if CAUSAL else end - 1 + 0 * o_token


@triton.jit
def add_keys(b_o, b_max, b_sum, b_s, b_v, log2_scale):
    """One step of the online softmax. b_s: unscaled scores `[M,N]`; b_max `[M]` is unscaled, too."""
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)  # of rows that have seen no key yet
    b_p = tl.exp2(b_s * log2_scale - (b_finite * log2_scale)[:, None])  # [M,N]
    b_keep = tl.exp2((b_max - b_finite) * log2_scale)
    b_sum = b_sum * b_keep + tl.sum(b_p, 1)
    b_o = b_o * b_keep[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")  # [M,D_v]
    return b_o, b_new, b_sum


@triton.jit
def finish(b_o, b_max, b_sum, log2_scale):
    """o and natural lse of sums; 0 and -inf without keys."""
    b_div = tl.where(b_sum > 0.0, b_sum, 1.0)
    return b_o * (1.0 / b_div)[:, None], (b_max * log2_scale + tl.log2(b_sum)) * LN_2


@triton.jit
def store_statistics(p_rows, b_lse, b_delta, b_gate, mask):
    """Store the statistics of rows at p_rows `[M]`. b_lse: natural."""
    b_pairs = tl.join(tl.join(b_lse * LOG2_E, b_gate), tl.join(b_delta, tl.zeros_like(b_delta)))
    b_stats = tl.reshape(b_pairs, [b_lse.shape[0], 4])  # lse, delta, gate, 0
    tl.store(p_rows[:, None] + tl.arange(0, 4)[None, :], b_stats, mask=mask[:, None])


@triton.jit
def load_statistics(p_rows, mask):
    """Base-2 lse, delta and gate of the rows at p_rows, `[M]` each; +inf, 0 and 0 without mask, so that p is 0."""
    b_stats = tl.load(p_rows[:, None] + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0.0)
    b_even, b_odd = tl.split(tl.reshape(b_stats, [mask.shape[0], 2, 2]))
    b_lse, b_gate = tl.split(b_even)
    b_delta, _ = tl.split(b_odd)
    return tl.where(mask, b_lse, float("inf")), b_delta, b_gate


@triton.jit
def add_dq(b_dq, b_q, b_do, b_lse, b_delta, b_k, b_v, b_seen, log2_scale):
    """Add one tile of keys to dq `[M,D]`, still without scale and gate. b_seen: `[M,N]`."""
    b_p = tl.exp2(tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * log2_scale - b_lse[:, None])  # [M,N]
    b_p = tl.where(b_seen, b_p, 0.0)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")  # [M,N]
    b_ds = (b_p * (b_dp - b_delta[:, None])).to(b_k.dtype)
    return b_dq + tl.dot(b_ds, b_k, input_precision="ieee")


@triton.jit
def add_dkdv(b_dk, b_dv, b_k, b_v, b_q, b_do, b_lse, b_delta, b_gate, b_seen, log2_scale):
    """Add one tile of rows to dk `[N,D]`, still without scale, and dv `[N,D_v]`. b_seen: `[N,M]`.

    Returns:
        dk, dv, and gate * ds `[N,M]` in the inputs' dtype.
    """
    b_p = tl.exp2(tl.dot(b_k, tl.trans(b_q), input_precision="ieee") * log2_scale - b_lse[None, :])  # [N,M]
    b_p = tl.where(b_seen, b_p, 0.0)
    b_p *= b_gate[None, :]
    b_dv += tl.dot(b_p.to(b_do.dtype), b_do, input_precision="ieee")
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")  # [N,M]
    b_ds = (b_p * (b_dp - b_delta[None, :])).to(b_q.dtype)
    b_dk += tl.dot(b_ds, b_q, input_precision="ieee")
    return b_dk, b_dv, b_ds

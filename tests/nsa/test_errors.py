"""Bad input: each has its exact error class and a message that names the argument and the value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

import dispatch
from nsa import (
    AttentionResidual,
    LinearCompression,
    NeighborhoodAttention,
    NeighborhoodAttentionLayer,
    NSACache,
    NSAConfig,
    NSAttention,
    Unpadding,
    attention_residual,
    block_sparse_attention,
    indexer_kl_loss,
    nsa,
    nsa_forward,
    nsa_forward_aux,
    nsa_with_cache,
    rotary_table,
    top_blocks_by_max,
)
from nsa.common import resolve
from nsa.inputs import NSAInputs
from nsa.integrations.fla import fla_config, layer_from_fla
from tests.support.cases import product
from tests.support.helpers import SMALL

B, N, H, H_KV, D, D_V = 2, 32, 4, 2, 8, 6
DOUBLE = torch.float64


class OwnTensor(torch.Tensor):
    """As programs derive from torch.Tensor."""


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def good(**changes: Any) -> dict[str, Any]:
    given = {"q": ones(B, N, H, D), "k": ones(B, N, H_KV, D), "v": ones(B, N, H_KV, D_V), "compress_block_size": 8}
    return given | changes


def packed(**changes: Any) -> dict[str, Any]:
    return good(q=ones(N, H, D), k=ones(N, H_KV, D), v=ones(N, H_KV, D_V), cu_seqlens=bounds(0, 10, N)) | changes


def continued(**changes: Any) -> dict[str, Any]:
    """16 queries after up to 24 of 40 keys."""
    return {"q": ones(1, 16, 4, 16), "k": ones(1, 40, 2, 16), "v": ones(1, 40, 2, 16)} | changes


def continued_packs(**changes: Any) -> dict[str, Any]:
    """6 and 10 queries of documents of 10 and 30 keys."""
    given = {"q": ones(16, 4, 16), "k": ones(40, 2, 16), "v": ones(40, 2, 16), "q_start": bounds(0, 0)}
    return given | {"cu_seqlens": bounds(0, 6, 16), "cu_seqlens_k": bounds(0, 10, 40)} | changes


def bounds(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


NAN = ones(B, N, H, D) * math.nan
ENTRIES = {"k_cmp": ones(B, 4, H_KV, D), "v_cmp": ones(B, 4, H_KV, D_V)}
HEADS_FIRST = {name: ones(B, heads, N, 8) for name, heads in (("q", H), ("k", H_KV), ("v", H_KV))}
TILE = {"config": SMALL["seed"]}
"""Tiles of 16."""
OUTSIDE = "q_start must be from 0 to N_k - N_q = 40 - 16 = 24, got "
INSIDE = "must be given if queries begin inside a tile: tile 1 has tokens 16 to 31 (q_tile_size=16), got q_start="
BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    (good(num_init_blocks=1, num_local_blocks=2, num_selected_blocks=2), "num_selected_blocks=2, got 1 + 2"),
    (good(num_cmp_selected_blocks=3, n_block_size=1, q_tile_size=32), "num_cmp_selected_blocks must be at least 4"),
    (good(v=ones(B, N, H_KV, D_V, device="meta")), "v must be on q's device cpu, got meta"),
    (good(**HEADS_FIRST), "k must have q's [B,N] = [2, 4] (the layout is [B,N,heads,D]), or more tokens, got"),
    (packed(k=ones(31, H_KV, D)), "k must have q's [T] = [32] (the layout is [T,heads,D]), or"),
    (good(k=ones(B, N, H_KV, 7)), "k must have q's head dim D=8, got shape [2, 32, 2, 7"),
    (good(v=ones(B, N, 1, D_V)), "v must have k's H_kv=2 heads, got shape [2, 32, 1"),
    (good(q=ones(B, N, 3, D)), "q must have a multiple of k's H_kv=2 heads (at least one), got H=3"),
    (good(k=ones(B, N, 0, D), v=ones(B, N, 0, D_V)), "k must have at least one head"),
    (good(w_k_compress=ones(H_KV, D, D_V)), "w_k_compress must have the shape [2, 8, 8], got [2, 8, 6]"),
    (good(gate_proj_weight=ones(H, D, 3)), "gate_proj_weight must have the shape [4, 3, 8], got [4, 8, 3]"),
    (good(gates=ones(B, N, 3, H)), "gates must have the shape [2, 32, 4, 3], got [2, 32, 3, 4]"),
    (good(k_cmp=ones(B, 5, H_KV, D), v_cmp=ones(B, 5, H_KV, D_V)), "k_cmp must have the shape [2, 4, 2, 8]"),
    (packed(k_cmp=ones(1, 4, H_KV, D), v_cmp=ones(1, 4, H_KV, D_V)), "k_cmp must have the shape [0, 2, 8]"),
    (packed(k_cmp=ones(2, H_KV, D), v_cmp=ones(2, H_KV, D_V)), "k_cmp must hold the 3 compressed entries"),
    (good(k_cmp=ones(B, 4, H_KV, D)), "k_cmp and v_cmp go together, got only k_cmp"),
    (good(k_win=ones(B, N, H_KV, D)), "k_win and v_win go together, got only k_win"),
    (good(**ENTRIES, w_v_compress=ones(H_KV, D_V, D_V)), "w_v_compress would be ignored: k_cmp and v_cmp replace"),
    (good(**ENTRIES, compress=torch.sum), "compress would be ignored: k_cmp and v_cmp replace it"),
    (good(gates=ones(B, N, H, 3), gate_proj_weight=ones(H, 3, D)), "gates and gate_proj_weight exclude each other"),
    (good(compress=lambda blocks: blocks), "compress must map blocks of k [2, 4, 2, 8, 8] to [2, 4, 2, 8]"),
    (packed(q=ones(1, N, H, D)), "q must have the layout [T,heads,D] with cu_seqlens, got shape [1, 32, 4, 8]"),
    (packed(cu_seqlens=bounds(0, N)[None]), "cu_seqlens must have the shape [B+1], got shape [1, 2]"),
    (packed(cu_seqlens=bounds(1, N)), "cu_seqlens must start at 0, got 1"),
    (packed(cu_seqlens=torch.nn.Parameter(bounds(1, N), requires_grad=False)), "cu_seqlens must start at 0, got 1"),
    (packed(cu_seqlens=bounds(0, 20, 10)), "cu_seqlens must not decrease, got 20 then 10 at position 2"),
    (packed(cu_seqlens=bounds(0, 33)), "cu_seqlens must end at most at T=32, got 33"),
    (packed(max_seqlen=21), "max_seqlen must be at least the longest document, 22, got 21"),
    (good(max_seqlen=32), "max_seqlen goes with cu_seqlens, got max_seqlen=32"),
    (good(backend="cudnn"), "backend must be one of cute, triton, reference for nsa, got 'cudnn'"),
    (good(q=NAN, debug=True), "q must be finite (debug=True), got 2048 NaN"),
    (good(q=NAN.as_subclass(OwnTensor), debug=True), "q must be finite (debug=True), got 2048 NaN"),
    (continued(q_start=-1), f"{OUTSIDE}-1"),
    (continued(q_start=25), f"{OUTSIDE}25"),
    (continued(q_start=bounds(25)), f"{OUTSIDE}25 at position 0"),
    (continued(q_start=bounds(0, 16)), "q_start must have the shape [B] = [1], got [2]"),
    (continued(q_start=bounds(0).to("meta")), "q_start must be on q's device cpu, got meta"),
    (continued(q_start=16, causal=False), "q_start goes with causal=True, got causal=False and q_start=16"),
    (continued(causal=False), "causal=False needs as many queries as keys, got N_q=16, N_k=40"),
    (continued(q_start=20, **TILE), f"q_sum {INSIDE}20"),
    (continued(**TILE), f"q_sum {INSIDE}24"),
    (continued(q_start=bounds(17), **TILE), f"q_sum {INSIDE}17 at position 0"),
    (continued(q_sum=ones(1, 4, 16), config=SMALL["paper"]), "q_sum would be ignored: q_tile_size=1"),
    (continued(q_sum=ones(1, 2, 16), **TILE), "q_sum must have the shape [1, 4, 16], got [1, 2, 16]"),
    (continued(k=ones(1, 15, 2, 16), v=ones(1, 15, 2, 16)), "k must have q's [B,N] = [1, 16] (the"),
    (continued(v=ones(1, 39, 2, 16)), "v must have k's [B,N] = [1, 40] (the layout is [B,N,heads,D]), got"),
    (continued(**dict.fromkeys(("k_cmp", "v_cmp"), ones(1, 2, 2, 16)), q_start=16, **TILE), "the shape [1, 5, 2, 16]"),
    (continued(cu_seqlens_k=bounds(0, 40)), "cu_seqlens_k goes with cu_seqlens, got only cu_seqlens_k"),
    (continued_packs(q_start=0), "q_start must be int32 [B] with cu_seqlens, one for each document, got 0"),
    (continued_packs(cu_seqlens_k=bounds(0, 40)), "cu_seqlens_k must have the shape of cu_seqlens, [3], got [2]"),
    (continued_packs(cu_seqlens_k=bounds(0, 5, 40)), "got 5 keys for 6 queries at position 0"),
    (continued_packs(cu_seqlens_k=bounds(0, 10, 41)), "cu_seqlens_k must end at most at T=40, got 41"),
    (continued_packs(cu_seqlens_k=bounds(0, 30, 20)), "cu_seqlens_k must not decrease, got 30 then 20"),
    (continued_packs(q_start=bounds(0, 21)), "q_start must be from 0 to N_k - N_q = 30 - 10 = 20, got 21 at"),
    (continued_packs(q_start=bounds(0, 9), **TILE), "0 to 15 (q_tile_size=16), got q_start=9 at position 1"),
    (continued_packs(causal=False), "q_start goes with causal=True, got causal=False and q_start=[2]"),
    (continued_packs(causal=False, q_start=None), "needs as many queries as keys, got cu_seqlens_k"),
    (continued_packs(max_seqlen=29), "max_seqlen must be at least the longest document, 30, got 29"),
    (continued_packs(cu_seqlens_k=None), "k must have q's [T] = [16] (the layout is [T,heads,D]), or"),
]
BAD_TYPES: list[tuple[dict[str, Any], str]] = [
    (good(compress=(len,)), "compress as a tuple must be two callables, for K and for V, got (<b"),
    (good(num_selected_block=4), "unknown keyword argument num_selected_block: did you mean num_selected_blocks?"),
    (good(gate=None, cu_seqlen=None), "cu_seqlen, gate: did you mean cu_seqlens, gates?"),
    (good(config=NSAConfig(), is_causal=True), "unknown keyword argument is_causal: the option is causal"),
    (good(config=NSAConfig()), "not both: got config and compress_block_size"),
    (good(config={"window_size": 1}), "config must be an NSAConfig or None, got dict"),
    (good(k=ones(B, N, H_KV, D).to_sparse()), "k must be a dense tensor, got the layout sparse_coo"),
    (good(q=ones(B, N, H, D, dtype=torch.int64)), "q must be bfloat16, float16, float32 or float64, got int64"),
    (good(k=ones(B, N, H_KV, D, dtype=DOUBLE)), "k must be float32 (q is float32), got float64"),
    (good(gates=ones(B, N, H, 3, dtype=torch.bfloat16)), "gates must be float32 (q is float32), got bfloat16"),
    (good(compress=lambda blocks: None), "compress must map blocks of k to a torch.Tensor, got NoneType"),
    (packed(cu_seqlens=torch.tensor([0, N])), "cu_seqlens must be int32, got int64"),
    (continued(q_start=1.0), "q_start must be an integer, a torch.Tensor or None, got float"),
    (continued(q_start=True), "q_start must be an integer, a torch.Tensor or None, got bool"),
    (continued(q_start=torch.tensor([16])), "q_start must be int32, got int64"),
    (continued(q_sum=ones(1, 4, 16, dtype=DOUBLE), **TILE), "q_sum must be float32"),
]
BAD = [*((*row, ValueError) for row in BAD_VALUES), *((*row, TypeError) for row in BAD_TYPES)]


@pytest.fixture(params=["each call is checked", "good ones are remembered"])
def remembered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether good calls on the CPU were accepted before, as on a GPU, so that their like is not checked again."""
    resolve._ACCEPTED.clear()  # calls of decoding are remembered on the CPU, too
    if request.param == "good ones are remembered":
        monkeypatch.setattr(resolve, "DEVICES", {"cpu"})
        resolve._ACCEPTED.update(accepted())
    yield bool(resolve._ACCEPTED)
    resolve._ACCEPTED.clear()


@cache
def accepted() -> dict[Any, Any]:
    """Good calls that are remembered."""
    others = {"gates": (B, N, H, 3), "gate_proj_weight": (H, 3, D), "w_v_compress": (H_KV, D_V, D_V)}
    for more in ({}, ENTRIES, *({name: ones(*shape)} for name, shape in others.items())):
        nsa(**good(**more))
    nsa(**packed())
    return dict(resolve._ACCEPTED)


def test_good_calls_are_checked_once(remembered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(NSAInputs, "check", lambda *_: checked.append("call"))
    nsa(**good())
    nsa(**good(deterministic=True))
    nsa(**good(q=torch.rand(B, N, H, D)))
    assert len(checked) == (1 if remembered else 3), "of other options"
    checked.clear()
    for more in (packed(), {"debug": True}, {"q_start": 0}, {"q": ones(B, N, H, D).as_subclass(OwnTensor)}):
        for _ in range(2):
            nsa(**good() | more)
    assert len(checked) == 8, "each time"


def test_remembered_calls_are_bounded(remembered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "MOST", 3)
    for window in range(1, 9):
        nsa(**good(window_size=window))
        assert len(resolve._ACCEPTED) <= (3 if remembered else 0)


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize(("given", "message", "error"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_input(given: dict[str, Any], message: str, error: type[Exception]) -> None:
    for function in (nsa, nsa_forward, nsa_forward_aux):
        with pytest.raises(error, match=re.escape(message)) as caught:
            function(**given)
        assert type(caught.value) is error


@pytest.mark.usefixtures("remembered")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_named(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([ones(3, H, D), ones(5, H, D)], layout=layout)
    for function in (nsa, nsa_forward, nsa_forward_aux, dispatch.neighborhood_attention):
        with pytest.raises(TypeError, match=r"q must be a dense tensor, got the layout (nested|jagged)"):
            function(nested, nested, nested)
    for blocks, name in ((nested, "blocks"), ([nested, nested], r"blocks\[0\]")):
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got the layout"):
            dispatch.attention_residual(blocks, ones(D))


@pytest.mark.usefixtures("remembered")
def test_environment_names_an_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_KERNELS_BACKEND", "cudnn")
    with pytest.raises(ValueError, match="NSA_KERNELS_BACKEND must be one of cute, triton, reference for nsa, got"):
        nsa(**good())


BLOCKS = torch.zeros(3, 2, 5, 8)
NEXT = torch.zeros(1, 8, 32)
ROWS = Unpadding.from_mask(torch.ones(2, 6, dtype=torch.bool))
STATE = {f"{name}_proj.weight": ones(rows, 32) for name, rows in (("q", 256), ("k", 16), ("v", 16), ("g", 48))}
STATE["o_proj.weight"] = ones(32, 256)
LAYERS = {"nsa": NSAttention, "neighborhood": NeighborhoodAttention}
HEADS_OF_LOSS = {"q_idx": 2, "k_idx": 1, "q": 4, "k": 2}


def mixed(blocks: Any, w_norm: torch.Tensor | None = None) -> torch.Tensor:
    return attention_residual(blocks, ones(8), w_norm)


def sparse(**changed: Any) -> torch.Tensor:
    """Blocks of 64 of 150 tokens."""
    indices = torch.zeros(1, 2, 150, 3, dtype=torch.int32)
    given = {"q": ones(1, 150, 4, 8), "k": ones(1, 150, 2, 8), "v": ones(1, 150, 2, 8), "block_indices": indices}
    return block_sparse_attention(**given | {"block_size": 64} | changed)


def top(**changed: Any) -> torch.Tensor:
    given = {"q_idx": ones(1, 60, 2, 4), "k_idx": ones(1, 60, 1, 4), "block_size": 16, "k": 2}
    return top_blocks_by_max(**given | changed)


def loss(**changed: Any) -> torch.Tensor:
    given: dict[str, Any] = {name: ones(1, 6, heads, 4) for name, heads in HEADS_OF_LOSS.items()}
    return indexer_kl_loss(**given | {"block_indices": torch.zeros(1, 2, 6, 1).int(), "block_size": 8} | changed)


def packed_loss(**changed: Any) -> torch.Tensor:
    packed_tensors = {name: ones(6, heads, 4) for name, heads in HEADS_OF_LOSS.items()}
    return loss(**packed_tensors, block_indices=torch.zeros(2, 6, 1).int(), cu_seqlens=bounds(0, 6), **changed)


def sharded_alone(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """A call without half of a projection's heads, of which the layer does not know."""
    whole = layer.get_submodule(name)
    layer.set_submodule(name, torch.nn.Linear(32, whole.out_features // 2))  # type: ignore[operator]
    return layer(NEXT)


def from_fla(rope: Any = 10000.0, **changed: torch.Tensor) -> Any:
    return layer_from_fla(STATE | {name.replace("__", "."): x for name, x in changed.items()}, rope=rope)


# Short names, which type checkers let be called wrongly
attention: Any = NSAttention
window: Any = NeighborhoodAttention
layer: Any = NeighborhoodAttentionLayer
mix: Any = AttentionResidual
angles: Any = rotary_table
padding: Any = Unpadding.from_mask
pool: Any = LinearCompression
POOLED = {"compress": LinearCompression(2, 4, 6), "compress_block_size": 4, "compress_stride": 2}
OWN_POOL = NSAConfig(compress=torch.nn.Identity())
PRESETS: tuple[Any, ...] = NSAConfig.paper, NSAConfig.per_tile
HIDDEN = "^hidden_states must "
ODD_HEADS = {"g_proj__weight": ones(47, 32)}, {"o_proj__weight": ones(32, 99)}, {"v_proj__weight": ones(17, 32)}
HEADS_OF_FLA = "three gates a head and heads of one size"
WRONG_VALUES: list[tuple[Callable[[], Any], str]] = [
    (lambda: mixed(BLOCKS[0, 0, 0]), r"must have the layout \[L,...,D\] or be a list, got shape \[8\]"),
    (lambda: mixed([]), "blocks must have at least one member, got an empty list"),
    (lambda: mixed([BLOCKS[0, 0, 0, 0]]), r"blocks\[0\] must have the layout \[...,D\], got shape \[\]"),
    (lambda: mixed([BLOCKS[0], BLOCKS[0, :, :4]]), r"have blocks\[0\]'s shape \[2, 5, 8\], got \[2, 4, 8\]"),
    (lambda: mixed([BLOCKS[0], BLOCKS[0].half()]), r"blocks\[1\] must be float32 as blocks\[0\], got float16"),
    (lambda: mixed([BLOCKS[0], ones(5, 2, 8).transpose(0, 1)]), r"strides \(40, 8, 1\), got \(8, 16, 1\)"),
    (lambda: mixed([BLOCKS[0], BLOCKS[0].to("meta")]), r"must be on blocks\[0\]'s device cpu, got meta"),
    (lambda: mixed(BLOCKS[:0]), r"at least one block and D >= 1, got shape \[0, 2, 5, 8\]"),
    (lambda: mix(7)([BLOCKS[0]]), r"^blocks\[0\] must have hidden_size=7, .* got shape \[2, 5, 8\]"),
    (lambda: mix(8)(BLOCKS.to("meta")), "^blocks must be on cpu, as the weights are, got meta"),
    (lambda: sparse(block_indices=bounds(0)), r"\[B,H_kv,N_q,k\] = \[1, 2, 150, k\], got"),
    (lambda: sparse(block_size=0), "block_size must be at least 1, got 0"),
    (lambda: sparse(softmax_scale=0), "softmax_scale must be finite and greater than 0, got 0"),
    (lambda: sparse(q_start=1), "q_start must be from 0 to N_k - N_q = 150 - 150 = 0, got 1"),
    (lambda: sparse(q=ones(3, 4)), r"q must have the layout \[B,N,heads,D\]"),
    (lambda: sparse(causal=False, q_start=0), "goes with causal=True, got causal=False"),
    (lambda: top(k=0), "k must be at least 1, got 0"),
    (lambda: top(local=3), "local must be at most 2, got 3"),
    (lambda: top(k_idx=ones(1, 60, 3, 4)), "k_idx must have one head or H_i=2, and D_i=4, got"),
    (lambda: top(q_idx=ones(60, 2, 4)), r"q_idx must have the layout \[B,N,heads,D_i\]"),
    (lambda: top(k_idx=ones(1, 59, 1, 4)), "at least N_q=60 tokens, got"),
    (lambda: top(q_idx=ones(10, 2, 4), k_idx=ones(12, 1, 4), cu_seqlens=bounds(0, 10)), "or cu_seqlens_k bounds of"),
    (lambda: top(q_start=1), "q_start must be from 0 to N_k - N_q = 60 - 60 = 0, got 1"),
    (lambda: loss(q_idx=ones(1, 6, 1, 4)), "q_idx must have a head for each of k's 2, got shape"),
    (lambda: loss(k_idx=ones(1, 12, 1, 4)), "k_idx must have k's tokens"),
    (lambda: loss(index_scale=-1), "index_scale must be finite and greater than 0, got -1"),
    (lambda: packed_loss(q_start=bounds(0)), "q_start must be None with cu_seqlens"),
    (lambda: angles(bounds(0), 7), "head_dim must be even, got 7"),
    (lambda: angles(bounds(0), 8, theta=math.inf), "theta must be finite and greater than 0, got inf"),
    (lambda: padding(bounds(1)), r"mask must have the shape \[B,N\], got \[1\]"),
    *((lambda x=x: ROWS.unpad(x), r"\[B,N,...\] = \[2,6,...\], got") for x in (ones(3, 6, 4), ones(2, 5, 4), ones(12))),
    *((lambda x=x: ROWS.pad(x), r"\[T,...\] = \[12,...\], got") for x in (ones(11, 4), ones())),
    (lambda: pool(2, 0, 8), "block_size must be at least 1, got 0"),
    (lambda: nsa(*[ones(1, 8, 1, 32)] * 3, **POOLED), r"which expects blocks .* = \[...,2,4,6\]"),
    (lambda: from_fla(q_proj__bias=ones(256)), r"three biases or none, got .*'q_proj.bias'"),
    (lambda: from_fla(rotary__inv_freq=ones(8), rope=500.0), r"rotary.inv_freq = \[1.0, .*, got 500.0"),
    (lambda: from_fla(rope=-1), "greater than 0 as fla's rope_theta, got -1"),
    *((lambda x=x: from_fla(**x), HEADS_OF_FLA) for x in ODD_HEADS),
    (lambda: fla_config(block_counts=2), "must fit in num_selected_blocks=2"),
    (lambda: attention(32, 4, 3), "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    (lambda: attention(32, 3), "head_dim must be given: hidden_size=32"),
    (lambda: attention(32, 4, v_head_dim=0), "v_head_dim must be at least 1, got 0"),
    (lambda: attention(32, 4, gate="k"), "gate must be 'x', 'q' or None, got 'k'"),
    (lambda: attention(32, 4, compress="mlp"), "compress must be 'linear' or None, got 'mlp'"),
    (lambda: attention(32, 4, compress="linear", compress_proj=True), "leaves nothing to compress_proj"),
    (lambda: attention(32, 4, compress="linear", config=OWN_POOL), "leaves nothing to a config that compresses"),
    (lambda: attention(32, 4, backend="cudnn")(NEXT), "backend must be one of cute, triton, reference for nsa, got"),
    (lambda: window(32, 4, dropout=1.5), "dropout must be from 0 to 1, got 1.5"),
    (lambda: sharded_alone(window(32, 4), "k_proj"), "k_proj must give 4 heads of 8, 32 in all, got 16: with tensor"),
    (lambda: sharded_alone(attention(32, 4, separate_kv=True), "branch_proj.v_win"), "v_win must give 4 heads of 8"),
    (lambda: sharded_alone(attention(32, 4), "gate_proj"), "gate_proj must give 4 heads of 3, 12 in all, got 6"),
    (lambda: layer(32, 4, kernel_size=0), "kernel_size must be at least 1, got 0"),
    (lambda: layer(32, 4, norm_eps=math.nan), "norm_eps must be finite and at least 0, got nan"),
    (
        lambda: attention(32, 4, rope=lambda x, _: x[..., :4])(NEXT),
        r"keep the shape \[1, 8, 4, 8\], got \[1, 8, 4, 4\]",
    ),
    (lambda: attention(32, 4)(ones(8, 32)), HIDDEN + r"have the layout \[B,N,hidden_size\] .*\[8, 32\]"),
    (lambda: attention(32, 4).forward_aux(ones(8, 32)), HIDDEN + r"have the layout \[B,N,hidden_size\] .*\[8, 32\]"),
    (
        lambda: attention(32, 4)(NEXT, cu_seqlens=bounds(0, 8)),
        HIDDEN + r"have the layout \[T,hidden_size\] .*\[1, 8, 32\]",
    ),
    *((lambda make=make: make(32, 4)(ones(1, 8, 16)), HIDDEN + "have hidden_size=32, got") for make in LAYERS.values()),
    *((lambda make=make: make(32, 4)(NEXT.to("meta")), HIDDEN + "be on cpu, .*, got meta") for make in LAYERS.values()),
]
WRONG_TYPES: list[tuple[Callable[[], Any], str]] = [
    (lambda: mixed(BLOCKS.half(), ones(8, dtype=DOUBLE)), r"w_norm must be float16 or float32 .*, got float64"),
    (lambda: mix(8, dtype=DOUBLE)([BLOCKS[0]]), r"^blocks\[0\] must be float64, as the weights are, got float32"),
    (lambda: sparse(block_indices=ones(1)), "block_indices must be int32 or int64, got float32"),
    (lambda: sparse(block_indices=[0]), "block_indices must be a torch.Tensor, got list"),
    (lambda: sparse(causal=1), "causal must be True or False, got 1"),
    (lambda: sparse(debug=None), "debug must be True or False, got None"),
    (lambda: top(block_size=16.0), "block_size must be an integer, got 16.0"),
    (lambda: top(k_idx=ones(1, 60, 1, 4, dtype=DOUBLE)), r"k_idx must be float32 .*, got float64"),
    (lambda: angles(4, 8), "positions must be a torch.Tensor, got int"),
    (lambda: angles(bounds(0), 8.0), "head_dim must be an integer, got 8.0"),
    (lambda: padding([[True]]), "mask must be a torch.Tensor, got list"),
    (lambda: padding(ones(2, 6)), r"mask must be bool or integers, .*, got torch.float32"),
    (lambda: pool(2, 4, 8.0), "head_dim must be an integer, got 8.0"),
    (lambda: from_fla(rope=True), r"rope must be a callable .* or None, got True"),
    (lambda: fla_config(block_counts=BLOCKS), "block_counts must be an integer"),  # type: ignore[arg-type]
    (lambda: attention(32.0, 4), "hidden_size must be an integer, got 32.0"),
    (lambda: attention(32, 4, config={}), "config must be an NSAConfig or None, got dict"),
    (lambda: attention(32, 4, rope="llama"), "rope must be a callable"),
    (lambda: window(32, 4, kernel_size=3.0), "kernel_size must be an integer, got 3.0"),
    (lambda: window(32, 4, dropout=""), "dropout must be a number, got ''"),
    (lambda: layer(32, 4, kernel=3), "unexpected keyword argument 'kernel'"),
    (lambda: layer(32, 4, norm_eps=True), "norm_eps must be a number, got True"),
    (lambda: layer(32, 4)(NEXT, NEXT), "this layer was built without a rope hook"),
    (lambda: attention(32, 4, rope=lambda x, _: x.double())(NEXT), "rope must keep the dtype torch.float32 of queries"),
    (lambda: window(32, 4, rope=lambda x, _: (x, x))(NEXT), "rope must return a torch.Tensor, got tuple"),
    *((lambda make=make: make(32, 4)(None), HIDDEN + "be a torch.Tensor, got NoneType") for make in LAYERS.values()),
    *((lambda make=make: make(32, 4)(NEXT.double()), HIDDEN + "be float32, .*, got") for make in LAYERS.values()),
    *((lambda make=make: make(windowsize=3), "windowsize: did you mean window_size") for make in PRESETS),
]
CALLS = [*((*row, ValueError) for row in WRONG_VALUES), *((*row, TypeError) for row in WRONG_TYPES)]


@pytest.mark.parametrize(("call", "message", "error"), CALLS, ids=[message for _, message, _ in CALLS])
def test_bad_arguments_are_named(call: Callable[[], Any], message: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("kind", LAYERS)
def test_modules_under_autocast_take_what_it_casts(kind: str) -> None:
    layer = LAYERS[kind](32, 4)
    x = torch.randn(1, 8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert layer(x.to(dtype)).dtype == torch.bfloat16
        with pytest.raises(TypeError, match="hidden_states must be bfloat16 or float16 or float32 under autocast, got"):
            layer(x.double())
        with pytest.raises(TypeError, match="hidden_states must be float64 under autocast, got float32"):
            LAYERS[kind](32, 4, dtype=DOUBLE)(x)


@pytest.mark.parametrize(("kind", "how"), product(LAYERS, ["another module", "a hook", "a forward of its own"]))
def test_modules_leave_dtypes_to_projections_that_cast(kind: str, how: str) -> None:
    """As adapters, quantized weights and offloading do."""

    class Casting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    layer = LAYERS[kind](32, 4)
    for name, project in [*layer.named_children()]:
        if not isinstance(project, torch.nn.Linear):
            continue
        if how == "another module":
            casting = Casting(project.in_features, project.out_features, bias=project.bias is not None)
            casting.load_state_dict(project.state_dict())
            setattr(layer, name, casting)
        elif how == "a hook":
            project.register_forward_pre_hook(lambda _, given: (given[0].float(),))
        else:
            project.forward = lambda x, run=project.forward: run(x.float())
    x = torch.randn(1, 8, 32)
    assert torch.equal(layer(x.double()), layer(x.double().float()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
def test_a_misspelt_option_is_named_by_dynamo() -> None:
    """Dynamo of torch 2.6 leaves the message out of its own error: there the call that is not compiled has it."""
    q, whole = torch.randn(1, 20, 2, 8), not torch.__version__.startswith("2.6.")
    with pytest.raises(torch._dynamo.exc.Unsupported if whole else TypeError, match="unknown keyword argument windows"):
        torch.compile(lambda q: nsa(q, q, q, windowsize=3), fullgraph=whole, backend="eager")(q)


def called(function: Any, **keywords: Any) -> Any:
    """Call a public function on a few tokens, with further keywords."""
    q = ones(1, 6, 2, D)
    given: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
        block_sparse_attention: ((q, q, q, torch.zeros(1, 2, 6, 1, dtype=torch.int32)), {"block_size": 4}),
        nsa_with_cache: ((q, q, q, NSACache.empty(NSAConfig.paper(), 1, 64, heads_kv=2, dim=D)), {}),
    }
    arguments, options = given.get(function, ((q, q, q), {}))
    return function(*arguments, **options, **keywords)


INSTEAD = {
    "attn_mask": "there is no attention mask, ",
    "key_padding_mask": "there is no attention mask, ",
    "dropout_p": "there is no dropout",
    "scale": "the factor of the logits is the option softmax_scale",
    "enable_gqa": "H may be any multiple of H_kv",
    "is_causal": "the option is causal",
    "need_weights": "there are no attention weights",
}
MASKLESS = {
    nsa: "pack documents with cu_seqlens",
    nsa_forward: "pack documents with cu_seqlens",
    nsa_forward_aux: "pack documents with cu_seqlens",
    block_sparse_attention: "pack documents with cu_seqlens",
    nsa_with_cache: "counts says how many tokens of each sequence are real",
    dispatch.neighborhood_attention: "attend to each document in a separate call",
    dispatch.neighborhood_attention_forward: "attend to each document in a separate call",
}


@pytest.mark.parametrize("function", MASKLESS, ids=lambda f: f.__name__)
def test_keywords_of_other_attention_functions_say_what_to_do_instead(function: Any) -> None:
    called(function)
    for name, reason in INSTEAD.items():
        with pytest.raises(TypeError, match=f"^unknown keyword argument {name}: {reason}") as caught:
            called(function, **{name: None})
        assert (MASKLESS[function] in str(caught.value)) == ("mask" in name)
    with pytest.raises(TypeError, match=r"did you mean backend\?"):
        called(function, bakend=None)


@pytest.mark.parametrize("function", [nsa, nsa_forward_aux, block_sparse_attention, dispatch.neighborhood_attention])
def test_heads_before_tokens_are_noticed(function: Any) -> None:
    """The layout of scaled_dot_product_attention, [B,H,N,D]."""
    q = ones(1, 4, 300, D)
    indices = torch.zeros(1, 300, 4, 1, dtype=torch.int32)
    more: dict[str, Any] = {"block_indices": indices, "block_size": 4} if function is block_sparse_attention else {}
    with pytest.warns(UserWarning, match=r"\[1, 4, 300, 8\] are read as 4 tokens of 300 heads: .* \[B,N,heads,D\]"):
        function(q, q, q, **more)


@pytest.mark.parametrize("shape", [(1, 1, 128, D), (2, 100, 300, D)], ids=str)
def test_few_tokens_or_many_heads_alone_are_not_warned_of(shape: tuple[int, ...]) -> None:
    nsa(ones(*shape), ones(*shape), ones(*shape))
    dispatch.neighborhood_attention(ones(*shape), ones(*shape), ones(*shape))

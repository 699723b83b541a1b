"""What a rank does in tests of context parallelism; run by tests/support/ranks.py.

Cases whose ranks have a GPU each (NCCL) compute there: those in fp64 by the reference, which `by_reference` names.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import dispatch
from bench.bench_context_parallel import difference
from dispatch.registry import ENVIRONMENT_VARIABLE
from nsa import LinearCompression, NeighborhoodAttention, NSAConfig, NSAttention, neighborhood_attention, nsa
from nsa.common.resolve import find_impl
from nsa.distributed import ContextParallel
from nsa.distributed.attention import WEIGHT_NAMES
from tests.support.helpers import SMALL, make_qkv

MakeCP = Callable[..., ContextParallel]

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 4

OPTIONS = ("plain", "gates", "own keys", "projections", "learned")
"""What a call has beside q, k, v."""


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Of a rank's tensors: its GPU if the group is NCCL's, else the CPU."""
    with_gpu = "nccl" in dist.get_backend_config(group)
    return torch.device("cuda", torch.cuda.current_device()) if with_gpu else torch.device("cpu")


def by_reference(make: MakeCP, case: Callable[..., Any], *arguments: Any) -> Any:
    """A case whose calls name no backend, by the reference, which a GPU takes only where it is named."""
    with mock.patch.dict(os.environ, {ENVIRONMENT_VARIABLE: "reference"}):
        return case(make, *arguments)


def make_tensors(
    device: torch.device, tokens: int, dtype: torch.dtype, option: str, *, batch: int | None, seed: int = 0
) -> dict[str, Tensor]:
    """Leaves of a call of the whole sequence, or of a pack (batch None)."""
    generator = torch.Generator().manual_seed(seed)
    lead = (tokens,) if batch is None else (batch, tokens)

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, kind).requires_grad_()

    heads = {"q": (HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, V_DIM)}
    if option == "own keys":
        heads |= {"k_slc": (KV_HEADS, DIM), "v_slc": (KV_HEADS, V_DIM)}
        heads |= {"k_win": (KV_HEADS, DIM), "v_win": (KV_HEADS, V_DIM)}
    tensors = {name: normal(*lead, *sizes) for name, sizes in heads.items()}
    if option == "gates":
        tensors["gates"] = normal(*lead, HEADS, 3)
    if option in ("plain", "own keys"):
        tensors["gate_proj_weight"] = normal(HEADS, 3, DIM)
    if option in ("projections", "learned"):
        tensors["w_k_compress"] = normal(KV_HEADS, DIM, DIM)
        tensors["w_v_compress"] = normal(KV_HEADS, V_DIM, V_DIM)
    return tensors


def learned(config: NSAConfig, device: torch.device, dtype: torch.dtype) -> NSAConfig:
    """The config with learned compression, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    pools = []
    for dim in (DIM, V_DIM):
        pool = LinearCompression(KV_HEADS, config.compress_block_size, dim, dtype=dtype)
        with torch.no_grad():
            for parameter in pool.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) / 8)
        pools.append(pool.to(device))
    return replace(config, compress=(pools[0], pools[1]))


def results(
    run: Callable[..., Tensor], tensors: Mapping[str, Tensor], config: NSAConfig, do: Tensor, **keywords: Any
) -> dict[str, Tensor]:
    """out and all gradients."""
    named = dict(tensors)
    if isinstance(config.compress, tuple):
        for which, pool in zip("kv", config.compress, strict=True):
            named |= {f"compress.{which}.{name}": parameter for name, parameter in pool.named_parameters()}
    out = run(**tensors, config=config, **keywords)
    found = torch.autograd.grad(out, list(named.values()), do, allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for g, x in zip(found, named.values(), strict=True))
    return {"out": out.detach(), **dict(zip(named, zeros, strict=True))}


def divided(
    cp: ContextParallel, tensors: Mapping[str, Tensor], config: NSAConfig, do: Tensor, **keywords: Any
) -> dict[str, Tensor]:
    """The same by all ranks: rows put together, shares of what all ranks have whole added up."""
    cu_seqlens = keywords.get("cu_seqlens")
    dim = 1 if cu_seqlens is None else 0
    shard = partial(cp.shard, dim=dim, cu_seqlens=cu_seqlens)
    own = {n: x if n in WEIGHT_NAMES else shard(x.detach()).requires_grad_() for n, x in tensors.items()}
    found = results(cp.nsa, own, config, shard(do), **keywords)
    whole = {}
    for name, x in found.items():
        if name in WEIGHT_NAMES or name.startswith("compress"):
            whole[name] = cp.sum(x)
        else:
            whole[name] = cp.unshard(x, dim=dim, cu_seqlens=cu_seqlens)
    return whole


def equals_whole(
    make: MakeCP, config: NSAConfig, lengths: Sequence[int], options: Sequence[str], layout: str, tile: int = 16
) -> None:
    """fp64: sequences of some lengths, divided, have the rows and gradients of one process."""
    cp = make(layout=layout, tile=tile, kv_heads_per_pass=1)
    device = device_of(cp.group)
    for tokens in lengths:
        for option in options:
            own = learned(config, device, torch.float64) if option == "learned" else config
            tensors = make_tensors(device, tokens, torch.float64, option, batch=2 if option == "plain" else 1)
            do = make_do(tensors)
            got = divided(cp, tensors, own, do)
            if cp.rank == 0:
                assert_same(got, results(nsa, tensors, own, do), f"{tokens} tokens, {option}")
            with torch.no_grad():
                own_tensors = {n: x if n in WEIGHT_NAMES else cp.shard(x) for n, x in tensors.items()}
                out = cp.unshard(cp.nsa(**own_tensors, config=own))
            torch.testing.assert_close(out, got["out"], rtol=1e-9, atol=1e-10)


def packs_equal_whole(
    make: MakeCP, config: NSAConfig, lengths: Sequence[int], behind: int, options: Sequence[str], layout: str
) -> None:
    """fp64: packed documents, some of which cross ranks, and rows behind the last one."""
    cp = make(layout=layout, tile=16)
    device = device_of(cp.group)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    for option in options:
        own = learned(config, device, torch.float64) if option == "learned" else config
        tensors = make_tensors(device, sum(lengths) + behind, torch.float64, option, batch=None)
        do = make_do(tensors)
        got = divided(cp, tensors, own, do, cu_seqlens=cu_seqlens)
        if cp.rank == 0:
            assert_same(got, results(nsa, tensors, own, do, cu_seqlens=cu_seqlens), f"{lengths}, {option}")


def divides_along_tokens(make: MakeCP, packed: bool) -> None:
    """Without a dim given: `[B,N,...]`, packed `[T,...]`, of 12 tokens each, of which this rank has 6."""
    cp = make(layout="contiguous", tile=1)
    own = slice(6 * cp.rank, 6 * cp.rank + 6)
    bounds = {"cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32)} if packed else {}
    for lead in ((12,), (12, 3), (12, 12)) if packed else ((3, 12), (12, 12), (3, 12, 2)):
        x = torch.arange(math.prod(lead)).view(lead)
        part = cp.shard(x, **bounds)
        assert torch.equal(part, x[own] if packed else x[:, own])
        assert torch.equal(cp.unshard(part, **bounds), x)


def make_do(tensors: Mapping[str, Tensor]) -> Tensor:
    q = tensors["q"]
    do = torch.randn(*q.shape[:-1], V_DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return do.to(q.device, q.dtype)


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor], what: str) -> None:
    """To 1e-10: sums of some hundred fp64 terms of order 1 differ by 1e-13, through a softmax by some more."""
    for name, expected in want.items():
        torch.testing.assert_close(
            got[name], expected, rtol=1e-9, atol=1e-10, msg=lambda found, name=name: f"{what}: {name}: {found}"
        )


def rounds_once(make: MakeCP, config: NSAConfig, tokens: int) -> None:
    """bf16: gradients are those of one process but for the order of sums in fp32, and the same in every run.

    Sums of n fp32 terms differ by about sqrt(n) * 2^-24 of them, 2^-20 here, so one in 2^-20 / 2^-9 results, 0.05 %,
    falls on the other side when rounded to bf16; results that nearly cancel more often. If every range were rounded by
    itself, a third would. Weights are left out: each rank rounds its share, which the data-parallel reduction adds up.
    """
    cp = make(tile=16, kv_heads_per_pass=1)
    tensors = make_tensors(device_of(cp.group), tokens, torch.bfloat16, "plain", batch=1)
    do = make_do(tensors)
    got, again = (divided(cp, tensors, config, do) for _ in range(2))
    if cp.rank > 0:
        return
    for name, want in results(nsa, tensors, config, do).items():
        assert torch.equal(got[name], again[name]), f"{name} differs from run to run"
        if name in WEIGHT_NAMES:
            continue
        low, high = torch.nextafter(want, want - 1), torch.nextafter(want, want + 1)
        near_zero = want.float().abs() < 2**-12
        assert (((got[name] >= low) & (got[name] <= high)) | near_zero).all(), (
            f"{name} is off by more than one rounding"
        )
        assert (got[name] != want).float().mean() < 0.01, f"{name} is rounded more than once"


# Layers and models


def neighborhood_equals_whole(make: MakeCP, lengths: Sequence[int], layout: str) -> None:
    cp = make(layout=layout, tile=1)
    shape: dict[str, Any] = {"dim": DIM, "batch": 2, "device": str(device_of(cp.group))}
    for tokens in lengths:
        for kernel_size, dilation, boundary, causal in (
            (5, 1, "truncate", False), (4, 3, "truncate", False), (5, 2, "shift", False), (4, 1, "shift", False),
            (6, 2, "truncate", True), (200, 1, "truncate", True),
        ):  # fmt: skip
            options = {"kernel_size": kernel_size, "dilation": dilation, "boundary": boundary, "causal": causal}
            got, want = neighborhood_results(cp, options, tokens, **shape)
            assert_same(got, want, f"{tokens} tokens, {options}")


def neighborhood_results(
    cp: ContextParallel, options: dict[str, Any], tokens: int, **shape: Any
) -> list[dict[str, Tensor]]:
    """out and all gradients, divided and of one process. Args: shape: of `make_qkv`."""
    whole = make_qkv(tokens, **shape, requires_grad=True)
    own = [cp.shard(x.detach()).requires_grad_() for x in whole]
    do, *_ = make_qkv(tokens, **shape, seed=9)
    out, expected = cp.neighborhood_attention(*own, **options), neighborhood_attention(*whole, **options)
    got = map(cp.unshard, [out, *torch.autograd.grad(out, own, cp.shard(do))])
    want = [expected, *torch.autograd.grad(expected, whole, do)]
    return [dict(zip(("out", "dq", "dk", "dv"), found, strict=True)) for found in (got, want)]


class Model(nn.Module):
    """A language model of one layer of each kind, with rotary embeddings by position."""

    def __init__(self, cp: ContextParallel, config: NSAConfig) -> None:
        super().__init__()
        shared: dict[str, Any] = {"rope": rotate, "context_parallel": cp}
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(
            [
                NSAttention(32, 4, 2, config=config, compress="linear", separate_kv=True, **shared),
                NeighborhoodAttention(32, 4, 2, kernel_size=7, causal=True, **shared),
                NSAttention(32, 4, 2, config=config, gate="q", compress_proj=True, **shared),
            ]
        )
        self.head = nn.Linear(32, 50)
        self.checkpointing = False

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            if self.checkpointing:
                x = x + checkpoint(layer, x, positions, use_reentrant=False)
            else:
                x = x + layer(x, positions)
        return self.head(x)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embeddings of `[B,N,heads,D]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / 10 ** (torch.arange(half, device=x.device) / half)
    a, b = x.split(half, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def model_and_whole(cp: ContextParallel, config: NSAConfig, dtype: torch.dtype = torch.float64) -> tuple[Model, Model]:
    """A divided model, and one with the same weights of one process."""
    torch.manual_seed(3)
    model = Model(cp, config).to(device_of(cp.group), dtype)
    whole = copy.deepcopy(model)
    for layer in whole.layers:
        layer.context_parallel = None
    return model, whole


def model_equals_whole(make: MakeCP, config: NSAConfig, tokens: int, how: str) -> None:
    """Losses and gradients of a model. `how`: plain, checkpointing, autocast, or a backend of torch.compile."""
    cp = make(tile=16)
    device = device_of(cp.group)
    model, whole = model_and_whole(cp, config, torch.float32 if how == "autocast" else torch.float64)
    assert model.layers[0].context_parallel is cp
    model.checkpointing = how == "checkpointing"
    run = torch.compile(model, backend=how) if how in ("eager", "aot_eager") else model
    ids = torch.randint(50, (2, tokens), generator=torch.Generator().manual_seed(4)).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=how == "autocast"):
        logits = run(cp.shard(ids), cp.positions(tokens, device=device))
        share = cp.cross_entropy(logits, cp.shard_labels(ids))
        expected = nn.functional.cross_entropy(
            whole(ids, torch.arange(tokens, device=device))[:, :-1].flatten(0, 1).to(share.dtype), ids[:, 1:].flatten()
        )
    got = {"loss": cp.sum(share)}
    share.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        got[name] = cp.sum(parameter.grad)
    want = {"loss": expected.detach(), **{name: parameter.grad for name, parameter in whole.named_parameters()}}
    for name, x in want.items():
        if name.endswith("compress.k.position") and how == "autocast":
            continue  # adds the same to all compressed keys, which no softmax sees: its gradient is rounding alone
        # Under autocast rounded products differ between shapes: each result is near, in terms of the largest
        close = (
            {"rtol": 0.0, "atol": 0.05 * float(x.abs().max())} if how == "autocast" else {"rtol": 1e-8, "atol": 1e-10}
        )
        torch.testing.assert_close(got[name], x, **close, msg=lambda found, name=name: f"{how}: {name}: {found}")


def fsdp_equals_whole(_: MakeCP, config: NSAConfig, tokens: int) -> None:
    """A sequence for each two ranks; parameters sharded over all."""
    device, sequences = device_of(), dist.get_world_size() // 2
    mesh = init_device_mesh(device.type, (sequences, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], tile=16)
    model, whole = model_and_whole(cp, config)
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    for layer in model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    ids = torch.randint(50, (sequences, tokens), generator=torch.Generator().manual_seed(4)).to(device)
    own = ids[mesh.get_local_rank("dp")][None]
    logits = model(cp.shard(own), cp.positions(tokens, device=device))
    # FSDP averages over all ranks, of which two hold one sequence
    (cp.cross_entropy(logits, cp.shard_labels(own)) * cp.size).backward()
    whole_logits = whole(ids, torch.arange(tokens, device=device))[:, :-1]
    nn.functional.cross_entropy(whole_logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    want = {name: parameter.grad for name, parameter in whole.named_parameters()}
    got = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    assert_same(got, want, "FSDP")


def takes_dtensors(make: MakeCP, config: NSAConfig, over_heads: bool = False) -> None:
    """Args: over_heads: of all ranks two divide the sequence, and the others its heads, as tensor parallelism does."""
    device = device_of()
    placements: list[Shard] = [Shard(1)]
    if over_heads:
        mesh = init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("cp", "tp"))
        cp = ContextParallel(mesh["cp"], layout="contiguous", tile=16)
        placements.append(Shard(2))
    else:
        cp = make(layout="contiguous", tile=16)
        mesh = DeviceMesh.from_group(cp.group, device.type)
    q, k, v = make_qkv(16 * 2 * cp.size, device=str(device))
    placed = [distribute_tensor(x, mesh, placements).requires_grad_() for x in (q, k, v)]
    out = cp.nsa(*placed, config=config)
    assert isinstance(out, DTensor)
    assert out.placements == tuple(placements)
    torch.testing.assert_close(out.full_tensor(), nsa(q, k, v, config=config), rtol=1e-9, atol=1e-10)
    (dk,) = torch.autograd.grad(out.to_local().sum(), placed[1])
    leaf = k.clone().requires_grad_()
    (want,) = torch.autograd.grad(nsa(q, leaf, v, config=config).sum(), leaf)
    torch.testing.assert_close(dk.full_tensor(), want, rtol=1e-9, atol=1e-10)


# Refusals


Change = Callable[[dict[str, Any]], dict[str, Any]]
WRONG_CALLS: dict[str, tuple[Change, str, list[str]]] = {
    "tensors": (
        lambda own: {name: own[name].float() for name in "kv"} | {"q": own["q"][:, :, :2].float().requires_grad_()},
        "ValueError",
        ["q must be", "float32 [1, n, 2, 16] on {device} with a gradient on rank 1", "float64", "rank 0"],
    ),
    "gates": (
        lambda own: {"gates": own["q"].new_ones(*own["q"].shape[:-1], 3)},
        "ValueError",
        ["gates must be", "on rank 1", "None on rank 0"],
    ),
    "window_size": (
        lambda own: {"config": replace(own["config"], window_size=13)},
        "ValueError",
        ["window_size must be", "13 on rank 1 and 12 on rank 0"],
    ),
    "layout": (lambda _: {}, "ValueError", ["layout must be", "contiguous on rank 1 and zigzag on rank 0"]),
    "another op": (lambda _: {}, "RuntimeError", ["ContextParallel.sum, call", "on rank 1"]),
    "dtype of k": (lambda own: {"k": own["k"].float()}, "TypeError", ["k must be float64 (q is float64), got float32"]),
    "causal": (lambda own: {"config": replace(own["config"], causal=False)}, "ValueError", ["causal must be True"]),
    "q_tile_size": (
        lambda own: {"config": replace(own["config"], q_tile_size=32)},
        "ValueError",
        ["q_tile_size must divide tile=16", "got q_tile_size=32"],
    ),
    "q_start": (lambda _: {"q_start": 0}, "ValueError", ["q_start is not supported by ContextParallel.nsa"]),
    "NaN": (lambda own: {"v": own["v"] + math.nan}, "ValueError", ["v must be finite"]),
    "no tensor": (lambda _: {"q": None}, "TypeError", ["q must be a torch.Tensor, got NoneType"]),
    "misspelled": (lambda _: {"windowsize": 3}, "TypeError", ["did you mean window_size"]),
    "backend": (lambda _: {"backend": "cute"}, "ValueError", ["backend must be", "cute on rank 1 and any on rank 0"]),
    "rows": (
        lambda own: {name: own[name][:, :-1] for name in "qkv"},
        "ValueError",
        ["q must hold [", "tokens on ranks 0 to 2", "of 99", "got [36, 31, 32]"],
    ),
}
"""Arguments that `call_with` changes, and the error of all ranks if rank 1 does: its type and parts of its message."""

DIFFERENCES = {name: (error, words) for name, (_, error, words) in WRONG_CALLS.items() if name != "rows"}
"""Errors that any number of ranks raises."""


def call_with(make: MakeCP, change: str, wrong: int) -> None:
    """A call that is wrong on one rank, or on all (-1)."""
    here = wrong in (-1, dist.get_rank())
    cp = make(tile=16, layout="contiguous" if change == "layout" and here else "zigzag")
    whole = make_qkv(100, device=str(device_of(cp.group)))
    own: dict[str, Any] = {name: cp.shard(x) for name, x in zip("qkv", whole, strict=True)}
    own["config"] = replace(SMALL["seed"], debug=change == "NaN")
    if here:
        own |= WRONG_CALLS[change][0](own)
    if change == "another op" and here:
        cp.sum(own["q"].sum())
    cp.nsa(**own)


def weights_have_gradients_without_entries(make: MakeCP, how: dict[str, Any], tokens: int, tile: int) -> None:
    """On a rank that has no entries, or no tokens; of those data parallelism waits for a gradient, too."""
    torch.manual_seed(0)
    cp = make(tile=tile, layout="contiguous")
    layer = NSAttention(32, 4, 2, context_parallel=cp, config=NSAConfig.paper(), **how)
    layer(cp.shard(torch.randn(1, tokens, 32))).sum().backward()
    assert [name for name, weight in layer.named_parameters() if weight.grad is None] == []


def compresses_wrongly(make: MakeCP, kind: str) -> None:
    """Of three ranks the first ones have no entries of 40 tokens."""
    cp = make(layout="contiguous", tile=16)
    q, k, v = map(cp.shard, make_qkv(40, KV_HEADS, KV_HEADS, device=str(device_of(cp.group))))
    pools = {"shape": lambda blocks: blocks, "sizes": LinearCompression(KV_HEADS, 32, k.shape[-1] + 1)}
    cp.nsa(q, k, v, config=NSAConfig.paper(compress=pools[kind]))


def learns_as_alone(make: MakeCP, layout: str) -> None:
    """out needs a gradient where that of one process does, whatever function compresses; gradients are shares of it."""
    cp = make(layout=layout, tile=16)
    device = device_of(cp.group)
    weight = torch.linspace(0, 1, 32, dtype=torch.float64, device=device)[:, None].requires_grad_()

    def plain(blocks: Tensor) -> Tensor:
        return blocks.amax(-2)

    def learning(blocks: Tensor) -> Tensor:
        return (blocks * weight).sum(-2)

    def detached(blocks: Tensor) -> Tensor:
        return blocks.detach().amax(-2)

    def learning_alone(blocks: Tensor) -> Tensor:
        return (blocks.detach() * weight).sum(-2)

    for tokens in (20, 131):
        for compress in (plain, learning, detached, learning_alone):
            for learns in ("", "k", "qkv"):
                whole = make_qkv(tokens, KV_HEADS, KV_HEADS, device=str(device))
                tensors = {name: x.requires_grad_(name in learns) for name, x in zip("qkv", whole, strict=True)}
                config = NSAConfig.paper(compress=compress)
                want = nsa(**tensors, config=config)
                got = cp.nsa(**{name: cp.shard(x) for name, x in tensors.items()}, config=config)
                what = f"{tokens} tokens, {compress.__name__}, {learns}"
                assert got.requires_grad == want.requires_grad, what
                if want.requires_grad:
                    leaves = {n: x for n, x in {**tensors, "weight": weight}.items() if x.requires_grad}
                    expected, found = gradients_of(want, leaves), gradients_of(got, leaves)
                    assert_same({name: cp.sum(x) for name, x in found.items()}, expected, what)


def gradients_of(out: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By a whole backward, as ranks take it together: `torch.autograd.grad` passes by what its tensors do not need."""
    for x in leaves.values():
        x.grad = torch.zeros_like(x)
    out.sum().backward()
    return {name: x.grad for name, x in leaves.items()}


Loss = Callable[[Tensor, Tensor], tuple[Any, Any, int]]
WRONG_LOSSES: dict[str, tuple[Loss, str, list[str]]] = {
    "value": (
        lambda logits, labels: (logits, torch.full_like(labels, 7), -100),
        "ValueError",
        ["labels must be from 0 to 6, or ignore_index=-100, got 7"],
    ),
    "dtype": (
        lambda logits, labels: (logits, labels.double(), -100),
        "TypeError",
        ["labels must have one of the dtypes int64, int32", "got float64"],
    ),
    "shape": (
        lambda logits, labels: (logits, labels.T, -100),
        "ValueError",
        ["labels must have the shape [2, 10] of logits [...,classes], got [10, 2]"],
    ),
    "no tensor": (
        lambda logits, labels: (logits, labels.tolist(), -100),
        "TypeError",
        ["labels must be a torch.Tensor, got list"],
    ),
    "classes": (
        lambda logits, labels: (torch.cat([logits, logits], -1), labels, -100),
        "ValueError",
        ["logits must be the same on all ranks", "[..., 14] on {device} on rank 0"],
    ),
    "logits": (
        lambda logits, labels: (logits.long(), labels, -100),
        "TypeError",
        ["logits must be bfloat16", "got int64"],
    ),
    "ignore_index": (
        lambda logits, labels: (logits, labels.masked_fill(labels == -100, -1), -1),
        "ValueError",
        ["ignore_index must be the same on all ranks", "-1 on rank 0"],
    ),
}
"""logits, labels and ignore_index of rank 0 of 2 in `loss_with`, and the error of both ranks."""


def loss_with(make: MakeCP, change: str) -> None:
    """A loss that is wrong on rank 0."""
    cp = make(tile=1)
    logits, ids = make_logits(device_of(cp.group))
    logits, labels, ignored = cp.shard(logits), cp.shard_labels(ids), -100
    if cp.rank == 0:
        logits, labels, ignored = WRONG_LOSSES[change][0](logits, labels)
    cp.cross_entropy(logits, labels, ignore_index=ignored)


def losses_add_up(make: MakeCP, dtype: torch.dtype) -> None:
    """fp64: shares of labels of a dtype, against one process."""
    cp = make(tile=1)
    logits, ids = make_logits(device_of(cp.group))
    share = cp.cross_entropy(cp.shard(logits), cp.shard_labels(ids.to(dtype), ignore_index=100), ignore_index=100)
    want = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(cp.sum(share), want, rtol=1e-12, atol=0.0)


def make_logits(device: torch.device) -> tuple[Tensor, Tensor]:
    """fp64 logits of 7 classes, and ids, of 2 sequences of 20 tokens."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 20, 7, generator=generator, dtype=torch.float64)
    return logits.to(device), torch.randint(7, (2, 20), generator=generator).to(device)


def works(make: MakeCP) -> None:
    equals_whole(make, SMALL["paper"], (50,), ["plain"], "zigzag")


def ends_in_the_middle(make: MakeCP, last: int, method: str = "start_gather", calls: int = 1) -> None:
    """The last rank ends where it would send for the second time: in forward keys; or after `calls` of a method."""
    cp = make(tile=16, kv_heads_per_pass=1)
    if cp.rank == last:
        send, before = getattr(cp._comm, method), iter(range(calls))

        def end(*arguments: Any) -> Any:
            if next(before, None) is None:
                os._exit(1)
            return send(*arguments)

        setattr(cp._comm, method, end)
    out = cp.nsa(*own_qkv(cp, 0), config=SMALL["paper"])
    out.cpu()  # waits for a GPU
    out.sum().backward()


def backwards_differ(make: MakeCP, op: str, how: str, wrong: int) -> None:
    """Two calls of equal shapes, whose backwards one rank does not run as the others do.

    Args:
        how: "swapped": it runs them in the other order; "skipped": it goes on to another call after the first one's;
            "checkpointed": its calls alone are recomputed.
    """
    cp = make(tile=16)
    here = cp.rank == wrong
    outputs = []
    for seed in (0, 1):
        own = own_qkv(cp, seed)
        run = partial(CALLS[op], cp)
        outputs.append(checkpoint(run, *own, use_reentrant=False) if here and how == "checkpointed" else run(*own))
    if here and how == "swapped":
        outputs.reverse()
    outputs[0].sum().backward()
    if here and how == "skipped":
        cp.sum(outputs[0].detach())
    outputs[1].sum().backward()


def backwards_agree(make: MakeCP) -> None:
    """fp64: whatever backwards all ranks run in one order have the gradients of one process."""
    cp = make(tile=16)
    whole = [make_qkv(100, device=str(device_of(cp.group)), seed=seed, requires_grad=True) for seed in (0, 1)]
    own = [own_qkv(cp, seed) for seed in (0, 1)]
    for op, run in CALLS.items():
        for recompute in (None, False, True):
            found = []
            for tensors in own:
                call = partial(run, cp)
                found.append(
                    call(*tensors) if recompute is None else checkpoint(call, *tensors, use_reentrant=recompute)
                )
            expected = [run(None, *tensors) for tensors in whole]
            do = torch.linspace(-1, 1, expected[0].numel(), dtype=torch.float64, device=expected[0].device)
            do = do.view_as(expected[0])
            own_do = do / cp.size if op == "unshard" else cp.shard(do)
            for i in (1, 0):
                found[i].backward(own_do, retain_graph=recompute is None)
                expected[i].backward(do, retain_graph=True)
            if recompute is None:
                for i in (0, 1, 0):
                    found[i].backward(own_do, inputs=[own[i][1]], retain_graph=True)
                    expected[i].backward(do, inputs=[whole[i][1]], retain_graph=True)
            for mine, theirs in zip(own, whole, strict=True):
                got = {name: cp.unshard(x.grad) for name, x in zip("qkv", mine, strict=True) if x.grad is not None}
                want = {name: x.grad for name, x in zip("qkv", theirs, strict=True) if x.grad is not None}
                assert got.keys() == want.keys()
                assert_same(got, want, f"{op}, {recompute}")
                for x in (*mine, *theirs):
                    x.grad = None


def own_qkv(cp: ContextParallel, seed: int) -> list[Tensor]:
    return [cp.shard(x).requires_grad_() for x in make_qkv(100, device=str(device_of(cp.group)), seed=seed)]


def call_nsa(cp: ContextParallel | None, *qkv: Tensor, config: NSAConfig = SMALL["paper"]) -> Tensor:
    return (nsa if cp is None else cp.nsa)(*qkv, config=config)


def call_neighborhood(cp: ContextParallel | None, *qkv: Tensor) -> Tensor:
    return (neighborhood_attention if cp is None else cp.neighborhood_attention)(*qkv, kernel_size=7, causal=True)


CALLS: dict[str, Callable[..., Tensor]] = {
    "nsa": call_nsa,
    "nsa's compress": partial(call_nsa, config=replace(SMALL["paper"], compress=lambda blocks: blocks.amax(-2))),
    "neighborhood_attention": call_neighborhood,
    "unshard": lambda cp, q, k, v: k * 1 if cp is None else cp.unshard(k),
}
"""Calls that send in backward, of one process where there is no ContextParallel."""

DIFFERENT_BACKWARDS = (*itertools.product(CALLS, ("swapped", "skipped")), ("nsa", "checkpointed"))
"""Of `backwards_differ`."""


def goes_on_elsewhere(_: MakeCP, seconds: float) -> None:
    """The last rank runs a collective of its own on the group where the others run a backward."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    cp = ContextParallel(group, tile=16)
    out = cp.nsa(*own_qkv(cp, 0), config=SMALL["paper"])
    if cp.rank < cp.size - 1:
        out.sum().backward()
    x = torch.ones(1000, device=out.device)
    dist.all_reduce(x, group=group)
    x.cpu()  # waits for a GPU


def makes_none(_: MakeCP, seconds: float) -> None:
    """The last rank makes no ContextParallel."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    if dist.get_rank() < dist.get_world_size() - 1:
        ContextParallel(group)


def is_refused_on_a_rank(make: MakeCP, start: int) -> None:
    """A backend refuses the call whose queries begin at a token, as the kernels for GPUs do with some starts."""

    def find(call: dispatch.Call, *arguments: Any, **keywords: Any) -> Any:
        if call.options["inputs"].k.shape[1] - call.options["inputs"].q.shape[1] == start:
            raise dispatch.BackendError(f"refused, got q_start={start}")
        return find_impl(call, *arguments, **keywords)

    cp = make(layout="contiguous", tile=1)
    q, k, v = (cp.shard(x).requires_grad_() for x in make_qkv(100))
    with mock.patch("nsa.operators.find_impl", find):
        cp.nsa(q, k, v, config=SMALL["paper"])


def stays_away(make: MakeCP, seconds: float) -> None:
    """The last rank does not call."""
    cp = make(tile=16)
    if cp.rank == cp.size - 1:
        time.sleep(seconds)
        return
    q, k, v = map(cp.shard, make_qkv(100))
    cp.nsa(q, k, v, config=SMALL["paper"])


# Kernels, on a GPU that the ranks share or on one for each


def bits_on_gpu(
    make: MakeCP, config: NSAConfig, tokens: int, layout: str, lengths: Sequence[int] | None = None
) -> None:
    """bf16: out bit for bit; gradients, whose fp32 sums have another order, but for roundings.

    Args:
        lengths: of packed documents; rows of `tokens` that are left lie behind the last one.
    """
    cp = make(layout=layout, kv_heads_per_pass=1)
    tensors, do = on_gpu(tokens, batch=1 if lengths is None else None)
    packed: dict[str, Any] = {}
    if lengths is not None:
        packed["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).int().to(do.device)
    want = results(nsa, tensors, config, do, **packed)
    got = divided(cp, tensors, config, do, **packed)
    assert torch.equal(got["out"], want["out"])
    for name in ("q", "k", "v"):
        assert difference(got[name], want[name], exact=False) == "", name


def repeats_on_gpu(make: MakeCP, config: NSAConfig, tokens: int) -> None:
    """Another run, `recompute` and checkpoints give the same bits."""
    cp = make(kv_heads_per_pass=1)
    tensors, do = on_gpu(tokens)
    own = {n: x if n in WEIGHT_NAMES else cp.shard(x.detach()).requires_grad_() for n, x in tensors.items()}
    again = partial(checkpoint, cp.nsa, use_reentrant=False)
    runs = cp.nsa, cp.nsa, partial(cp.nsa, recompute=True), again
    want, *others = (results(run, own, config, cp.shard(do), deterministic=True) for run in runs)
    for how, got in enumerate(others):
        for name, x in want.items():
            assert torch.equal(got[name], x), f"{how}: {name}"


def neighborhood_on_gpu(make: MakeCP, tokens: int, layout: str) -> None:
    """bf16: but for roundings, since windows meet other tiles of keys."""
    cp = make(layout=layout, tile=256)
    shape = {"heads": 8, "kv_heads": 2, "dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    for options in ({"kernel_size": 9}, {"kernel_size": 128, "causal": True}, {"kernel_size": 7, "boundary": "shift"}):
        got, want = neighborhood_results(cp, options, tokens, **shape)
        for name, x in got.items():
            assert difference(x.detach(), want[name].detach(), exact=False) == "", f"{name}, {options}"


def on_gpu(tokens: int, batch: int | None = 1) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a call of a sequence, or of a pack (batch None), and the gradient of out."""
    q, k, v = make_qkv(tokens, 8, 2, 64, batch=batch, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(8, 3, 64, generator=torch.Generator().manual_seed(2)).to("cuda", torch.bfloat16) / 8
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).to("cuda", torch.bfloat16)
    return {"q": q, "k": k, "v": v, "gate_proj_weight": weight.requires_grad_()}, do

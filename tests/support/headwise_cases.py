"""What a rank does in tests of tensor parallelism of attention layers; run by tests/support/ranks.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from nsa import LinearCompression, NeighborhoodAttention, NSAConfig, NSAttention, PageTable
from nsa.distributed import ContextParallel, HeadwiseParallel
from tests.support.context_cases import MakeCP, assert_same, device_of, rotate
from tests.support.helpers import SMALL

WIDTH, HEADS, KV_HEADS, TOKENS = 24, 4, 2, 70


SHARED_POOL = NSAConfig.paper(
    compress=LinearCompression(KV_HEADS, 8, 6), compress_block_size=8, compress_stride=4, select_block_size=8
)
"""One module for keys and values."""

LAYERS: dict[str, dict[str, Any]] = {
    "gates of x": {"config": SMALL["seed"], "bias": True, "rope": rotate, "head_dim": 8},
    "gates of q": {"gate": "q", "separate_kv": True, "compress_proj": True, "bias": True, "v_head_dim": 10},
    "no gates": {"gate": None, "compress": "linear", "v_head_dim": 4},
    "shared pool": {"config": SHARED_POOL},
}
"""Arguments of NSAttention, which together give it every parameter that it may have."""

WRONG: dict[str, str] = {
    "kv heads": "ValueError: num_kv_heads must be a multiple of the mesh's 2 ranks, got 1",
    "pool": "ValueError: compress must have no parameters, or be LinearCompression, to be sharded, got Sequential",
    "dropout": "ValueError: dropout must be 0, since ranks would drop other elements, got 0.5",
    "projection": "TypeError: k_proj must be a nn.Linear to be sharded, got Sequential",
    "another module": "TypeError: HeadwiseParallel is for NSAttention and NeighborhoodAttention, got Linear",
}
"""Modules that cannot be sharded on two ranks, and their errors."""


def make_layer(how: str) -> nn.Module:
    """The same on every rank, with values everywhere."""
    torch.manual_seed(3)
    arguments = {"config": SMALL["paper"], **LAYERS.get(how, {})}
    if how == "neighborhood":
        layer: nn.Module = NeighborhoodAttention(WIDTH, HEADS, KV_HEADS, kernel_size=7, bias=True, rope=rotate)
    else:
        layer = NSAttention(WIDTH, HEADS, KV_HEADS, **arguments)
    layer = copy.deepcopy(layer).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return layer


def call(layer: nn.Module, x: Tensor, how: str) -> Tensor:
    positions = torch.arange(TOKENS, device=x.device) if layer.rope is not None else None
    return layer(hidden_states=x, position_embeddings=positions) if how == "no gates" else layer(x, positions)


def sharded_equals_whole(make: MakeCP, how: str, sequence: bool, backend: str | None = None) -> None:
    """fp64: out, and the gradients of the input and of all parameters, of one process.

    Args:
        sequence: ranks have parts of the tokens before and after the layer.
        backend: of torch.compile, or None.
    """
    group = make().group
    mesh = DeviceMesh.from_group(group, device_of(group).type, mesh_dim_names=("tp",))
    layer = make_layer(how).to(device_of(group))
    whole = copy.deepcopy(layer)
    placement = Shard(1) if sequence else Replicate()
    style = HeadwiseParallel(input_layouts=placement, output_layouts=placement)
    assert parallelize_module(layer, mesh, style) is layer
    assert (layer.num_heads, layer.num_kv_heads) == (HEADS // mesh.size(), KV_HEADS // mesh.size())
    generator = torch.Generator().manual_seed(5)
    x, do = (torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(mesh.device_type) for _ in "xo")
    mine = slice(TOKENS // mesh.size() * mesh.get_local_rank(), TOKENS // mesh.size() * (mesh.get_local_rank() + 1))
    part = mine if sequence else slice(None)
    whole_x, own_x = x.clone().requires_grad_(), x[:, part].clone().requires_grad_()
    run = layer if backend is None else torch.compile(layer, backend=backend)
    expected, out = call(whole, whole_x, how), call(run, own_x, how)
    assert not isinstance(out, DTensor)
    expected.backward(do)
    out.backward(do[:, part])
    got = {"out": out.detach(), "x": own_x.grad}
    want = {"out": expected[:, part].detach(), "x": whole_x.grad[:, part]}
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.grad.placements == parameter.placements, name
        assert parameter.to_local().numel() in (parameter.numel(), parameter.numel() // mesh.size())
        got[name] = parameter.grad.full_tensor()
    want |= {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert got.keys() == want.keys()
    assert_same(got, want, how)
    sharded, kept = layer.state_dict(), whole.state_dict()
    assert sharded.keys() == kept.keys()
    assert all(torch.equal(sharded[name].full_tensor(), x) for name, x in kept.items())


def continues_with_a_cache(make: MakeCP) -> None:
    """A cache of the sharded layer holds this rank's heads."""
    group = make().group
    mesh = DeviceMesh.from_group(group, device_of(group).type)
    layer = make_layer("gates of q").to(device_of(group))
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x = x.to(mesh.device_type)
    with torch.no_grad():
        want = layer(x)
        parallelize_module(layer, mesh, HeadwiseParallel())
        table = PageTable.empty(1, 128, device=x.device)
        cache = layer.new_cache(table)
        parts = []
        for part in x.split((TOKENS - 4, 1, 3), 1):
            with table.step(part.shape[1]):
                parts.append(layer(part, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-9, atol=1e-10)


def with_divided_sequences(_: MakeCP) -> None:
    """Of all ranks two divide the sequence, and FSDP2 the parameters; of each of them two divide the heads."""
    mesh = init_device_mesh(device_of().type, (2, dist.get_world_size() // 2), mesh_dim_names=("cp", "tp"))
    cp = ContextParallel(mesh["cp"], tile=16)
    generator = torch.Generator().manual_seed(5)
    x, do = torch.randn(2, 1, TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(mesh.device_type)
    for how in ("gates of q", "no gates"):
        layer = make_layer(how).to(mesh.device_type)
        whole = copy.deepcopy(layer)
        layer.context_parallel = cp
        fully_shard(parallelize_module(layer, mesh["tp"], HeadwiseParallel()), mesh=mesh["cp"])
        out, expected = layer(cp.shard(x)), whole(x)
        out.backward(cp.shard(do) * cp.size)  # FSDP2 averages
        expected.backward(do)
        got = {name: parameter.grad.full_tensor() for name, parameter in layer.named_parameters()}
        want = {name: parameter.grad for name, parameter in whole.named_parameters()}
        assert_same({"out": cp.unshard(out).detach(), **got}, {"out": expected.detach(), **want}, how)


def shards_what_it_cannot(make: MakeCP, change: str) -> None:
    """Raises before anything is changed."""
    group = make().group
    mesh = DeviceMesh.from_group(group, "cpu")
    module: nn.Module = NSAttention(WIDTH, 2, 1) if change == "kv heads" else NSAttention(WIDTH, HEADS, KV_HEADS)
    if change == "pool":
        pool = nn.Sequential(nn.Linear(6, 6), nn.Flatten(-2), nn.Linear(32 * 6, 6))
        module = NSAttention(WIDTH, HEADS, KV_HEADS, config=NSAConfig.paper(compress=pool))
    elif change == "dropout":
        module = NeighborhoodAttention(WIDTH, HEADS, KV_HEADS, dropout=0.5)
    elif change == "projection":
        module.k_proj = nn.Sequential(module.k_proj)
    elif change == "another module":
        module = module.q_proj
    try:
        parallelize_module(module, mesh, HeadwiseParallel())
    finally:
        assert not any(isinstance(x, DTensor) for x in module.parameters())

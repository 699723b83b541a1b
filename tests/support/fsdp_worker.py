"""NSAttention sharded by FSDP2, beside the same model whole: one process of two or more.

    torchrun --nproc-per-node 2 tests/support/fsdp_worker.py --device cpu     (gloo)
    torchrun --nproc-per-node 2 tests/support/fsdp_worker.py --device cuda    (NCCL, a GPU each)

Every process has a sequence of its own. The whole model sees them all; its loss and gradients are the means that FSDP
makes. Parameters are fp32, gathered as bf16 (on a CPU also as they are); gradients are reduced in fp32. Gathered
weights lie elsewhere in memory, so products may be added up in another order: the sharded model must be as near to fp64
as the whole one, by the budget of tests/support/helpers.py.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from nsa import NSAConfig, NSAttention
from tests.support.helpers import LARGE, SMALL, assert_within_budget

STEPS = 2
WITHOUT_GRADIENT = "compress.k.position"
"""Adds the same to all compressed keys, which no softmax sees: its gradient is rounding alone."""


class Model(nn.Module):
    """Layers with every kind of parameter that NSAttention has."""

    def __init__(self, width: int, heads: int, kv_heads: int, configs: dict[str, NSAConfig]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                NSAttention(width, heads, kv_heads, config=configs["seed"], gate="q", compress_proj=True),
                NSAttention(width, heads, kv_heads, config=configs["paper"], gate="x", separate_kv=True),
                NSAttention(width, heads, kv_heads, config=configs["seed"], gate="x", compress="linear"),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    device_type = parser.parse_args().device
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    try:
        check_starts(torch.device(device_type), world)
        for dtype in [torch.bfloat16] if device_type == "cuda" else [torch.float32, torch.bfloat16]:
            compare(torch.device(device_type), dtype, rank, world)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        sys.stdout.write(f"equal on {world} processes\n")


def check_starts(device: torch.device, world: int) -> None:
    """A layer of the meta device that is sharded, and then initialised, has the values of a whole one."""
    mesh = init_device_mesh(device.type, (world,))
    for how in ({"compress_proj": True}, {"compress": "linear"}):
        whole = NSAttention(32, 4, 2, config=NSAConfig.paper(), device=device, **how)
        with torch.device("meta"):
            layer = NSAttention(32, 4, 2, config=NSAConfig.paper(), **how)
        fully_shard(layer, mesh=mesh)
        layer.to_empty(device=device)
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        expected = dict(whole.named_parameters())
        for name, parameter in layer.named_parameters():
            if "compress" in name:  # others are random
                assert torch.equal(parameter.full_tensor(), expected[name]), name


def compare(device: torch.device, dtype: torch.dtype, rank: int, world: int) -> None:
    width, tokens, configs = (256, 700, LARGE) if device.type == "cuda" else (32, 50, SMALL)
    torch.manual_seed(0)
    whole = Model(width, 4, 2, configs).to(device)
    sharded = copy.deepcopy(whole)
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(layer, "forward_aux")
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    assert isinstance(sharded, FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, sharded)]
    for step in range(STEPS):
        batches = torch.randn(world, 1, tokens, width, generator=torch.Generator().manual_seed(step)).to(device, dtype)
        low = of_whole(copy.deepcopy(whole).to(dtype), batches)
        exact = of_whole(in_fp64(whole, dtype), batches.double())
        loss = loss_of(sharded, batches[rank])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        got = {"loss": mean / world}
        for name, parameter in sharded.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            got[name] = parameter.grad.full_tensor()
        assert got.keys() == low.keys()
        for name, tensor in got.items():
            if not name.endswith(WITHOUT_GRADIENT):
                assert_within_budget(tensor.to(dtype), exact[name], low[name], f"{name} of step {step} in {dtype}")
        for name, parameter in whole.named_parameters():
            parameter.grad = low[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    out, aux = sharded.layers[0].forward_aux(batches[rank])
    assert out.shape == batches[rank].shape
    assert aux.indices.dtype == torch.int32


def in_fp64(model: Model, dtype: torch.dtype) -> Model:
    """With the weights rounded to a dtype, by the reference."""
    exact = copy.deepcopy(model).to(dtype).double()
    for layer in exact.layers:
        layer.backend = "reference"
    return exact


def of_whole(model: Model, batches: Tensor) -> dict[str, Tensor]:
    """Mean loss and, by name, mean gradients of all batches: each in the model's dtype, added up in fp32 or fp64."""
    wide = torch.promote_types(batches.dtype, torch.float32)
    losses, sums = [], {name: torch.zeros_like(parameter, dtype=wide) for name, parameter in model.named_parameters()}
    for batch in batches:
        loss = loss_of(model, batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.detach())
        for name, gradient in zip(sums, gradients, strict=True):
            sums[name] += gradient.to(wide) / len(batches)
    return {"loss": torch.stack(losses).mean(), **sums}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return out.to(torch.promote_types(out.dtype, torch.float32)).square().mean()


if __name__ == "__main__":
    main()

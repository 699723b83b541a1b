"""What a rank does in tests of FSDP2, beside the same model whole; run by tests/support/ranks.py.

Every rank has a sequence of its own. The whole model sees them all; its loss and gradients are the means that FSDP
makes. Parameters are fp32, gathered in another dtype; gradients are reduced in fp32. Gathered weights lie elsewhere in
memory, so products may be added up in another order: the sharded model must be as near to fp64 as the whole one, by the
budget of tests/support/helpers.py.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from nsa import NSAConfig, NSAttention
from tests.support.context_cases import MakeCP, device_of
from tests.support.helpers import assert_within_budget

WITHOUT_GRADIENT = "compress.k.position"
"""Adds the same to all compressed keys, which no softmax sees: its gradient is rounding alone."""


class Model(nn.Module):
    """Layers with every kind of parameter that NSAttention has."""

    def __init__(self, width: int, configs: dict[str, NSAConfig]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                NSAttention(width, 4, 2, config=configs["seed"], gate="q", compress_proj=True),
                NSAttention(width, 4, 2, config=configs["paper"], gate="x", separate_kv=True),
                NSAttention(width, 4, 2, config=configs["seed"], gate="x", compress="linear"),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def starts_as_whole(make: MakeCP) -> None:
    """A layer of the meta device that is sharded, and then initialised, has the values of a whole one."""
    group = make().group
    device = device_of(group)
    mesh = DeviceMesh.from_group(group, device.type)
    for how in ({"compress_proj": True}, {"compress": "linear"}):
        whole = NSAttention(32, 4, 2, config=NSAConfig.paper(), device=device, **how)
        layer = fully_shard(NSAttention(32, 4, 2, config=NSAConfig.paper(), device="meta", **how), mesh=mesh)
        layer.to_empty(device=device)
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        expected = dict(whole.named_parameters())
        for name, parameter in layer.named_parameters():
            if "compress" in name:  # others are random
                assert torch.equal(parameter.full_tensor(), expected[name]), name


def trains_as_whole(
    make: MakeCP, dtype: torch.dtype, configs: dict[str, NSAConfig], width: int = 32, tokens: int = 50
) -> None:
    """Loss and gradients of some steps. Args: dtype: of gathered parameters."""
    group = make().group
    device, world = device_of(group), group.size()
    torch.manual_seed(0)
    whole = Model(width, configs).to(device)
    sharded = copy.deepcopy(whole)
    mesh = DeviceMesh.from_group(group, device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(layer, "forward_aux")
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, sharded)]
    for step in range(2):
        batches = torch.randn(world, 1, tokens, width, generator=torch.Generator().manual_seed(step)).to(device, dtype)
        low = of_whole(copy.deepcopy(whole).to(dtype), batches)
        rounded = copy.deepcopy(whole).to(dtype).double()
        for layer in rounded.layers:
            layer.backend = "reference"
        exact = of_whole(rounded, batches.double())
        loss = loss_of(sharded, batches[group.rank()])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
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
    out, aux = sharded.layers[0].forward_aux(batches[0])
    assert out.shape == batches[0].shape
    assert aux.indices.dtype == torch.int32


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

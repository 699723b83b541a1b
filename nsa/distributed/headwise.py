"""HeadwiseParallel: tensor parallelism of attention layers over their heads, a style for `parallelize_module`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from nsa.compression import LinearCompression
from nsa.module import NSAttention
from nsa.neighborhood.module import NeighborhoodAttention


class HeadwiseParallel(ParallelStyle):
    """Shard an NSAttention or NeighborhoodAttention by heads, as a style for PyTorch's `parallelize_module`.

    Each of R ranks has H/R query heads and H_kv/R key/value heads: rows of the projections and of all other parameters,
    whose first dim is heads, and columns of `o_proj`. The layer's `num_heads` and `num_kv_heads` become the local
    numbers, which its `rope` hook, caches and functions in `compress` see. Parameters are DTensors with their full
    shapes.

    Args:
        input_layouts: placement of `hidden_states` if it is not a DTensor. Use Shard(1), tokens of `[B,N,hidden_size]`,
            with sequence parallelism. Default: None, which means Replicate().
        output_layouts: placement of the output. Default: None, which means Replicate().
        use_local_output: return a plain tensor, this rank's part, instead of a DTensor. Default: True.

    Raises:
        TypeError: when applied to another module.
        ValueError: when applied, naming the layer's argument: `num_kv_heads` that the mesh does not divide; a module in
            `compress` with parameters that is not a LinearCompression; `dropout`, which would differ between ranks.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from nsa import NSAttention
        >>> from nsa.distributed import HeadwiseParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> layer = parallelize_module(NSAttention(64, 4, 2), mesh["tp"], HeadwiseParallel())
        >>> layer(torch.randn(1, 100, 64)).shape
        torch.Size([1, 100, 64])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer, ranks = check_layer(module), device_mesh.size()
        if layer.num_kv_heads % ranks != 0:
            raise ValueError(f"num_kv_heads must be a multiple of the mesh's {ranks} ranks, got {layer.num_kv_heads}")
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel(input_layouts=self.input_layouts) for name in projections(layer) if name != "o_proj"
        }
        plan["o_proj"] = RowwiseParallel(output_layouts=self.output_layouts, use_local_output=self.use_local_output)
        # torch 2.6 has no src_data_rank
        source = {"src_data_rank": self.src_data_rank} if hasattr(self, "src_data_rank") else {}
        parallelize_module(layer, device_mesh, plan, **source)
        for owner in (layer, *learned_pools(layer)):
            for name, parameter in list(owner.named_parameters(recurse=False)):
                sharded = distribute_tensor(parameter, device_mesh, [Shard(0)], **source)
                owner.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        layer.num_heads //= ranks
        layer.num_kv_heads //= ranks
        layer.register_forward_pre_hook(partial(_replicate_input, device_mesh, self.input_layouts), with_kwargs=True)
        return layer


def check_layer(module: nn.Module) -> NSAttention | NeighborhoodAttention:
    """Return the layer if HeadwiseParallel can shard it.

    Raises:
        TypeError, ValueError: otherwise, before anything is changed.
    """
    if not isinstance(module, (NSAttention, NeighborhoodAttention)):
        raise TypeError(f"HeadwiseParallel is for NSAttention and NeighborhoodAttention, got {type(module).__name__}")
    for name, projection in projections(module).items():
        if not isinstance(projection, nn.Linear):
            raise TypeError(f"{name} must be a nn.Linear to be sharded, got {type(projection).__name__}")
    for pool in learned_pools(module):
        if not isinstance(pool, LinearCompression):
            raise ValueError(
                f"compress must have no parameters, or be LinearCompression, to be sharded, got {type(pool).__name__}"
            )
    if isinstance(module, NeighborhoodAttention) and module.dropout.p > 0:
        raise ValueError(f"dropout must be 0, since ranks would drop other elements, got {module.dropout.p}")
    return module


def projections(layer: NSAttention | NeighborhoodAttention) -> dict[str, nn.Module]:
    """The layer's projections, by their paths in it."""
    found = {name: getattr(layer, name, None) for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj")}
    if isinstance(layer, NSAttention):
        found |= {f"branch_proj.{name}": projection for name, projection in layer.branch_proj.items()}
    return {name: projection for name, projection in found.items() if projection is not None}


def learned_pools(layer: NSAttention | NeighborhoodAttention) -> list[nn.Module]:
    """Modules in `compress` with parameters, without duplicates."""
    pools = layer.compress.values() if isinstance(layer, NSAttention) else ()
    return [pool for pool in dict.fromkeys(pools) if any(True for _ in pool.parameters())]


def _replicate_input(
    mesh: DeviceMesh, layout: Placement, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather hidden_states once for all projections, whose gradients are then summed before communication."""

    def replicate(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x  # the layer's forward rejects it
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [layout], run_check=False)
        return x.redistribute(placements=[Replicate()])

    if arguments:
        return (replicate(arguments[0]), *arguments[1:]), keywords
    return arguments, {name: replicate(x) if name == "hidden_states" else x for name, x in keywords.items()}

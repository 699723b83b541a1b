"""`nsa_forward` as one PyTorch operator, for torch.compile(fullgraph=True).

Dynamo cannot trace validation and dispatch, and need not: a compiled graph calls `torch.ops.nsa_kernels.forward`, whose
implementation is the eager path. The operator takes the fields of NSAConfig one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa.config import OPTION_NAMES, NSAConfig, check_options
from nsa.tensors import TENSOR_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATOR = "nsa_kernels::forward"

_TENSORS = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in TENSOR_NAMES)
_OPTIONS = (
    "SymInt compress_block_size, SymInt? compress_stride, SymInt? select_block_size, SymInt num_selected_blocks, "
    "SymInt window_size, SymInt q_tile_size, bool share_heads_in_group, SymInt num_init_blocks, "
    "SymInt num_local_blocks, SymInt? num_cmp_selected_blocks, SymInt n_block_size, str compress, bool causal, "
    "float? softmax_scale, bool debug"
)
_REST = "SymInt? max_seqlen, bool deterministic, bool recompute, str? backend"
SCHEMA = f"({_TENSORS}, *, {_OPTIONS}, {_REST}) -> Tensor"


def define(run: Callable[..., Tensor]) -> None:
    """Register the operator; `run` is the eager nsa_forward."""

    def implementation(*tensors: Tensor | None, **keywords: Any) -> Tensor:
        options = {name: keywords.pop(name) for name in OPTION_NAMES}
        return run(**dict(zip(TENSOR_NAMES, tensors, strict=True)), **keywords, config=NSAConfig(**options))

    torch.library.define(OPERATOR, SCHEMA)
    torch.library.impl(OPERATOR, "default", implementation)
    torch.library.register_fake(OPERATOR, _shape)


def _shape(*tensors: Tensor | None, **_: Any) -> Tensor:
    q, _k, v = tensors[:3]
    if q is None or v is None:
        raise TypeError("q and v must be tensors")
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def forward(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """The operator, called like nsa_forward."""
    tensors = [keywords.pop(name, None) for name in TENSOR_NAMES[3:]]
    config = keywords.pop("config", None)
    rest = {name: keywords.pop(name, default) for name, default in REST.items()}
    check_options(config, keywords)
    options = {name: keywords.get(name, getattr(config or DEFAULTS, name)) for name in OPTION_NAMES}
    if options["compress"] != "mean":
        raise TypeError("compress must be 'mean' under torch.compile: compress first, and give k_cmp and v_cmp")
    result: Tensor = torch.ops.nsa_kernels.forward(q, k, v, *tensors, **options, **rest)
    return result


DEFAULTS = NSAConfig()
REST = {"max_seqlen": None, "deterministic": False, "recompute": False, "backend": None}

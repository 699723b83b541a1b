"""The ops under modes that see PyTorch's operators: selective checkpointing, and FakeTensorMode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nsa import (
    NSACache,
    NSAttention,
    attention_residual,
    block_sparse_attention,
    indexer_kl_loss,
    neighborhood_attention,
    nsa,
    nsa_forward,
    nsa_forward_aux,
    nsa_with_cache,
    top_blocks_by_max,
)
from nsa.neighborhood.api import neighborhood_attention_forward
from tests.support.helpers import LARGE, SMALL, make_qkv

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
Op = Callable[[Tensor, Tensor, Tensor], Tensor]
TOKENS = 40


def indexed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blocks = top_blocks_by_max(q[:, :, :2].contiguous(), k[:, :, :1].contiguous(), block_size=8, k=2)
    loss = indexer_kl_loss(q[:, :, :2], k[:, :, :1], q, k, blocks, block_size=8)
    return block_sparse_attention(q, k, v, blocks, block_size=8) * loss


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bounds = torch.tensor([0, 13, TOKENS], dtype=torch.int32)
    return nsa(q[0], k[0], v[0], cu_seqlens=bounds, config=SMALL["paper"])


OPS: dict[str, Op] = {
    "nsa, per token": partial(nsa, config=SMALL["paper"]),
    "nsa, per tile": partial(nsa, config=SMALL["seed"]),
    "nsa, packed": packed,
    "nsa, continued": lambda q, k, v: nsa(q[:, 9:30], k, v, q_start=9, config=SMALL["paper"]),
    "nsa, frozen": lambda q, k, v: q * nsa(q.detach(), k.detach(), v.detach(), config=SMALL["paper"]),
    "nsa, without a graph": lambda q, k, v: q * nsa_forward(q, k, v, config=SMALL["paper"]),
    "indexer and blocks": indexed,
    "neighborhood": partial(neighborhood_attention, kernel_size=5),
    "neighborhood's band": lambda q, k, v: q * neighborhood_attention_forward(q, k, v, kernel_size=5)[0],
    "residual": lambda q, k, v: attention_residual([q.flatten(2), q.flatten(2) * 2], k[0, 0].repeat(2, 1).flatten()),
}


def save_all_but_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_SAVE


def selectively(policy: Any, function: Any, *tensors: Tensor) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(function, *tensors, use_reentrant=False, context_fn=contexts)


def gradients(run: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    return [*torch.autograd.grad(run(*leaves).square().sum(), leaves, allow_unused=True)]


def assert_checkpoints_change_nothing(run: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    expected, got = gradients(run, leaves), gradients(partial(selectively, save_all_but_products, run), leaves)
    assert any(x is not None for x in expected)
    for one, other in zip(expected, got, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("run", OPS.values(), ids=list(OPS))
def test_selective_checkpoints_change_nothing(run: Op) -> None:
    leaves = [x.requires_grad_() for x in make_qkv(TOKENS, dtype=torch.float32)]
    assert_checkpoints_change_nothing(run, leaves)


@DEVICES
@pytest.mark.parametrize("preset", LARGE)
def test_selective_checkpoints_of_layers_change_nothing(device: str, preset: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = NSAttention(64, 4, 1, head_dim=64, config=LARGE[preset], device=device, dtype=dtype)
    x = torch.randn(1, 200, 64, device=device, dtype=dtype, requires_grad=True)
    assert_checkpoints_change_nothing(layer, [x])


def test_a_policy_sees_a_call_as_one_operator() -> None:
    seen = []

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(str(op))
        return (
            CheckpointPolicy.MUST_SAVE
            if op is torch.ops.nsa_kernels.saving.default
            else CheckpointPolicy.MUST_RECOMPUTE
        )

    leaves = [x.requires_grad_() for x in make_qkv(TOKENS, dtype=torch.float32)]
    gradients(partial(selectively, policy, OPS["nsa, per token"]), leaves)
    assert {*seen} == {"nsa_kernels.saving.default"}


# Fake tensors


@pytest.mark.parametrize("run", OPS.values(), ids=list(OPS))
def test_fake_tensors_have_shapes_and_gradients(run: Op) -> None:
    made = make_qkv(TOKENS, dtype=torch.bfloat16)
    expected = run(*made)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [mode.from_tensor(x).requires_grad_() for x in made]
        out = run(*leaves)
        found = [x for x in gradients(run, leaves) if x is not None]
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype, out.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert found
    assert all(isinstance(x, FakeTensor) for x in found)


def test_a_cache_of_fake_tensors_takes_steps() -> None:
    """Per tile, where a cut depends on lengths."""
    sizes: Any = {"heads": 4, "heads_kv": 2, "dim": 16}
    with FakeTensorMode(), torch.no_grad():
        cache = NSACache.empty(SMALL["seed"], 1, 60, **sizes)
        q, k, v = (torch.randn(1, 2, heads, 16) for heads in (4, 2, 2))
        out = nsa_with_cache(q, k, v, cache, counts=torch.ones(1, dtype=torch.int32))
        cache.reorder(torch.zeros(1, dtype=torch.int64))
        cache.truncate(torch.ones(1, dtype=torch.int32))
        NSACache(SMALL["seed"], cache.table, **sizes)
    assert isinstance(out, FakeTensor)
    assert out.shape == q.shape


def test_intermediate_results_are_refused_in_both() -> None:
    refused = pytest.raises(RuntimeError, match="nsa_forward_aux supports neither fake tensors nor selective")
    q, k, v = make_qkv(TOKENS, dtype=torch.float32)
    with refused:
        selectively(save_all_but_products, lambda q: nsa_forward_aux(q, k, v)[0] * q, q.requires_grad_())
    with refused, FakeTensorMode() as mode:
        nsa_forward_aux(*map(mode.from_tensor, (q, k, v)))

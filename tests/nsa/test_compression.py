"""LinearCompression and pooling of packed documents, against sums written out."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import LinearCompression, NSAConfig, NSAttention, nsa
from nsa.config import BlockPooling
from nsa.inputs import NSAInputs
from nsa.reference import with_compressed_entries
from tests.support.cases import product
from tests.support.helpers import make_qkv

HEADS, LENGTH, DIM = 2, 4, 6
CONFIG = NSAConfig.paper(
    compress_block_size=LENGTH, compress_stride=2, select_block_size=4, num_selected_blocks=4, window_size=3
)


def pool(dim: int = DIM, dtype: torch.dtype = torch.float64) -> LinearCompression:
    """One that is not the mean."""
    module = LinearCompression(HEADS, LENGTH, dim, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter) / 8
    return module


def test_is_the_sum_over_tokens() -> None:
    module, blocks = pool(), torch.randn(2, 3, HEADS, LENGTH, DIM, dtype=torch.float64)
    expected = torch.zeros(2, 3, HEADS, DIM, dtype=torch.float64)
    for head in range(HEADS):
        for token in range(LENGTH):
            rows = blocks[:, :, head, token] + module.position[head, token]
            expected[:, :, head] += rows @ module.weight[head, token]
    torch.testing.assert_close(module(blocks), expected)


def test_rounds_once() -> None:
    module, blocks = pool(dtype=torch.float32), torch.randn(7, HEADS, LENGTH, DIM, dtype=torch.bfloat16)
    offset = torch.einsum("htd,htde->he", module.position.double(), module.weight.double())
    exact = torch.einsum("...htd,htde->...he", blocks.double(), module.weight.bfloat16().double()) + offset
    error = (module(blocks).double() - exact).abs().max()
    assert error <= 2 * 2**-8 * exact.abs().max()  # the entry's own rounding, and that of the places' share


@pytest.mark.parametrize("bounds", [(0, 25, 25, 28, 60), (0, 64), (0, 3), (0, 0), (0,)], ids=str)
def test_documents_are_pooled_apart(bounds: tuple[int, ...]) -> None:
    k, v = torch.randn(64, HEADS, DIM, dtype=torch.float64), torch.randn(64, HEADS, 5, dtype=torch.float64)
    k[bounds[-1] :] = torch.nan  # belongs to no document
    pools = pool(), pool(5)
    config = NSAConfig.paper(compress_block_size=LENGTH, compress_stride=2, compress=pools)
    inputs = NSAInputs(k, k, v, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    given, plain = with_compressed_entries(inputs, config)
    assert plain.compress == "mean"
    for x, module, entries in ((k, pools[0], given.k_cmp), (v, pools[1], given.v_cmp)):
        parts = [module(x[i : i + LENGTH].transpose(0, 1)) for a, b in pairwise(bounds) for i in range(a, b - 3, 2)]
        assert entries is not None
        assert len(entries) == 32
        behind = [torch.zeros_like(entries[:1])] * (32 - len(parts))
        torch.testing.assert_close(entries, torch.cat([*(part[None] for part in parts), *behind]))


# Callables that work in place


def relu_in_place(blocks: Tensor) -> Tensor:
    return torch.nn.functional.relu(blocks.mul_(2), inplace=True).mean(-2)


def relu(blocks: Tensor) -> Tensor:
    return torch.nn.functional.relu(blocks * 2).mean(-2)


@pytest.mark.parametrize(
    ("entries", "packed", "stride", "dtype"),
    product([False, True], [False, True], [2, 4], [torch.bfloat16, torch.float32], cover=2),
)
def test_compress_in_place_leaves_keys_and_values(entries: bool, packed: bool, stride: int, dtype: torch.dtype) -> None:
    """Args: entries: those alone that backends with a pooling of their own are given in place of a callable."""
    bounds = torch.tensor([0, 70, 150], dtype=torch.int32) if packed else None

    def run(how: BlockPooling, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = replace(CONFIG, compress_stride=stride, compress=how)
        if not entries:
            return nsa(q, k, v, cu_seqlens=bounds, config=config)
        given, _ = with_compressed_entries(NSAInputs(q, k, v, cu_seqlens=bounds), config)
        assert given.k_cmp is not None
        assert given.v_cmp is not None
        return torch.cat([given.k_cmp, given.v_cmp]) + 0 * q.sum()

    tensors = make_qkv(150, 4, HEADS, batch=None if packed else 1, dtype=dtype)
    kept, results = [x.clone() for x in tensors], []
    for how in (relu_in_place, relu):
        with torch.no_grad():
            out = run(how, *tensors)
        leaves = [x.detach().requires_grad_() for x in tensors]
        results.append((out, *torch.autograd.grad(run(how, *leaves).float().square().sum(), leaves)))
    assert all(map(torch.equal, *results))
    assert all(map(torch.equal, tensors, kept))


@pytest.mark.parametrize("tokens", [0, LENGTH - 1])
@pytest.mark.parametrize("how", [{"compress": "linear"}, {"compress_proj": True}])
def test_without_entries_weights_have_gradients_of_zero(how: dict[str, Any], tokens: int) -> None:
    """DistributedDataParallel waits for a gradient of every weight."""
    layer = NSAttention(32, 4, HEADS, config=CONFIG, **how)
    layer(torch.randn(1, tokens, 32)).sum().backward()
    assert all(weight.grad is not None for weight in layer.parameters())
    compressing = [weight for name, weight in layer.named_parameters() if "compress" in name]
    assert compressing
    assert all(not weight.grad.any() for weight in compressing if weight.grad is not None)


@pytest.mark.parametrize("both", [True, False])
def test_modules_of_a_config_are_the_layers(both: bool) -> None:
    how = pool(DIM, torch.float32), pool(DIM, torch.float32) if both else lambda blocks: blocks.mean(-2)
    layer = NSAttention(24, 4, HEADS, head_dim=DIM, config=replace(CONFIG, compress=how))
    names = {name for name, _ in layer.named_parameters() if name.startswith("compress.")}
    assert names == {f"compress.{x}.{y}" for x in ("k", "v")[: 1 + both] for y in ("weight", "position")}
    other = NSAttention(24, 4, HEADS, head_dim=DIM, config=replace(CONFIG, compress=tuple(map(copy.deepcopy, how))))
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    other.load_state_dict(layer.state_dict())
    hidden = torch.randn(1, 20, 24)
    assert torch.equal(other(hidden), layer(hidden))
    assert copy.deepcopy(layer).double()(hidden.double()).dtype == torch.float64


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.export
@pytest.mark.filterwarnings("ignore::FutureWarning")
@torch.no_grad()
def test_an_export_takes_any_batch_and_length() -> None:
    """From two entries on: for fewer, PyTorch's guards ask for an export of their own."""
    layer, dynamic = NSAttention(32, 4, 2, config=CONFIG, compress="linear").eval(), torch.export.Dim.DYNAMIC
    exported = torch.export.export(layer, (torch.randn(2, 40, 32),), dynamic_shapes=({0: dynamic, 1: dynamic},))
    run = exported.module()
    for batch, tokens in ((1, 40), (1, 6), (2, 33), (3, 70)):
        x = torch.randn(batch, tokens, 32)
        torch.testing.assert_close(run(x), layer(x))
    with pytest.raises(AssertionError, match="Guard failed"):
        run(torch.randn(1, 5, 32))

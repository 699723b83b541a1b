"""Inputs, oracles and budgets that tests of cute_kernels on a GPU share: forward and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench import oracles
from cute_kernels.runtime.device import compute_capability
from nsa import NSAAux, NSAConfig, nsa, nsa_forward, nsa_forward_aux, reference
from nsa.inputs import NSAInputs
from tests.support.causality import BRANCHES, LSES
from tests.support.helpers import assert_within_budget, lse_error, make_qkv
from tests.support.select_cases import check_chosen

BF16, FP16 = torch.bfloat16, torch.float16
SOME = NSAConfig(num_selected_blocks=3, window_size=100)
"""A selection that selects from a few hundred tokens on."""
OVERLAPPING = NSAConfig(
    compress_block_size=32,
    compress_stride=16,
    select_block_size=64,
    num_selected_blocks=6,
    num_init_blocks=1,
    num_local_blocks=2,
    window_size=200,
)
SLACK = 1e-4
"""A row with one key has dS = P (do . v - do . o) = 0, but the two products are summed in different orders."""


def on_gpu(tokens: int, heads: int = 8, kv_heads: int = 2, dim: int = 128, **keywords: Any) -> tuple[Tensor, ...]:
    return make_qkv(tokens, heads, kv_heads, dim, **{"dtype": BF16, "device": "cuda", **keywords})


def like(*shape: int, seed: int = 7, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to("cuda", dtype)


def gate_weight(heads: int = 8, dim: int = 128, dtype: torch.dtype = BF16) -> Tensor:
    return like(heads, 3, dim, seed=1, dtype=dtype, scale=dim**-0.5)


def assert_same(got: Tensor, expected: Tensor, name: str, *, exact: bool) -> None:
    """Bit for bit, or, where FlashAttention-4 adds up in any order, but for the rounding of P and dS to bf16."""
    assert got.shape == expected.shape
    if exact:
        assert torch.equal(got, expected), name
    else:
        allowed = 2**-7 * float(expected.float().abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=allowed, msg=lambda text: f"{name}: {text}")


# Forward


def check_forward(inputs: NSAInputs, config: NSAConfig) -> NSAAux:
    """The whole op, each branch, each LSE and the selection against fp64."""
    tensors = inputs.tensors()
    out, aux = nsa_forward_aux(**tensors, config=config)
    assert_agrees_with_oracle(inputs, config, out, aux)
    assert torch.equal(nsa_forward(**tensors, config=config), out), "with and without aux"
    check_selection(inputs, config, aux)
    return aux


def assert_agrees_with_oracle(inputs: NSAInputs, config: NSAConfig, out: Tensor, aux: NSAAux) -> None:
    """The results of a call without documents against fp64, for the blocks that the kernels chose."""
    major, minor = compute_capability(inputs.q.device.index or 0) if inputs.q.is_cuda else (9, 0)
    capability = 10 * major + minor
    fixed = {"indices": aux.indices.long(), "cmp_indices": None if aux.cmp_indices is None else aux.cmp_indices.long()}
    oracle_out, oracle = reference.nsa(inputs.map(Tensor.double), config, **fixed)
    naive_out, naive = oracles.nsa(inputs, config, **fixed)
    assert_within_budget(out, oracle_out, naive_out, "out")
    for name in (*BRANCHES, "k_cmp", "v_cmp"):
        assert_within_budget(getattr(aux, name), getattr(oracle, name), naive[name], name)
    # Logits are exact products summed in fp32, of compressed keys that were rounded to the dtype first (checked above)
    _, rounded = reference.nsa(*of_rounded_keys(inputs, config, aux), **fixed)
    for name in LSES:
        got, expected = getattr(aux, name), getattr(rounded, name)
        empty = torch.isinf(expected)
        assert torch.equal(torch.isinf(got), empty), f"{name}: -inf in other rows"
        if got.numel() == 0:
            continue
        theirs = (naive[name].double() - getattr(oracle, name)).masked_fill(empty, 0).abs().max()
        allowed = lse_error(capability, float(expected.masked_fill(empty, 0).abs().max())) + 2 * theirs
        assert (got.double() - expected).masked_fill(empty, 0).abs().max() <= allowed, name


def of_rounded_keys(inputs: NSAInputs, config: NSAConfig, aux: NSAAux) -> tuple[NSAInputs, NSAConfig]:
    """The call in fp64 that is given the compressed keys and values that the kernels made."""
    inputs = replace(inputs.map(Tensor.double), w_k_compress=None, w_v_compress=None)
    return replace(inputs, k_cmp=aux.k_cmp.double(), v_cmp=aux.v_cmp.double()), replace(config, compress="mean")


def check_selection(inputs: NSAInputs, config: NSAConfig, aux: NSAAux) -> None:
    """Given the kernel's own rounded keys, every chosen block is the oracle's, or within 1e-5 max|score| of one."""
    keys, plain = of_rounded_keys(inputs, config, aux)
    _, oracle = reference.nsa(keys, plain)
    if config.token_mode:
        check_chosen(aux.indices, oracle.indices, inputs, config, aux.k_cmp, aux.lse_cmp.double())
        return
    for name in ("indices", "cmp_indices"):
        got, expected = getattr(aux, name), getattr(oracle, name)
        if expected is None:
            assert got is None
            continue
        assert got.shape == expected.shape
        assert torch.equal((got >= 0).sum(-1), (expected >= 0).sum(-1)), f"{name}: another number of blocks"
        assert bool(((got[..., 1:] > got[..., :-1]) | (got[..., 1:] == -1)).all()), f"{name}: not ascending"
        for b, h, t in (got != expected).any(-1).nonzero().tolist():
            assert name == "indices", "another block of compressed entries"
            scores = block_scores(keys, plain, t)[b, h]
            kth = scores[expected[b, h, t][expected[b, h, t] >= 0].long()].min()
            chosen = scores[got[b, h, t][got[b, h, t] >= 0].long()].min()
            assert kth - chosen <= 1e-5 * scores[scores.isfinite()].abs().max(), f"tile {t}, head {h}"


def block_scores(inputs: NSAInputs, config: NSAConfig, tile: int) -> Tensor:
    """fp64 scores of all select blocks for one tile, `[B,S,blocks]`, where blocks and entries are the same thing."""
    assert config.compress_block_size == config.stride == config.select_size
    rows = slice(tile * config.q_tile_size, (tile + 1) * config.q_tile_size)
    mean = inputs.q[:, rows].mean(1)  # [B,H,D]
    keys = inputs.k_cmp.repeat_interleave(inputs.group_size, 2)
    scores = torch.einsum("bhd,bnhd->bhn", mean, keys) * config.scale(mean.shape[-1])
    if config.share_heads_in_group:
        scores = scores.unflatten(1, (-1, inputs.group_size)).sum(2)
    return scores


# Gradients


def gradients(run: Any, inputs: NSAInputs, do: Tensor) -> dict[str, Tensor]:
    """Of all floating-point inputs."""
    leaves = inputs.map(lambda x: x.detach().requires_grad_())
    wanted = {name: tensor for name, tensor in leaves.tensors().items() if tensor.requires_grad}
    got = torch.autograd.grad(run(leaves), list(wanted.values()), do, materialize_grads=True)
    return dict(zip(wanted, got, strict=True))


def check_gradients(inputs: NSAInputs, config: NSAConfig, **keywords: Any) -> dict[str, Tensor]:
    """Each gradient against fp64, for the blocks that the kernels chose."""
    _, aux = nsa_forward_aux(**inputs.tensors(), config=config)
    fixed = {"indices": aux.indices.long(), "cmp_indices": None if aux.cmp_indices is None else aux.cmp_indices.long()}
    do = like(*inputs.q.shape[:-1], inputs.v.shape[-1], dtype=inputs.q.dtype)

    def kernels(leaves: NSAInputs) -> Tensor:
        return nsa(**leaves.tensors(), config=config, **keywords)

    def naive(leaves: NSAInputs) -> Tensor:
        return oracles.nsa(leaves, config, **fixed)[0]

    def oracle(leaves: NSAInputs) -> Tensor:
        return reference.nsa(leaves, config, **fixed)[0]

    got = gradients(kernels, inputs, do)
    expected = gradients(oracle, inputs.map(Tensor.double), do.double())
    low = gradients(naive, inputs, do)
    for name, gradient in got.items():
        assert gradient.dtype == getattr(inputs, name).dtype
        assert_within_budget(gradient, expected[name], low[name], f"gradient of {name}", slack=SLACK)
    return got

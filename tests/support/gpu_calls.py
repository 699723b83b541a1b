"""Calls on a few hundred tokens that launch every kernel of ours, forward and backward, in each of its forms.

tools/sanitize.py runs them under compute-sanitizer, tests/cute/test_far.py with rows that are far apart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nsa import NSACache, NSAConfig, reference
from nsa.decoding import reference as decoding_reference
from nsa.inputs import NSAInputs


@contextmanager
def as_asked(warpgroups: bool, strategy: str = "sm_90") -> Iterator[None]:
    """Inside, kernels are chosen as for a GPU with or without WGMMA, and FlashAttention-4's tiles and lists by name."""
    from cute_kernels.fa4 import rules as fa4

    def asked(_: torch.device) -> bool:
        return warpgroups

    modules = [module for name, module in sys.modules.items() if name.startswith("cute_kernels.")]
    with ExitStack() as changes:
        changes.enter_context(mock.patch.dict(os.environ, {fa4.STRATEGY_VARIABLE: strategy}))
        for module in modules:
            if hasattr(module, "has_warpgroups"):
                changes.enter_context(mock.patch.object(module, "has_warpgroups", asked))
        yield


@dataclass(frozen=True)
class Case:
    """One call of NSA, forward and backward."""

    config: NSAConfig
    tokens: int = 333
    first: int = 0
    """The token that the first query is."""
    documents: tuple[int, ...] = ()
    """Lengths of packed documents, instead of `tokens`; TAIL rows behind the last one belong to none."""
    starts: tuple[int, ...] = ()
    """The token that each document's first query is; none given: 0."""
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    v_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    tensors: tuple[str, ...] = ()
    """Optional inputs to give."""
    deterministic: bool = False
    recompute: bool = False
    warpgroups: bool = True
    """False: token mode's kernels as on GPUs without WGMMA."""
    strategy: str = "sm_90"
    """sm_100: tile mode with Blackwell's tiles and lists."""

    def inputs(self, device: str) -> NSAInputs:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = self.dtype, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

        keys = (sum(self.documents) + TAIL,) if self.documents else (self.batch, self.tokens)
        rows = (*keys[:-1], keys[-1] - self.first - sum(self.starts))
        entries = (*keys[:-1], self.config.num_compressed(keys[-1]))
        k, v = (self.kv_heads, self.dim), (self.kv_heads, self.v_dim)
        shapes: dict[str, tuple[int, ...]] = {
            **{f"k_{branch}": (*keys, *k) for branch in ("slc", "win")},
            **{f"v_{branch}": (*keys, *v) for branch in ("slc", "win")},
            "k_cmp": (*entries, *k),
            "v_cmp": (*entries, *v),
            "gates": (*rows, self.heads, 3),
            "gate_proj_weight": (self.heads, 3, self.dim),
            "w_k_compress": (*k, self.dim),
            "w_v_compress": (*v, self.v_dim),
        }
        given = {
            name: normal(*shapes[name], scale=shapes[name][-1] ** -0.5 if name in WEIGHTS else 1.0)
            for name in self.tensors
        }
        qkv = [normal(*rows, self.heads, self.dim), *(normal(*keys, *of) for of in (k, v))]
        if self.documents:
            bounds = bounds_of(self.documents, device)
            if not self.starts:
                return NSAInputs(*qkv, **given, cu_seqlens=bounds)
            starts = torch.tensor(self.starts, dtype=torch.int32).to(device)
            before = torch.nn.functional.pad(starts.cumsum(0), [1, 0])
            return NSAInputs(*qkv, **given, cu_seqlens=(bounds - before).int(), cu_seqlens_k=bounds, q_start=starts)
        return NSAInputs(*qkv, **given)

    def run(self, device: str, *, check: bool, place: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Tensor]:
        """Forward and backward, and the forward of which nothing but out is wanted.

        Args:
            check: the results. place: gives each floating-point input the memory that the kernels see it in.

        Returns:
            out and, of the forward alone, "out alone"; and the gradient of each input under its name.
        """
        from cute_kernels import backward, forward

        inputs = self.inputs(device).map(place)
        shape = (*inputs.q.shape[:-1], self.v_dim)
        do = place(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, self.dtype))
        with as_asked(self.warpgroups, self.strategy):
            out, saved = forward.nsa_saving(inputs, self.config, recompute=self.recompute)
            gradients = backward.nsa_backward(inputs, self.config, saved, do, deterministic=self.deterministic)
            alone, _ = forward.nsa(inputs, self.config, aux=False)
        results = {"out": out, "out alone": alone, **gradients}
        if check:
            indices, cmp_indices = forward.Saved.from_list(saved, inputs, self.config)[2:4]
            self.check(inputs, do, results, indices, cmp_indices)
        return results

    def check(
        self, inputs: NSAInputs, do: Tensor, got: dict[str, Tensor], indices: Tensor, cmp_indices: Tensor | None
    ) -> None:
        """Against fp64 with the kernels' own selections; of packs, for which these cannot be given, that all is finite.

        Tests hold results to their error budgets; here a norm that is wrong by 2^-5 tells that something went wrong.
        """
        wrong = [name for name, x in got.items() if not x.isfinite().all()]
        if not self.documents:
            leaves = inputs.map(lambda x: x.double().requires_grad_())
            chosen = {"indices": indices.long(), "cmp_indices": None if cmp_indices is None else cmp_indices.long()}
            out, _ = reference.nsa(leaves, self.config, **chosen)
            names = [name for name in leaves.tensors() if name in got]
            of = torch.autograd.grad(out, [getattr(leaves, name) for name in names], do.double())
            expected = {"out": out, "out alone": out, **dict(zip(names, of, strict=True))}
            wrong += [name for name, x in got.items() if (x - expected[name]).norm() > 2**-5 * expected[name].norm()]
        if wrong:
            raise ArithmeticError(f"{', '.join(wrong)}: not finite, or not what fp64 gives")


def bounds_of(documents: Sequence[int], device: str) -> Tensor:
    return torch.tensor([0, *accumulate(documents)], dtype=torch.int32).to(device)


def checked(results: dict[str, Tensor], check: bool) -> dict[str, Tensor]:
    """The results, which must be finite if `check` is True."""
    if check and not all(bool(x.isfinite().all()) for x in results.values()):
        raise ArithmeticError("not finite")
    return results


@dataclass(frozen=True)
class Neighborhood:
    """Neighborhood attention forward and backward: FlashAttention-4's kernels over our views."""

    tokens: int
    options: Mapping[str, Any]

    def run(self, device: str, *, check: bool) -> dict[str, Tensor]:
        from cute_kernels import neighborhood

        generator = torch.Generator().manual_seed(0)
        q, k, v, do = (torch.randn((1, self.tokens, 4, 64), generator=generator) for _ in range(4))
        q, k, v, do = (x.to(device, torch.bfloat16) for x in (q, k, v, do))
        window = {"softmax_scale": None, "boundary": "truncate", "causal": False, "backend": "cute", **self.options}
        out, lse = neighborhood.forward(q, k, v, **window)
        gradients = neighborhood.backward(do, q, k, v, out, lse, **window)
        return checked({"out": out, **dict(zip("qkv", gradients, strict=True))}, check)


@dataclass(frozen=True)
class Decoding:
    """Steps of decoding over a cache that the reference filled, beside the reference's own."""

    config: NSAConfig
    cached: tuple[int, ...]
    queries: int = 1

    def run(self, device: str, *, check: bool) -> dict[str, Tensor]:
        from cute_kernels import decoding

        generator = torch.Generator().manual_seed(0)
        batch, results = len(self.cached), {}
        caches = [
            NSACache.empty(
                self.config,
                batch,
                max(self.cached) + 3 * self.queries,
                heads=None if self.config.token_mode else 16,
                heads_kv=1,
                dim=64,
                dtype=torch.bfloat16,
                device=device,
            )
            for _ in range(2)
        ]

        def step(tokens: int, new: tuple[int, ...] | None, *runs: Callable[..., Tensor]) -> list[Tensor]:
            given = (torch.randn((batch, tokens, heads, 64), generator=generator) for heads in (16, 1, 1))
            inputs = NSAInputs(*[x.to(device, torch.bfloat16) for x in given])
            counts = None if new is None else torch.tensor(new, dtype=torch.int32, device=device)
            outs = []
            for run, own in zip(runs, caches, strict=True):
                with torch.no_grad(), own.table.step(tokens, counts) as opened:
                    outs.append(run(inputs, self.config, own, opened))
                    opened.done.append(own)
            return outs

        step(max(self.cached), self.cached, *[decoding_reference.nsa_with_cache] * 2)
        for i in range(2):
            got, expected = step(self.queries, None, decoding.nsa_with_cache, decoding_reference.nsa_with_cache)
            results[f"out of step {i}"] = got
            if check and not (got - expected).norm() <= 2**-5 * expected.norm():
                raise ArithmeticError(f"step {i} is not finite, or not what the reference gives")
        return results


@dataclass(frozen=True)
class GivenBlocks:
    """Blocks that an indexer chooses, and attention to them, forward and backward; packed documents or one sequence."""

    documents: tuple[int, ...] = ()
    tokens: int = 333
    first: int = 0
    """The token that the first query is."""
    parts: int | None = None
    """Of the keys, that CTAs select from."""
    size: int = 64
    heads: int = 4
    warpgroups: bool = True
    deterministic = True

    def run(self, device: str, *, check: bool, place: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Tensor]:
        from cute_kernels import block_sparse
        from cute_kernels.select.block_max import top_blocks_by_max

        generator = torch.Generator().manual_seed(0)
        lead = (sum(self.documents) + TAIL,) if self.documents else (1, self.tokens)
        given = (torch.randn((*lead, heads, 64), generator=generator) for heads in (self.heads, 2, 2, self.heads, 2, 1))
        q, k, v, do, q_idx, k_idx = (place(x.to(device, torch.bfloat16)) for x in given)
        if self.first > 0:
            q, do, q_idx = (x[:, self.first :] for x in (q, do, q_idx))
        bounds = bounds_of(self.documents, device) if self.documents else None
        with as_asked(self.warpgroups):
            options = {"block_size": self.size, "k": 3, "local": 1, "parts": self.parts}
            blocks = top_blocks_by_max(q_idx, k_idx, bounds, None, None, **options)
            tensors = q, k, v, blocks, bounds, None, None
            how: dict[str, Any] = {"block_size": self.size, "causal": True, "softmax_scale": 0.125}
            out, lse = block_sparse.forward(*tensors, **how)
            gradients = block_sparse.backward(do, *tensors, out, lse, **how)
        return checked({"out": out, **dict(zip("qkv", gradients, strict=True))}, check)


TAIL = 9
WEIGHTS = ("gate_proj_weight", "w_k_compress", "w_v_compress")
LENGTHS = (0, 601, 1, 64, 255)
TILES = NSAConfig(num_selected_blocks=3, window_size=100)
ENTRIES = NSAConfig(
    compress_block_size=4, select_block_size=64, num_selected_blocks=3, num_cmp_selected_blocks=2, n_block_size=64
)
TOKENS = NSAConfig.paper(num_selected_blocks=6, window_size=200)
MANY: dict[str, Any] = {"heads": 16, "kv_heads": 1}
"""Heads for which blocks of a few hundred tokens have more query rows than one work tile."""
MOST: dict[str, Any] = {"heads": 64, "kv_heads": 1, "tokens": 201}
"""Heads for which attend/query_outer.py stands in."""

CASES: dict[str, Any] = {
    "tiles": Case(TILES, tensors=("gate_proj_weight",), deterministic=True),
    "tiles, batch": Case(
        NSAConfig(
            compress_block_size=32,
            compress_stride=16,
            select_block_size=64,
            num_selected_blocks=4,
            num_init_blocks=1,
            num_local_blocks=2,
        ),
        batch=2,
        dim=128,
        v_dim=128,
        dtype=torch.float16,
        tensors=("gates",),
    ),
    "tiles, chosen entries": Case(ENTRIES, tokens=601, tensors=("w_k_compress", "w_v_compress"), recompute=True),
    "tiles, D_v": Case(TILES, batch=2, v_dim=128, tensors=("gate_proj_weight",)),
    "tiles, not causal": Case(
        NSAConfig(num_selected_blocks=3, window_size=100, causal=False, share_heads_in_group=True)
    ),
    "tiles, many heads": Case(
        NSAConfig(q_tile_size=128, select_block_size=128, num_selected_blocks=3), tokens=513, **MANY
    ),
    "tiles, documents": Case(TILES, documents=LENGTHS, tensors=("gate_proj_weight", "k_win", "v_win")),
    "tiles, documents, chosen entries": Case(ENTRIES, documents=LENGTHS, tensors=("gates",)),
    "tiles, continued documents": Case(TILES, documents=LENGTHS, starts=(0, 256, 0, 0, 0), tensors=("gates",)),
    "tiles of Blackwell": Case(TILES, tokens=601, strategy="sm_100"),
    "tiles, last queries": Case(TILES, tokens=601, first=256, tensors=("gates",), deterministic=True),
    "tiles of Blackwell, last queries": Case(TILES, tokens=901, first=512, strategy="sm_100"),
    "tokens": Case(TOKENS, tokens=601, tensors=("gate_proj_weight",), deterministic=True, **MANY),
    "tokens, last queries": Case(TOKENS, tokens=601, first=320, deterministic=True, **MANY),
    "tokens, last queries, off tiles": Case(TOKENS, tokens=601, first=311, tensors=("gates",), **MANY),
    "tokens, nothing forced": Case(
        NSAConfig.paper(
            select_block_size=256, num_selected_blocks=2, num_init_blocks=0, num_local_blocks=0, window_size=100
        ),
        tokens=641,
        dim=128,
        v_dim=64,
        dtype=torch.float16,
        tensors=("gates",),
    ),
    "tokens, nothing forced, batch": Case(
        NSAConfig.paper(num_selected_blocks=3, num_init_blocks=0, num_local_blocks=0, window_size=100),
        tokens=201,
        batch=2,
        tensors=("gates",),
    ),
    "tokens, no entries": Case(TOKENS, tokens=31, tensors=("gate_proj_weight",), **MANY),
    "tokens, many blocks": Case(
        NSAConfig.paper(num_selected_blocks=33, window_size=200), tokens=2201, heads=2, kv_heads=1
    ),
    "tokens, documents": Case(TOKENS, documents=LENGTHS, recompute=True, **MANY),
    "tokens, continued documents": Case(TOKENS, documents=LENGTHS, starts=(0, 311, 0, 5, 100), **MANY),
    "tokens, few heads a group": Case(TOKENS, tokens=601, first=311),
    "tokens, few heads a group, documents": Case(TOKENS, documents=LENGTHS, starts=(0, 311, 0, 5, 100)),
    "tokens, 64 heads": Case(TOKENS, **MOST),
    "tokens, 64 heads, documents": Case(TOKENS, documents=(130, 71), heads=64, kv_heads=1),
    "tokens, D_v": Case(TOKENS, v_dim=128, **MANY),
    "tokens, no WGMMA": Case(TOKENS, tokens=601, warpgroups=False, **MANY),
    "tokens, no WGMMA, D_v": Case(TOKENS, v_dim=128, warpgroups=False, **MANY),
    "tokens, no WGMMA, 64 heads": Case(TOKENS, warpgroups=False, **MOST),
    "decoding": Decoding(TOKENS, (0, 31, 1300)),
    "decoding, four queries": Decoding(TOKENS, (62, 700), queries=4),
    "decoding, tiles": Decoding(TILES, (62, 700), queries=4),
    "decoding, prefill": Decoding(TOKENS, (0, 31, 150), queries=70),
    "given blocks": GivenBlocks(tokens=601, size=128),
    "given blocks, no WGMMA": GivenBlocks(warpgroups=False),
    "given blocks, last queries": GivenBlocks(tokens=2300, first=2290, parts=2),
    "given blocks, last queries, no WGMMA": GivenBlocks(tokens=2300, first=2290, parts=2, warpgroups=False),
    "given blocks, documents": GivenBlocks(documents=LENGTHS, heads=16),
    "given blocks, documents, no WGMMA": GivenBlocks(documents=LENGTHS, warpgroups=False),
    "neighborhood": Neighborhood(333, {"kernel_size": 101, "dilation": 2}),
}

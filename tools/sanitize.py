#!/usr/bin/env python3
"""Runs every CUDA kernel of ours, forward and backward, under compute-sanitizer. Needs a Hopper GPU.

    cases, each in a plain process: kernels are compiled and kept on disk, results compared with fp64
    tool by tool, the same cases again under compute-sanitizer -> findings by kernel -> OUT/sanitizer-TOOL.txt

Each tensor has a cudaMalloc of its own, so that what is read or written behind a tensor is behind an allocation. The
exit status is 1 if a tool found anything in a kernel of ours, or did not see all of them: every function of
cute_kernels that compiles a kernel, with each of its flags on and off. What it found in kernels of others is listed.

So that a tool that sees nothing does not pass, one more process makes memcheck and initcheck a fault to find.

`--dry` launches nothing, needs no GPU, and says which kernels the cases would miss.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.commit import ROOT
from bench.report import RESULTS, environment
from cute_kernels.runtime.launches import THREAD, start_of
from nsa import NSACache, NSAConfig, reference
from nsa.decoding import reference as decoding_reference
from nsa.inputs import NSAInputs

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OTHERS = "cute_kernels.fa4"
"""Module whose kernels are not ours."""
PLAIN, DRY = "plain", "dry"
"""Other ways to run a child: on the GPU as it is, and without one."""

COMMON_OPTIONS = (
    *("--target-processes", "application-only", "--launch-timeout", "300", "--check-exit-code", "no"),
    *("--destroy-on-device-error", "kernel", "--show-backtrace", "device", "--print-limit", "200"),
)
"""Thousands of findings, each printed, take minutes; what was not printed is counted, and makes a run fail."""
BARRIERS = ("--num-cuda-barriers", "64")
"""More than any kernel has; the tools undercount barriers that are not cuda::barrier in a source."""
ATTENTION = ("--kernel-name", "regex=cute_kernels|flash_attn")
"""Leaves torch's kernels out."""
TOOL_OPTIONS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--padding", "4096", "--report-api-errors", "no"),  # padding: behind it the next allocation begins
    "racecheck": (*BARRIERS, *ATTENTION),
    "initcheck": ATTENTION,
    "synccheck": (*BARRIERS, *ATTENTION),
}
TRACKING = "--initcheck-track-filtered-global-memory"
"""From CUDA 13.5 on initcheck knows by this option what kernels write that it leaves out."""
FIRST_PORT, PORTS = 49152, 16
"""Processes of compute-sanitizer that run at once talk to their programs through ports of their own."""
TIME_LIMIT = 300
"""Seconds of a child."""


# ---------------------------------------------------------------- cases


@contextmanager
def as_asked(warpgroups: bool, strategy: str = "sm_90") -> Iterator[None]:
    """Inside, kernels are chosen as for a GPU with or without WGMMA, and FlashAttention-4's tiles and lists by name."""
    from cute_kernels.fa4 import rules as fa4

    modules = [module for name, module in sys.modules.items() if name.startswith("cute_kernels.")]
    users = [module for module in modules if hasattr(module, "has_warpgroups")]
    kept, kept_strategy = [module.has_warpgroups for module in users], os.environ.pop(fa4.STRATEGY_VARIABLE, None)
    os.environ[fa4.STRATEGY_VARIABLE] = strategy
    for module in users:
        module.has_warpgroups = lambda _: warpgroups
    try:
        yield
    finally:
        for module, own in zip(users, kept, strict=True):
            module.has_warpgroups = own
        del os.environ[fa4.STRATEGY_VARIABLE]
        if kept_strategy is not None:
            os.environ[fa4.STRATEGY_VARIABLE] = kept_strategy


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
            bounds = torch.tensor([0, *accumulate(self.documents)], dtype=torch.int32).to(device)
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
        results = {"out": out, **dict(zip("qkv", gradients, strict=True))}
        if check and not all(bool(x.isfinite().all()) for x in results.values()):
            raise ArithmeticError("not finite")
        return results


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
        bounds = None
        if self.documents:
            bounds = torch.tensor([0, *accumulate(self.documents)], dtype=torch.int32).to(device)
        with as_asked(self.warpgroups):
            options = {"block_size": self.size, "k": 3, "local": 1, "parts": self.parts}
            blocks = top_blocks_by_max(q_idx, k_idx, bounds, None, None, **options)
            tensors = q, k, v, blocks, bounds, None, None
            how: dict[str, Any] = {"block_size": self.size, "causal": True, "softmax_scale": 0.125}
            out, lse = block_sparse.forward(*tensors, **how)
            gradients = block_sparse.backward(do, *tensors, out, lse, **how)
        results = {"out": out, **dict(zip("qkv", gradients, strict=True))}
        if check and not all(bool(x.isfinite().all()) for x in results.values()):
            raise ArithmeticError("not finite")
        return results


TAIL = 9
WEIGHTS = ("gate_proj_weight", "w_k_compress", "w_v_compress")
LENGTHS = (0, 601, 1, 64, 255)
TILES = NSAConfig(num_selected_blocks=3, window_size=100)
ENTRIES = NSAConfig(
    compress_block_size=4, select_block_size=64, num_selected_blocks=3, num_cmp_selected_blocks=2, n_block_size=64
)
TOKENS = NSAConfig.paper(num_selected_blocks=6, window_size=200)
MANY = {"heads": 16, "kv_heads": 1}
"""Heads for which blocks of a few hundred tokens have more query rows than one work tile."""
MOST: dict[str, Any] = {"heads": 64, "kv_heads": 1, "tokens": 201}
"""Heads for which attend/query_outer.py stands in."""

CASES: dict[str, Case | Neighborhood | Decoding | GivenBlocks] = {
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


PLANTED, FAULTY = "planted fault", "BlockMean"
"""In place of a case's name, and the kernel that finds memory as it must not be."""


def plant_fault(tool: str) -> None:
    """Means of keys that nobody wrote, for memcheck of keys whose memory ends halfway."""
    from cute_kernels.pool.compress import block_means

    k, v = (torch.empty((1, 128, 2, 64), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    if tool == "memcheck":
        k.untyped_storage().resize_(k.untyped_storage().nbytes() // 2)
    block_means(k, v, 64, 64, torch.bfloat16)
    torch.cuda.synchronize()


# ---------------------------------------------------------------- kernels, and which of them were launched


@cache
def every_form(root: Path = ROOT) -> set[str]:
    """Functions of cute_kernels that compile a kernel, once for each value of each flag, as the sources define them."""
    found = set()
    sources = root / "cute_kernels"
    for path in sorted(sources.rglob("*.py")):
        module = ".".join(path.relative_to(sources).with_suffix("").parts)
        if f"{sources.name}.{module}".startswith(OTHERS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or "compiled_once" not in map(ast.unparse, node.decorator_list):
                continue
            arguments = (*node.args.args, *node.args.kwonlyargs)
            flags = [a.arg for a in arguments if a.annotation is not None and ast.unparse(a.annotation) == "bool"]
            for value in (True, False):
                found |= forms(f"{module}.{node.name}", dict.fromkeys(flags, value))
    return found


def forms(function: str, flags: Mapping[str, bool]) -> set[str]:
    return {f"{function} {flag}={value}" for flag, value in flags.items()} or {function}


class Launched:
    """Told of all launches: their forms."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.forms: set[str] = set()

    def launch(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        build = getattr(kernel, "build", None)
        if build is not None and not build.__module__.startswith(OTHERS):
            signature = inspect.signature(build)
            bound = signature.bind(*kernel.arguments, **kernel.keywords)
            bound.apply_defaults()
            flags = [flag for flag, parameter in signature.parameters.items() if parameter.annotation == "bool"]
            name = f"{build.__module__.removeprefix('cute_kernels.')}.{build.__name__}"
            self.forms |= forms(name, {flag: bound.arguments[flag] for flag in flags})
        if not self.dry:
            start_of(kernel)(*arguments)

    def compile_ahead(self, kernel: Any) -> None:
        pass


# ---------------------------------------------------------------- a child: some cases, one after the other


def run_here(how: str, names: Sequence[str], results: Path) -> int:
    """Writes a line of JSON for each case: its name, seconds, what it launched, and what went wrong."""
    launched, device = Launched(dry=how == DRY), "cpu" if how == DRY else "cuda"
    type(THREAD).listener = launched  # also of autograd's thread
    if how == DRY:
        leave_fa4_out()
    elif how == "initcheck":
        vouch_for_tensor_copies()
    failed = False
    with results.open("w", encoding="utf-8") as lines:
        for name in names:
            start, error = time.monotonic(), ""
            launched.forms.clear()
            try:
                CASES[name].run(device, check=how == PLAIN)
                if device == "cuda":
                    torch.cuda.synchronize()
            except Exception as problem:
                traceback.print_exc()
                error, failed = f"{type(problem).__name__}: {problem}", True
            done = {
                "case": name,
                "seconds": time.monotonic() - start,
                "launched": sorted(launched.forms),
                "error": error,
            }
            print(json.dumps(done), file=lines, flush=True)
    return 1 if failed else 0


def leave_fa4_out() -> None:
    from cute_kernels.fa4 import interface as fa4

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        return options.get("into") or (o, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32))

    def differentiate(given: fa4.Gradients, *_: Any, statistics: fa4.WriteStatistics | None = None, **__: Any) -> None:
        if statistics is not None:
            statistics(*torch.empty((2, *given.lse.shape), dtype=torch.float32, device=given.lse.device))

    fa4.attend, fa4.differentiate = attend, differentiate


def vouch_for_tensor_copies() -> None:
    """Multiply by 1 what was just written by bulk tensor copies (TMA), which initcheck does not see.

    What FlashAttention-4's kernels and our backwards for Hopper write would be uninitialised to whoever reads it. torch
    is that reader then, so what initcheck says of it counts for nothing, and what it says of our kernels counts.
    """
    from cute_kernels import backward
    from cute_kernels.fa4 import interface as fa4

    def vouching(function: Callable[..., Any], results: Callable[..., Iterable[Tensor | None]]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            returned = function(*arguments, **options)
            for x in results(returned, *arguments, **options):
                if x is not None:
                    x.mul_(1)
            return returned

        return run

    fa4.attend = vouching(fa4.attend, lambda returned, *_, **__: returned)
    fa4.differentiate = vouching(fa4.differentiate, lambda _, given, *__, **___: (given.dq, given.dk, given.dv))
    backward.compressed_backward = vouching(backward.compressed_backward, lambda *_, dq, **__: (dq,))
    backward.selected_backward = vouching(backward.selected_backward, lambda returned, *_, **__: returned)
    backward.window_backward = vouching(backward.window_backward, lambda *_, into, **__: into)


# ---------------------------------------------------------------- what compute-sanitizer wrote

OURS = re.compile(r"cute_kernels[a-z0-9_]+?([A-Z]\w*?)_object")
FA4 = re.compile(r"flash_attncute[a-z0-9_]*?([A-Z]\w*?)_object")
PLACE = re.compile(r"(?:\bat|Frame:) ?(\S.*?)\+0x[0-9a-f]+")
RECORD = re.compile(r"^========= (?=\S)")
COUNTED = re.compile(r"SUMMARY: ([\d,]+) (?:error|hazard)")
MORE = re.compile(r"^=========\s{2,}(?=\S)")


class Finding(NamedTuple):
    kernel: str
    """Name of the class of our kernels and FlashAttention-4's, else of the function."""
    ours: bool
    what: str
    text: str


@dataclass
class Log:
    """What a process of compute-sanitizer wrote."""

    findings: list[Finding] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    """About itself: it may have missed something."""
    summaries: list[str] = field(default_factory=list)

    @property
    def untold(self) -> int:
        """Findings that it counted but did not print."""
        counted = [int(n.replace(",", "")) for text in self.summaries for n in COUNTED.findall(text)]
        return max(0, max(counted, default=0) - len(self.findings) - len(self.messages))


def parse(text: str) -> Log:
    log, records = Log(), []
    for line in text.splitlines():
        if RECORD.match(line):
            records.append([RECORD.sub("", line)])
        elif MORE.match(line) and records:
            records[-1].append(MORE.sub("", line))
    for record in records:
        whole = "\n    ".join(record)
        places = PLACE.findall(whole)
        if "SUMMARY" in record[0]:
            log.summaries.append(record[0])
        elif places:
            log.findings.append(_finding(whole, record[0], places))
        elif record[0] != "COMPUTE-SANITIZER":
            log.messages.append(whole)
    return log


def _finding(whole: str, first: str, places: Sequence[str]) -> Finding:
    what = re.split(r" at (?=\S+\+0x)| at .*\+0x| by threads", first)[0].rstrip(" .")
    for ours, pattern in ((True, OURS), (False, FA4)):
        if match := pattern.search(whole):
            return Finding(match[1], ours, what, whole)
    return Finding(re.sub(r"\(.*|<.*", "", places[-1]), False, what, whole)


# ---------------------------------------------------------------- the parent


@dataclass
class Outcome:
    """Of all children of a tool."""

    logs: list[Log] = field(default_factory=list)
    launched: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def findings(self, *, ours: bool) -> list[Finding]:
        return [finding for log in self.logs for finding in log.findings if finding.ours == ours]

    def add(self, names: Sequence[str], results: Path, output: str, log: Log | None) -> None:
        """One child's."""
        if log is not None and list(names) == [PLANTED]:
            if not any(finding.kernel == FAULTY for finding in log.findings):
                self.problems.append(f"the {PLANTED} was not found\n{output[-2000:]}")
            return
        text = results.read_text(encoding="utf-8") if results.exists() else ""
        done = {one["case"]: one for one in map(json.loads, text.splitlines())}
        if undone := [name for name in names if name not in done]:
            self.problems.append(f"{', '.join(undone)}: the process ended before this was done\n{output[-2000:]}")
        for name, one in done.items():
            if one["error"]:
                self.problems.append(f"{name}: {one['error']}\n{output[-2000:]}")
            else:
                self.launched |= set(one["launched"])
        if log is not None:
            self.logs.append(log)
            self.problems += [f"{', '.join(names)}: {message}" for message in log.messages]
            if not log.summaries:
                self.problems.append(f"{', '.join(names)}: the tool ended without a summary")
            if log.untold:
                self.problems.append(f"{', '.join(names)}: {log.untold} findings were not printed")


def kept_apart(cache: Path | None) -> dict[str, str]:
    """Environment of the children: an allocation for each tensor, and compiled kernels in a folder, None: not kept."""
    kept = {"NSA_KERNELS_JIT_CACHE": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    if cache is not None:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = {
            "NSA_KERNELS_JIT_CACHE": str(cache / "ours"),
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache / "fa4"),
        }
    return {**os.environ, **kept, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}


def run_cases(
    how: str, shares: Sequence[Sequence[str]], prefix: Sequence[Sequence[str]], environ: Mapping[str, str], folder: Path
) -> Outcome:
    """One child for each share of the cases. Args: `prefix`: of each child's command."""
    outcome, start = Outcome(), time.monotonic()

    def run(number: int) -> tuple[Path, str, Log | None]:
        results, output, log = (folder / f"{how}-{number}.{kind}" for kind in ("json", "out", "log"))
        cases = [part for name in shares[number] for part in (["--planted"] if name == PLANTED else ["--case", name])]
        own = [sys.executable, __file__, "--child", how, "--results", str(results), *cases]
        front = [part.replace("LOG", str(log)) for part in prefix[number]]
        with output.open("w", encoding="utf-8") as file:
            try:
                options: Any = {"env": environ, "stdout": file, "stderr": file, "timeout": TIME_LIMIT, "check": False}
                print(f"exit status {subprocess.run([*front, *own], **options).returncode}", file=file)
            except subprocess.TimeoutExpired:
                print(f"stopped after {TIME_LIMIT} s", file=file)
        written = output.read_text(encoding="utf-8", errors="replace")
        found = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return results, written, parse(found) if front else None

    with ThreadPoolExecutor(max(len(shares), 1)) as pool:
        for names, (results, output, log) in zip(shares, pool.map(run, range(len(shares))), strict=True):
            outcome.add(names, results, output, log)
    outcome.seconds = time.monotonic() - start
    return outcome


def shared_out(names: Sequence[str], children: int) -> list[list[str]]:
    count = max(1, min(children, len(names)))
    return [list(names[i::count]) for i in range(count)]


def missing(outcome: Outcome) -> list[str]:
    return sorted(every_form() - outcome.launched)


def report(tool: str, outcome: Outcome, facts: Mapping[str, Any], options: Sequence[str], names: Sequence[str]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    ours, others = (outcome.findings(ours=of) for of in (True, False))
    lines = [
        f"compute-sanitizer {tool} over every CUDA kernel of nsa-kernels, forward and backward (tools/sanitize.py).",
        "",
        f"device: {facts['device']}",
        f"versions: {versions}",
        f"commit: {facts['commit']}",
        f"command: python tools/sanitize.py --tool {tool}",
        f"options: {' '.join(options)}",
        f"cases: {'; '.join(names)}",
        f"kernels of ours: {len(outcome.launched)} forms launched, {len(missing(outcome))} missed",
        f"findings in kernels of ours: {len(ours)}",
        *listed(ours),
        f"findings in kernels of others: {len(others)}",
        *listed(others),
        f"problems: {len(all_problems(outcome))}",
        *(f"    {line}" for problem in all_problems(outcome) for line in problem.splitlines()),
        "summaries of its processes:",
        *(f"    {count} x {what}" for what, count in Counter(s for log in outcome.logs for s in log.summaries).items()),
        f"seconds: {outcome.seconds:.0f}",
        "",
        "forms:",
        *(f"    {form}" for form in sorted(outcome.launched)),
    ]
    return "\n".join(lines) + "\n"


def listed(findings: Sequence[Finding]) -> Iterator[str]:
    """Each kind with its number and one of them whole."""
    for (kernel, what), count in Counter((finding.kernel, finding.what) for finding in findings).most_common():
        yield f"    {count} x {kernel}: {what}; one of them:"
        one = next(finding for finding in findings if (finding.kernel, finding.what) == (kernel, what))
        yield from (f"        {line[:400]}" for line in one.text.splitlines())


def all_problems(outcome: Outcome) -> list[str]:
    missed = [f"not launched: {form}" for form in missing(outcome)]
    return [*outcome.problems, *missed]


def passes(outcome: Outcome) -> bool:
    return not outcome.findings(ours=True) and not all_problems(outcome)


def find_sanitizer() -> str | None:
    folders = [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))


def asked(program: str, of: str) -> str:
    return subprocess.run([program, of], capture_output=True, text=True, check=True).stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run every CUDA kernel under compute-sanitizer.")
    parser.add_argument("--tool", default=",".join(TOOLS), help="some of %(default)s (default: all, at once)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the reports (default: bench/results)")
    parser.add_argument("--sanitizer", default=find_sanitizer(), help="compute-sanitizer (default: the one found)")
    parser.add_argument(
        "--option", action="append", default=[], help="more for it, as in --option=--check-tensor-ops=yes"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: %(default)s)"
    )
    parser.add_argument("--cache", type=Path, help="keep compiled kernels here (default: until this run ends)")
    parser.add_argument("--fresh", action="store_true", help="let each process compile what it launches")
    parser.add_argument("--case", action="append", choices=CASES, help="these alone, which misses kernels")
    parser.add_argument("--dry", action="store_true", help="launch nothing, on a CPU, and name what would be missed")
    parser.add_argument("--child", choices=(PLAIN, DRY, *TOOLS), help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--planted", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child and args.planted:
        plant_fault(args.child)
        return 0
    names, tools = list(args.case or CASES), args.tool.split(",")
    if unknown := sorted(set(tools) - set(TOOLS)):
        parser.error(f"--tool takes {', '.join(TOOLS)}, got {', '.join(unknown)}")
    if args.child:
        return run_here(args.child, names, args.results)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        environ = kept_apart(None if args.fresh else args.cache or folder / "cache")
        if args.dry:
            environ["CUTE_DSL_ARCH"] = "sm_90a"
            outcome = run_cases(DRY, [names], [[]], environ, folder)
            print(*all_problems(outcome) or [f"{len(outcome.launched)} forms, none missed"], sep="\n")
            return 0 if passes(outcome) else 1
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
            parser.error("needs a Hopper GPU")
        if args.sanitizer is None:
            parser.error("compute-sanitizer was not found: --sanitizer names it")

        plain = run_cases(PLAIN, shared_out(names, args.jobs), [[]] * len(names), environ, folder)
        print(f"plain: {plain.seconds:.0f} s, {len(plain.launched)} forms", *all_problems(plain), sep="\n", flush=True)
        version, manual = (asked(args.sanitizer, of) for of in ("--version", "--help"))
        facts = environment(torch.device("cuda"))
        facts["versions"]["compute-sanitizer"] = version.partition("Version ")[2].strip()
        cases = shared_out(names, max(1, args.jobs // len(tools)))

        def run_tool(number: int) -> bool:
            tool = tools[number]
            shares = [*cases, [PLANTED]] if tool in ("memcheck", "initcheck") else cases
            seen = () if tool == "initcheck" and TRACKING not in manual else TOOL_OPTIONS[tool]
            options = [*COMMON_OPTIONS, *seen, *args.option]
            first = FIRST_PORT + number * (len(cases) + 1) * PORTS
            prefix = [
                [args.sanitizer, "--tool", tool, "--log-file", "LOG", "--port", str(first + i * PORTS), *options]
                for i in range(len(shares))
            ]
            outcome = run_cases(tool, shares, prefix, environ, folder)
            args.out.mkdir(parents=True, exist_ok=True)
            text = report(tool, outcome, facts, options, names)
            (args.out / f"sanitizer-{tool}.txt").write_text(text, encoding="utf-8")
            print(
                f"{tool}: {'passes' if passes(outcome) else 'FAILS'}",
                text.partition("forms:")[0][:2500],
                sep="\n",
                flush=True,
            )
            return passes(outcome)

        with ThreadPoolExecutor(len(tools)) as pool:
            passed = list(pool.map(run_tool, range(len(tools))))
        return 0 if all(passed) and not plain.problems else 1


if __name__ == "__main__":
    sys.exit(main())

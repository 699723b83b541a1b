#!/usr/bin/env python3
"""Compiles every CuTe kernel of ours and every FlashAttention-4 kernel that we call, without a GPU.

    one process per architecture -> its cases, one after the other -> a line each: size of the cubin, hash of its
    machine code, seconds

A case fails unless its cubin exists, was assembled for the architecture, and reads no uniform register that nothing
writes: some versions of ptxas assemble such code. Failures are repeated at the end; the exit status is 1 then. Hashes
are of instructions and constants alone: kernels' symbols, which hold names of modules and classes, are left out.
`--against LOG` compares hashes with those of an earlier log: the same machine code after a change of the sources has
nothing new to show on a GPU. `--kernels` compiles some kernels alone, whose lines take the place of theirs in the log.
Needs the packages of the extras `cuda` and `dev`: Triton brings nvdisasm.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "nvidia-cutlass-dsl", "flash-attn-4")


class Target(NamedTuple):
    fa4: str
    """FlashAttention-4's name of the architecture."""
    sms: int
    """Streaming multiprocessors, which kernels' grids are chosen for."""


TARGETS = {"sm_90a": Target("sm_90", 132), "sm_100a": Target("sm_100", 148)}

DIMS = (64, 128)
GROUPS = (1, 4, 8)
DTYPES = (torch.bfloat16, torch.float16)
SMS_VARIABLE = "FLASH_ATTENTION_NUM_SMS"


class Case(NamedTuple):
    """A kernel and what it is compiled for; None: the kernel does not depend on it."""

    kernel: str
    """Name of the class, or of the function in cute_kernels.fa4.interface."""
    variant: str
    dim: int | None
    group: int | None
    """G, query heads of a key/value head."""
    dtype: torch.dtype | None
    compile: Callable[[], bytes]
    """Returns the cubin."""

    @property
    def family(self) -> str:
        """What shares one source: a kernel of ours, or all of FlashAttention-4."""
        return self.kernel.partition(".")[0]


class Result(NamedTuple):
    arch: str
    kernel: str
    variant: str
    dim: str
    group: str
    dtype: str
    cubin: int
    """Bytes."""
    sha256: str
    """Of the cubin's machine code (`code_of`), the first digits."""
    seconds: float
    error: str = ""

    @property
    def line(self) -> str:
        size = "FAILED" if self.error else str(self.cubin)
        return LINE.format(*self[:6], size, self.sha256, f"{self.seconds:.1f}")


LINE = "{:8} {:15} {:26} {:>4} {:>4} {:9} {:>8} {:12} {:>6}"
HEADER = LINE.format("arch", "kernel", "variant", "D", "G", "dtype", "bytes", "sha256", "s")


# ---------------------------------------------------------------- what is compiled


def all_cases() -> Iterator[Case]:
    """The full matrix for the architecture of this process."""
    from cute_kernels.runtime.device import compute_capability

    yield from pool_cases()
    yield from score_cases()
    yield from token_cases()
    yield from block_max_cases()
    yield from list_cases()
    yield from document_cases()
    yield from gate_cases()
    yield from gate_gradient_cases()
    yield from row_statistics_cases()
    yield from gradient_sum_cases()
    yield from transposed_list_cases()
    yield from worklist_cases()
    yield from token_selected_cases()
    yield from decode_cases()
    if compute_capability(0)[0] == 9:
        yield from hopper_cases()
    for dim, group, dtype in itertools.product(DIMS, GROUPS, DTYPES):
        yield from fa4_cases(dim, group, dtype)
        yield from fa4_backward_cases(dim, group, dtype)


def pool_cases() -> Iterator[Case]:
    from cute_kernels.pool.compress import _compiled

    blocks, tiles = (32, 16, False), (256, 256, True)
    for dim, dtype in itertools.product(DIMS, DTYPES):
        variants: dict[str, tuple[Any, ...]] = {
            "keys+values": (blocks, dtype, dtype, dim, dim, False),
            "keys+values,fp32-out": (blocks, dtype, torch.float32, dim, dim, False),
            "keys+values,packed": (blocks, dtype, dtype, dim, dim, True),
            "tiles": (tiles, dtype, torch.float32, dim, None, False),
            "tiles,packed": (tiles, dtype, torch.float32, dim, None, True),
        }
        for variant, arguments in variants.items():
            yield Case("BlockMean", variant, dim, None, dtype, ours(_compiled, *arguments))


def score_cases() -> Iterator[Case]:
    from cute_kernels.lists.query_to_kv import Keys
    from cute_kernels.select.tile import _compiled
    from cute_kernels.select.topk import Blocks

    variants = {
        "plain": (Blocks(64, 64, 64, 16, init=1, local=2), Keys(64, 64), False),
        "overlapping": (Blocks(32, 16, 64, 16, init=1, local=2), Keys(32, 16), False),
        "overlapping,packed": (Blocks(32, 16, 64, 16, init=1, local=2), Keys(32, 16), True),
        "entries": (Blocks(1, 1, 128, 16, newest=True), Keys(32, 16), False),
        "entries,packed": (Blocks(1, 1, 128, 16, newest=True), Keys(32, 16), True),
    }
    for dim, dtype in itertools.product(DIMS, DTYPES):
        for variant, (blocks, keys, packed) in variants.items():
            run = ours(_compiled, dtype, dim, blocks, keys, 256, packed)
            yield Case("TileTopK", variant, dim, None, dtype, run)


def token_cases() -> Iterator[Case]:
    from cute_kernels.runtime.device import compute_capability
    from cute_kernels.select.token import _compiled
    from cute_kernels.select.topk import Blocks

    hopper = compute_capability(0)[0] == 9
    overlapping, plain = Blocks(32, 16, 64, 16, init=1, local=2), Blocks(64, 64, 64, 16)
    for dim, group, dtype in itertools.product(DIMS, GROUPS, DTYPES):
        variants = {
            "overlapping": (group, overlapping, False),
            "overlapping,packed": (group, overlapping, True),
            "overlapping,heads-x8": (8 * group, overlapping, False),
            "overlapping,blocks-x3": (group, replace(overlapping, count=48), False),
            "plain": (group, plain, False),
        }
        for variant, arguments in variants.items():
            yield Case("TokenTopK", variant, dim, group, dtype, ours(_compiled, dtype, dim, *arguments, hopper))


def block_max_cases() -> Iterator[Case]:
    from cute_kernels.runtime.device import compute_capability
    from cute_kernels.select.block_max import _compiled
    from cute_kernels.select.parts import _merge

    hopper = compute_capability(0)[0] == 9
    for dim, group, dtype in itertools.product(DIMS, GROUPS, DTYPES):
        variants = {"128,16+1": (128, 16, 1, False, False), "64,16+1,packed": (64, 16, 1, True, False)}
        variants |= {"128,16+1,parts": (128, 16, 1, False, True)}
        if group == GROUPS[1]:
            variants |= {"128,64+0": (128, 64, 0, False, False), "64,4+2": (64, 4, 2, False, False)}
        for variant, how in variants.items():
            run = ours(_compiled, dim, dtype, group, *how, hopper)
            yield Case("BlockMaxTopK", variant, dim, group, dtype, run)
    for count in (16, 64):
        yield Case("MergeParts", f"{count}", None, None, None, ours(_merge, count))


def list_cases() -> Iterator[Case]:
    from cute_kernels.lists.query_to_kv import Keys, _chosen, _prefix

    tokens, entries = Keys(), Keys(32, 16)
    variants = {
        "64-in-64": (tokens, 64, 64),
        "128-in-64": (tokens, 128, 64),
        "64-in-64,not-causal": (Keys(causal=False), 64, 64),
        "entries,128-in-128": (entries, 128, 128),
    }
    for (variant, (keys, size, width)), packed in itertools.product(variants.items(), (False, True)):
        run = ours(_chosen, keys, size, width, 256, entries=keys == entries, packed=packed)
        yield Case("ChosenLists", f"{variant},packed" if packed else variant, None, None, None, run)
    yield Case("PrefixLists", "entries", None, None, None, ours(_prefix, entries, 128, 128, None))
    yield Case("PrefixLists", "entries,packed", None, None, None, ours(_prefix, entries, 128, 128, 256))


def document_cases() -> Iterator[Case]:
    from cute_kernels.pool.documents import _align, _bounds

    for variant, given in {
        "bounds": (False, False),
        "bounds,starts": (True, False),
        "bounds,starts,counts": (True, True),
    }.items():
        yield Case("DocumentBounds", variant, None, None, None, ours(_bounds, 256, 256, 32, 16, *given))
    for dim, dtype in itertools.product(DIMS, DTYPES):
        variants = {
            "queries": (256, None, dim, (False, False)),
            "keys+values": (256, (dim, dim), None, (False, False)),
            "keys+values,96": (96, (dim, dim), None, (False, False)),
            "all": (256, (dim, dim), dim, (True, False)),
            "all,apart": (256, (dim, dim), dim, (True, True)),
        }
        for variant, (tile, dims, q_dim, records) in variants.items():
            run = ours(_align, tile, 16, dtype, dims, q_dim, records)
            yield Case("AlignRows", variant, dim, None, dtype, run)


def gate_cases() -> Iterator[Case]:
    from cute_kernels.gate.forward import _compiled

    for dim, dtype in itertools.product(DIMS, DTYPES):
        variants = {
            "projected": (dtype, torch.float32, False),
            "projected,packed": (dtype, torch.float32, True),
            "given": (None, dtype, False),
            "thirds": (None, None, False),
        }
        for variant, gates in variants.items():
            yield Case("GatedSum", variant, dim, None, dtype, ours(_compiled, dim, dim, dtype, *gates))


def gate_gradient_cases() -> Iterator[Case]:
    from cute_kernels.gate.backward import _compiled

    for dim, dtype in itertools.product(DIMS, DTYPES):
        variants = {
            "projected": (torch.float32, True, False),
            "projected,packed": (torch.float32, True, True),
            "given": (dtype, False, False),
            "given,fp32,packed": (torch.float32, False, True),
            "thirds": (None, False, False),
        }
        for variant, arguments in variants.items():
            run = ours(_compiled, dim, dim, dtype, *arguments)
            yield Case("GateGradients", variant, dim, None, dtype, run)


def row_statistics_cases() -> Iterator[Case]:
    from cute_kernels.attend.row_statistics import _compiled

    yield Case("RowStatistics", "fp32", None, None, None, ours(_compiled))


def gradient_sum_cases() -> Iterator[Case]:
    from cute_kernels.gate.partials import _compiled
    from cute_kernels.gate.sums import _keys, _queries
    from cute_kernels.lists.query_to_kv import Keys

    yield Case("AddPartials", "fp32", None, None, None, ours(_compiled))
    entries = Keys(32, 16)
    for dim, dtype in itertools.product(DIMS, DTYPES):
        for variant, arguments in {
            "three,projected": (3, dtype, False),
            "three,projected,packed": (3, torch.float32, True),
            "one": (1, None, False),
        }.items():
            yield Case("QueryGradients", variant, dim, None, dtype, ours(_queries, dim, dtype, *arguments))
        for variant, keys in {
            "two,entries": (2, entries, False),
            "two,entries,packed": (2, entries, True),
            "two,entries,shares": (2, entries, False, torch.float32),
            "one": (1, None, False),
        }.items():
            yield Case("KeyGradients", variant, dim, None, dtype, ours(_keys, (dim, dim), dtype, *keys))


def transposed_list_cases() -> Iterator[Case]:
    from cute_kernels.lists.kv_to_query import _bits, _prefix, _transposed
    from cute_kernels.lists.query_to_kv import Keys

    for entries, packed in itertools.product((False, True), repeat=2):
        variant = ("entries" if entries else "tokens") + (",packed" if packed else "")
        run = ours(_bits, 128 if entries else 64, entries=entries, packed=packed)
        yield Case("TileBits", variant, None, None, None, run)
    tokens, entries_of = Keys(), Keys(32, 16)
    variants = {
        "64-in-64": (tokens, 64, 64, False),
        "64-in-128": (tokens, 64, 128, False),
        "64-in-64,not-causal": (Keys(causal=False), 64, 64, False),
        "entries,128-in-128": (entries_of, 128, 128, False),
        "entries,128-in-128,packed": (entries_of, 128, 128, True),
    }
    for variant, (keys, size, width, shifted) in variants.items():
        run = ours(_transposed, keys, size, width, 256, shifted=shifted)
        yield Case("TransposedLists", variant, None, None, None, run)
    for packed in (False, True):
        run = ours(_prefix, entries_of, 128, 256, packed=packed)
        yield Case("TransposedPrefixLists", "entries" + (",packed" if packed else ""), None, None, None, run)


def worklist_cases() -> Iterator[Case]:
    from cute_kernels.lists.worklist import _count, _cut, _list, _mark

    for packed in (False, True):
        variant = "64,packed" if packed else "64"
        yield Case("MarkRows", variant, None, None, None, ours(_mark, 64, packed))
        yield Case("MarkRows", f"{variant},1+2", None, None, None, ours(_mark, 64, packed, 1, 2))
    for kernel, compiled in (("CountRows", _count), ("ListRows", _list), ("CutWorkTiles", _cut)):
        yield Case(kernel, "worklist", None, None, None, ours(compiled))


def token_selected_cases() -> Iterator[Case]:
    from cute_kernels.attend import combine, forced, kv_outer, kv_outer_backward, query_outer, row_dots
    from cute_kernels.limits import TOKEN_SELECT_SIZES
    from cute_kernels.runtime.device import compute_capability

    hopper = compute_capability(0)[0] == 9
    for dim, group, dtype in itertools.product(DIMS, (*GROUPS, 3, 16, 64), DTYPES):
        variants = {"64": (64, dim, 16, False)}
        if group == GROUPS[1]:
            variants |= {"64,packed": (64, dim, 16, True), "64,D_v": (64, 192 - dim, 12, False)}
            variants |= {f"{size}": (size, dim, 16, False) for size in TOKEN_SELECT_SIZES[1:]}
        for variant, (size, v_dim, slots, packed) in variants.items():
            how = (dim, v_dim), dtype, group, slots, size, packed, hopper
            yield Case("KVOuterForward", variant, dim, group, dtype, ours(kv_outer._compiled, *how))
            run = ours(kv_outer_backward._compiled, *how)
            yield Case("KVOuterBackward", variant, dim, group, dtype, run)
            yield Case("QueryOuterForward", variant, dim, group, dtype, ours(query_outer._compiled, *how))
        combines: dict[str, dict[str, Any]] = {
            "weighted": {"weighted": True, "partials_per_slot": 1, "accumulate": False},
            "weighted,accumulate": {"weighted": True, "partials_per_slot": 1, "accumulate": True},
            "1": {"weighted": False, "partials_per_slot": 1, "accumulate": False},
            "2": {"weighted": False, "partials_per_slot": 2, "accumulate": False},
        }
        for variant, options in combines.items():
            run = ours(combine._combine, dim, dtype, group, **options)
            yield Case("CombinePartials", variant, dim, group, dtype, run)
        terms: dict[str, tuple[int, int, Any]] = {"1,two,projected": (1, 2, dtype), "1": (1, 0, None)}
        if group == GROUPS[1]:
            terms |= {"2,two,projected,fp32": (2, 2, torch.float32), "1,one": (1, 1, None)}
        for variant, options in terms.items():
            run = ours(combine._combine_query_gradients, dim, dtype, group, *options)
            yield Case("CombineQueryGradients", variant, dim, group, dtype, run)
        if group == GROUPS[0]:
            yield Case("RowDots", "delta", dim, None, dtype, ours(row_dots._compiled, dim, dtype))
        fp32 = torch.float32
        gated: dict[str, tuple[Any, Any, bool]] = {
            "projected": (dtype, None, False),
            "projected,kept": (dtype, fp32, True),
        }
        if group == GROUPS[1]:
            gated |= {"projected,fp32": (fp32, None, False), "projected,fp32,kept": (fp32, fp32, True)}
            gated |= {"given": (None, dtype, False), "given,kept": (None, dtype, True)}
            gated |= {
                "given,fp32": (None, fp32, False),
                "thirds": (None, None, False),
                "thirds,kept": (None, None, True),
            }
        for variant, how in gated.items():
            run = ours(combine._combine_and_gate, dim, dtype, group, *how)
            yield Case("CombineAndGate", variant, dim, group, dtype, run)
            run = ours(forced._forced_combine_and_gate, dim, dtype, group, 64, 1, 2, *how, hopper)
            yield Case("ForcedCombineAndGate", variant, dim, group, dtype, run)
        blocks = {"64,1+2": (64, 1, 2, False)}
        if group == GROUPS[1]:
            blocks |= {"64,1+2,packed": (64, 1, 2, True), "64,2+2": (64, 2, 2, False), "64,1": (64, 1, 0, False)}
            blocks |= {"128,1+1": (128, 1, 1, False), "256,0+1": (256, 0, 1, False)}
        for variant, (size, init, local, packed) in blocks.items():
            run = ours(forced._forced, (dim, dim), dtype, group, size, init, local, packed, hopper)
            yield Case("ForcedForward", variant, dim, group, dtype, run)
    for dim, size, packed in itertools.product(DIMS, TOKEN_SELECT_SIZES, (False, True)):
        run = ours(kv_outer_backward._combine_dkv, dim, size, packed)
        yield Case("CombineDKV", f"{size},packed" if packed else f"{size}", dim, None, None, run)


def decode_cases() -> Iterator[Case]:
    from cute_kernels.decode import append, blocks, choose, combine, gather, score, tile_sums
    from cute_kernels.select.topk import Blocks

    paper, page = Blocks(32, 16, 64, 16, init=1, local=2), 64
    for dim, dtype in itertools.product(DIMS, DTYPES):
        yield Case("AppendPages", "paper", dim, None, dtype, ours(append.compiled, (dim, dim), dtype, page, 32, 16))
        for variant, slots, lag in (("keys+values", page, 0), ("entries", page // 16, 1)):
            yield Case("GatherPages", variant, dim, None, dtype, ours(gather._compiled, (dim, dim), dtype, slots, lag))
    for dim, group, dtype, queries in itertools.product(DIMS, (1, 4, 16), DTYPES, (1, 4)):
        how, variant = ((dim, dim), dtype, group, queries, paper), f"paper,N_q={queries}"
        yield Case("ScoreEntries", variant, dim, group, dtype, ours(score.compiled, *how, page))
        yield Case("ChooseBlocks", variant, dim, group, dtype, ours(choose.compiled, *how, page))
        yield Case("AttendBlocks", variant, dim, group, dtype, ours(blocks.compiled, *how, 512, page))
        for gates, given in {
            "projected": (dtype, None),
            "given": (None, torch.float32),
            "thirds": (None, None),
        }.items():
            run = ours(combine.compiled, *how, page, *given)
            yield Case("CombineBranches", f"{variant},{gates}", dim, group, dtype, run)
    per_tile, window, fp32 = Blocks(64, 64, 64, 16), 512, torch.float32
    for dim, group, dtype in itertools.product(DIMS, (1, 4, 16), DTYPES):
        how, by_head, variant = ((dim, dim), dtype, group, 1, per_tile), (score.TERMS, 1), "per_tile,N_q=1"
        scored = ours(score.compiled, *how, page, 2, score.TERMS)
        attended = ours(blocks.compiled, (dim, dim), dtype, 1, 1, per_tile, window, page, group)
        combined = ours(combine.compiled, *how, page, None, fp32, combine.MANY_HEADS, *by_head)
        yield Case("ScoreEntries", variant, dim, group, dtype, scored)
        yield Case("ChooseBlocks", variant, dim, group, dtype, ours(choose.compiled, *how, page, *by_head))
        yield Case("AttendBlocks", variant, dim, group, dtype, attended)
        yield Case("CombineBranches", f"{variant},given", dim, group, dtype, combined)
    for dim, dtype in itertools.product(DIMS, DTYPES):
        yield Case("SumQueries", "T=256", dim, None, dtype, ours(tile_sums.sum_kernel, dim, dtype, 256))
    for dim in DIMS:
        yield Case("KeepSums", "T=256", dim, None, None, ours(tile_sums.keep_kernel, dim, 256))


def hopper_cases() -> Iterator[Case]:
    from cute_kernels.attend import compressed_backward, window_backward, window_combine, window_dq_combine
    from cute_kernels.attend.selected_backward import _combine, _dkv, _dq
    from cute_kernels.limits import WINDOW_COMBINE_GROUPS
    from cute_kernels.lists.query_to_kv import Keys
    from cute_kernels.lists.selected_worklist import _count, _list

    yield Case("CountQueryTiles", "bits", None, None, None, ours(_count))
    yield Case("ListQueryTiles", "bits", None, None, None, ours(_list))
    for dim, dtype in itertools.product(DIMS, DTYPES):
        yield Case("CompressedDQ", "entries", dim, None, dtype, ours(compressed_backward._dq, dim, dtype))
        yield Case("CompressedDKV", "entries", dim, None, dtype, ours(compressed_backward._dkv, dim, dtype))
        selected = {
            "causal": (Keys(), False, False),
            "not-causal": (Keys(causal=False), False, False),
            "causal,last-rows": (Keys(), True, False),
            "causal,packed": (Keys(), False, True),
            "entries": (Keys(32, 16), False, False),
            "entries,packed": (Keys(32, 16), False, True),
        }
        for variant, (keys, *continues) in selected.items():
            yield Case("SelectedDQ", variant, dim, None, dtype, ours(_dq, dim, dtype, keys, 256, *continues))
            for size in (64, 128):
                run = ours(_dkv, dim, dtype, keys, size, 256, *continues)
                yield Case("SelectedDKV", f"{size}-in-64,{variant}", dim, None, dtype, run)
        for size in (64, 128):
            yield Case("CombineSelectedDKV", f"{size}-in-64", dim, None, dtype, ours(_combine, dim, dtype, size))
        for has_local, continues in itertools.product((False, True), (False, True)):
            variant = ("local-selected" if has_local else "window") + (",last-rows" if continues else "")
            how = dim, dtype, has_local, continues
            yield Case("WindowDQ", variant, dim, None, dtype, ours(window_backward._dq, *how))
            yield Case("WindowDKV", variant, dim, None, dtype, ours(window_backward._dkv, *how))
        for group in (1, 16):
            for variant, (slots, parts, *terms) in {
                "projected": (16, 1, True, dtype),
                "alone": (16, 1, False, None),
                "128,projected,fp32": (16, 2, True, torch.float32),
            }.items():
                run = ours(window_dq_combine._compiled, dim, dtype, group, slots, parts, *terms)
                yield Case("WindowDQCombine", variant, dim, group, dtype, run)
    paper, fp32 = (16, 64, 1, 2), torch.float32
    for dim, group, dtype in itertools.product(DIMS, WINDOW_COMBINE_GROUPS, DTYPES):
        combined: dict[str, tuple[Any, ...]] = {
            "projected": (*paper, (dtype, None), (False, False, False), False),
            "projected,kept": (*paper, (dtype, fp32), (True, True, True), False),
            "branches": (*paper, None, (True, True, True), False),
            "branches,packed": (*paper, None, (True, True, True), True),
        }
        if group == 16:
            combined |= {
                "given": (*paper, (None, dtype), (False, False, False), False),
                "thirds": (*paper, (None, None), (False, False, False), False),
                "branches,packed,last-rows": (*paper, None, (True, True, False), True),
                "128,projected": (16, 128, 1, 1, (dtype, None), (False, False, False), False),
                "32-slots,projected": (32, 64, 1, 2, (dtype, None), (False, False, False), False),
            }
        for variant, how in combined.items():
            yield Case(
                "WindowCombine", variant, dim, group, dtype, ours(window_combine._compiled, dim, dtype, group, *how)
            )


def ours(compiled: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], bytes]:
    """Compiles one of our kernels by its module's own cached function."""
    return lambda: compiled(*arguments, **options).compiled.__cubin__ or b""


def fa4_cases(dim: int, group: int, dtype: torch.dtype) -> Iterator[Case]:
    from cute_kernels.fa4 import interface as fa4
    from cute_kernels.fa4.rules import rules as rules_of
    from cute_kernels.lists.query_to_kv import BlockLists
    from cute_kernels.pool.documents import Varlen

    rules = rules_of(torch.device("meta"))
    if rules is None:
        raise ValueError("cute_kernels.fa4.rules has no rules for this architecture")
    batch, rows, kv_heads, tile, scale = 1, 4096, 2, 256, 0.125
    heads, entries = group * kv_heads, rows // 16

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def call(function: Callable[..., Any], keys: int, *arguments: Any, lse: bool, **options: Any) -> None:
        q, k, v = (empty(batch, n, h, dim, dtype=dtype) for n, h in ((rows, heads), (keys, kv_heads), (keys, kv_heads)))
        function(q, k, v, *arguments, scale=scale, lse=lse, **options)

    def chosen(keys: int, width: int) -> BlockLists:
        """As of lists.query_to_kv.chosen_lists."""
        counts, indices = (batch, heads, rows // tile), (batch, heads, rows // tile, keys // width)
        return BlockLists(empty(*counts), empty(*indices), empty(*counts), empty(*indices), tile, width)

    def prefix(keys: int, width: int, packed: bool = False) -> BlockLists:
        """As of prefix_lists, stored once for all heads, `full` blocks also for all tiles unless packed."""
        counts, indices = (batch, heads, rows // rules.rows), (batch, heads, rows // rules.rows, keys // width)
        count, index, every = (
            empty(1, 1, counts[2]),
            empty(1, 1, *indices[2:]),
            empty(1, 1, indices[2] if packed else 1, indices[3]),
        )
        listed = (count.expand(counts), index.expand(indices), count.expand(counts), every.expand(indices))
        return BlockLists(*listed, rules.rows, width)

    def compressed(
        lists: Callable[[], BlockLists | None], lse: bool = False, packed: bool = False
    ) -> Callable[[], None]:
        options = {"length": 32, "stride": 16, "first_row": 0}
        shifts = (lambda: empty(rows // tile)) if packed else lambda: None
        return lambda: call(fa4.compressed, entries, lists(), shifts=shifts(), lse=lse, **options)

    def selected(width: int, *, causal: bool = True, lse: bool = False) -> Callable[[], None]:
        return lambda: call(fa4.selected, rows, chosen(rows, width), lse=lse, causal=causal)

    def window(lse: bool = False, packed: bool = False) -> Callable[[], None]:
        documents = (lambda: Varlen(empty(9), empty(9), empty(8), empty(8))) if packed else lambda: None
        return lambda: call(fa4.window, rows, lse=lse, left=511, right=0, documents=documents())

    narrow, wide = rules.widths[-1], rules.widths[0]
    variants: dict[tuple[str, str], Callable[[], None]] = {
        ("fa4.compressed", "prefix"): compressed(lambda: prefix(entries, wide)),
        ("fa4.compressed", "prefix,lse"): compressed(lambda: prefix(entries, wide), lse=True),
        ("fa4.compressed", f"chosen,{wide}-wide"): compressed(lambda: chosen(entries, wide)),
        ("fa4.compressed", "prefix,packed"): compressed(lambda: prefix(entries, wide, packed=True), packed=True),
        ("fa4.compressed", f"chosen,{wide}-wide,packed"): compressed(lambda: chosen(entries, wide), packed=True),
        ("fa4.compressed", "all"): compressed(lambda: None),
        ("fa4.selected", f"{narrow}-wide"): selected(narrow),
        ("fa4.selected", f"{narrow}-wide,lse"): selected(narrow, lse=True),
        ("fa4.selected", f"{narrow}-wide,not-causal"): selected(narrow, causal=False),
        ("fa4.selected", f"{wide}-wide"): selected(wide),
        ("fa4.window", "window"): window(),
        ("fa4.window", "window,lse"): window(lse=True),
        ("fa4.window", "window,packed"): window(packed=True),
        ("fa4.window", "neighborhood"): lambda: neighborhood(dim, group, dtype),
    }
    for (kernel, variant), run in variants.items():
        yield Case(kernel, variant, dim, group, dtype, partial(fa4_cubin, run))


def neighborhood(dim: int, group: int, dtype: torch.dtype, *, backward: bool = False) -> None:
    """Neighborhood attention or its backward, with classes of two lengths."""
    from cute_kernels import neighborhood

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, dilation, kv_heads = 4096, 3, 2
    q, (k, v) = empty(1, tokens, group * kv_heads, dim), (empty(1, tokens, kv_heads, dim) for _ in range(2))
    window: dict[str, Any] = {"kernel_size": 64, "dilation": dilation, "softmax_scale": None, "boundary": "truncate"}
    if backward:
        lse = empty(1, dilation, group * kv_heads, tokens // dilation // 4 * 4 + 4, dtype=torch.float32)
        neighborhood.backward(q, q, k, v, q, lse, causal=False, backend="cute", **window)
    else:
        neighborhood.forward(q, k, v, causal=False, backend="cute", **window)


def fa4_backward_cases(dim: int, group: int, dtype: torch.dtype) -> Iterator[Case]:
    from cute_kernels.fa4 import interface as fa4
    from cute_kernels.fa4.rules import rules as rules_of
    from cute_kernels.lists.query_to_kv import BlockLists
    from cute_kernels.pool.documents import Varlen

    rules = rules_of(torch.device("meta"))
    if rules is None:
        raise ValueError("cute_kernels.fa4.rules has no rules for this architecture")
    rows, kv_heads, tile, scale = 4096, 2, 256, 0.125
    heads, entries = group * kv_heads, rows // 16

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def gradients(keys: int, batch: int = 1) -> fa4.Gradients:
        (q, o, do, dq), (k, v, dk, dv) = (
            [empty(batch, n, h, dim, dtype=dtype) for _ in range(4)] for n, h in ((rows, heads), (keys, kv_heads))
        )
        return fa4.Gradients(q, k, v, o, do, empty(batch, heads, rows, dtype=torch.float32), dq, dk, dv)

    def lists(keys: int, width: int, *, every_head: bool = True, bits: bool = False) -> BlockLists:
        """As of lists/kv_to_query.py."""
        shape = 1, heads if every_head else 1, keys // width
        tensors = [x for _ in range(2) for x in (empty(*shape), empty(*shape, rows // tile))]
        if not every_head:
            tensors = [x.expand(1, heads, *x.shape[2:]) for x in tensors]
        made = BlockLists(*tensors, tile, width)
        return replace(made, bits=empty(1, heads, keys // 64, 2), bit_keys=64) if bits else made

    def compressed(every_head: bool = False, packed: bool = False) -> Callable[[], None]:
        return lambda: fa4.compressed_backward(
            gradients(entries),
            lists(entries, rules.backward_widths[0], every_head=every_head),
            length=32,
            stride=16,
            first_row=0,
            scale=scale,
            shifts=empty(rows // tile) if packed else None,
        )

    def selected(width: int, *, causal: bool = True, bits: bool = False) -> Callable[[], None]:
        return lambda: fa4.selected_backward(gradients(rows), lists(rows, width, bits=bits), causal=causal, scale=scale)

    def window(packed: bool = False) -> Callable[[], None]:
        return lambda: fa4.window_backward(
            gradients(rows),
            left=511,
            right=0,
            scale=scale,
            documents=Varlen(empty(9), empty(9), empty(8), empty(8)) if packed else None,
        )

    variants: dict[tuple[str, str], Callable[[], None]] = {
        ("fa4.compressed_backward", "prefix"): compressed(),
        ("fa4.compressed_backward", "chosen"): compressed(every_head=True),
        ("fa4.compressed_backward", "prefix,packed"): compressed(packed=True),
        ("fa4.dense_backward", "all"): lambda: fa4.dense_backward(gradients(entries), causal=False, scale=scale),
        ("fa4.dense_backward", "phases"): lambda: fa4.dense_backward(
            gradients(entries, batch=16), causal=True, scale=scale
        ),
        ("fa4.window_backward", "window"): window(),
        ("fa4.window_backward", "window,packed"): window(packed=True),
        ("fa4.window_backward", "neighborhood"): lambda: neighborhood(dim, group, dtype, backward=True),
    }
    for width in rules.backward_widths:
        bits = width > 64
        variants["fa4.selected_backward", f"{width}-wide"] = selected(width)
        variants["fa4.selected_backward", f"{width}-wide,not-causal"] = selected(width, causal=False)
        if bits:
            variants["fa4.selected_backward", f"{width}-wide,bits"] = selected(width, bits=True)
            variants["fa4.selected_backward", f"{width}-wide,bits,not-causal"] = selected(
                width, bits=True, causal=False
            )
    for (kernel, variant), run in variants.items():
        yield Case(kernel, variant, dim, group, dtype, partial(fa4_cubin, run, "backward"))


def fa4_cubin(run: Callable[[], None], stage: str = "forward") -> bytes:
    """The cubin of the one kernel of a stage of fa4/kernels.py that a call with tensors without data launches."""
    from cute_kernels.runtime.launches import launches_of

    (kernel,) = {x.kernel for x in launches_of(run) if x.kernel.build.__name__ == stage}
    return kernel.compiled.__cubin__ or b""


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Few cases with every value of every kernel, and every pair of (D, G, dtype) of every family."""
    remaining = {case: covers(case) for case in cases}
    chosen = []
    while any(remaining.values()):
        best = max(remaining, key=lambda case: len(remaining[case]))
        chosen.append(best)
        covered = remaining.pop(best)
        for goals in remaining.values():
            goals -= covered
    return chosen


def one_of_each(cases: Iterable[Case]) -> list[Case]:
    """The first case of every kernel, which is the one with the smallest D and G."""
    return list({case.kernel: case for case in reversed(list(cases))}.values())[::-1]


def covers(case: Case) -> set[Hashable]:
    sizes = [("dim", case.dim), ("group", case.group), ("dtype", case.dtype)]
    values = {(case.kernel, *value) for value in [*sizes, ("variant", case.variant)]}
    return values | {(case.family, *pair) for pair in itertools.combinations(sizes, 2)}


MATRICES: dict[str, Callable[[Iterable[Case]], Iterable[Case]]] = {
    "full": iter,
    "pairwise": pairwise,
    "kernels": one_of_each,
}

# ---------------------------------------------------------------- one process per architecture


def try_case(arch: str, case: Case) -> Result:
    from dispatch.registry import short_name

    start = time.monotonic()
    cubin, error = b"", ""
    try:
        cubin = case.compile()
        error = cubin_problem(arch, cubin)
    except Exception as exception:
        traceback.print_exc()
        error = f"{type(exception).__name__}: {exception}"
    dtype = "-" if case.dtype is None else short_name(case.dtype)
    dim, group = ("-" if size is None else str(size) for size in (case.dim, case.group))
    sha256 = hashlib.sha256(code_of(cubin)).hexdigest()[:12]
    seconds = time.monotonic() - start
    return Result(arch, case.kernel, case.variant, dim, group, dtype, len(cubin), sha256, seconds, error)


def code_of(cubin: bytes) -> bytes:
    """Instructions and constants of a cubin, a 64-bit ELF file: sections .text.KERNEL and .nv.constant*, in order."""
    if not cubin.startswith(b"\x7fELF\x02"):
        return cubin
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    found = []
    for name_at, _, _, _, offset, length in headers:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)]
        if name.startswith((b".text.", b".nv.constant")):
            found.append(name[: name.index(b".", 1)] + cubin[offset : offset + length])
    return b"".join(found)


def cubin_problem(arch: str, cubin: bytes) -> str:
    if not cubin:
        return "the cubin is empty"
    if arch_of(cubin) != arch:
        return f"the cubin is for {arch_of(cubin)}, not for {arch}"
    unwritten = sorted(unwritten_registers(disassembled(cubin)))
    return f"its code reads {', '.join(unwritten)}, which nothing writes" if unwritten else ""


def disassembled(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unwritten_registers(code: str) -> set[str]:
    """Uniform registers that instructions of a disassembly name as operands and none names as its result.

    A result is a bare register in front of all operands but predicates. Of operands of several registers, the first;
    of wgmma's descriptors none, whose first two are not read where A is in registers.
    """
    written, read = set(), set()
    for operation, operands in INSTRUCTION.findall(code):
        result = RESULT.match(operands)
        if result:
            bits = 64 if ".WIDE" in operation else max([32, *map(int, re.findall(r"\.(64|128|256)\b", operation))])
            written |= {f"UR{int(result[1]) + i}" for i in range(bits // 32)}
            operands = operands[result.end() :]
        read |= {*re.findall(r"(?<!gdesc\[)\bUR\d+", operands)}
    return read - written


INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
RESULT = re.compile(r"(?:!?U?P[\dT],\s*)*UR(\d+)(?:,|\s*$)")


def arch_of(cubin: bytes) -> str:
    """Architecture that a cubin was assembled for."""
    if options := re.search(rb"-arch (sm_\w+) ", cubin):
        return options[1].decode()
    # CUDA 12 writes no options for sm_90a; its ELF flags are the number, and 0x800 for an "a"
    (flags,) = struct.unpack_from("<I", cubin.ljust(64, b"\0"), 48)
    return f"sm_{flags & 0xFF}{'a' if flags & 0x800 else ''}"


def compile_here(arch: str, matrix: str, kernels: Sequence[str] | None) -> None:
    """The child's part: a line of JSON for each case, and nothing else where the parent reads."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no result
    cases = (case for case in all_cases() if kernels is None or case.kernel in kernels)
    for case in MATRICES[matrix](cases):
        print(json.dumps(try_case(arch, case)), file=lines, flush=True)


def child_environment(arch: str, dump: str) -> dict[str, str]:
    """What must be set before the compilers are imported."""
    target = TARGETS[arch]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NSA_KERNELS_")}
    return {
        **inherited,
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP": "cubin",
        "CUTE_DSL_DUMP_DIR": dump,
        "FLASH_ATTENTION_ARCH": target.fa4,
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        "NSA_KERNELS_JIT_CACHE": "0",
        SMS_VARIABLE: str(target.sms),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def compile_for(arch: str, matrix: str, kernels: Sequence[str] | None) -> list[Result]:
    """Runs the child of an architecture and prints its results as they come."""
    results: list[Result] = []
    command = [sys.executable, __file__, "--child", "--arch", arch, "--matrix", matrix]
    if kernels is not None:
        command += ["--kernels", ",".join(kernels)]
    with tempfile.TemporaryDirectory() as dump:
        environ = child_environment(arch, dump)
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
            if child.stdout is None:
                raise RuntimeError("the child has no output")
            for line in child.stdout:
                results.append(Result(*json.loads(line)))
                print(f"{results[-1].line}\n", end="", flush=True)  # one write: the other child's lines come between
    if child.returncode != 0 or not (results or kernels):
        error = f"its process ended with exit status {child.returncode} after {len(results)} cases"
        results.append(Result(arch, "-", "-", "-", "-", "-", 0, "-", 0.0, error))
    return results


# ---------------------------------------------------------------- report


def summary(results: Sequence[Result]) -> list[str]:
    lines = []
    failed = [result for result in results if result.error]
    for arch in dict.fromkeys(result.arch for result in results):
        mine = [result for result in results if result.arch == arch]
        good = sum(not result.error for result in mine)
        lines.append(f"{arch}: {good} of {len(mine)} compiled, {sum(result.seconds for result in mine):.0f} s")
    for result in failed:
        lines += ["", result.line, *(f"    {line}" for line in result.error.splitlines())]
    return lines


def comparison(results: Iterable[Result], log: str) -> list[str]:
    """What became of the machine code in an earlier log, also compiled for a part of its cases."""
    before = {result[:6]: result.sha256 for result in results_of(log)}
    kinds: dict[str, list[Result]] = {"the same": [], "other code": [], "new": []}
    for result in results:
        old = before.get(result[:6])
        kinds["new" if old is None else "the same" if old == result.sha256 else "other code"].append(result)
    counts = ", ".join(f"{len(of_kind)} {kind}" for kind, of_kind in kinds.items())
    return [f"against the earlier log: {counts}", *(result.line for result in kinds["other code"])]


def results_of(log: str) -> list[Result]:
    """The lines of a log's table."""
    results = []
    for line in log.splitlines():
        fields = line.split()
        if len(fields) == len(HEADER.split()) and fields[0] in TARGETS:
            *what, size, sha256, seconds = fields
            failed = size == "FAILED"
            error = "as the log says" if failed else ""
            results.append(Result(*what, 0 if failed else int(size), sha256, float(seconds), error))
    return results


def replaced(old: Iterable[Result], new: Sequence[Result]) -> list[Result]:
    """The old results with these in the place of those of their kernels, those of further kernels at the end."""
    remaining: dict[tuple[str, str], list[Result]] = {}
    for result in new:
        remaining.setdefault((result.arch, result.kernel), []).append(result)
    results: list[Result] = []
    for result in old:
        kernel = result.arch, result.kernel
        results += remaining.get(kernel, [result])
        if kernel in remaining:
            remaining[kernel] = []  # all stand where the first one stood
    return [*results, *itertools.chain(*remaining.values())]


def versions() -> str:
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every CuTe kernel without a GPU.")
    parser.add_argument("--arch", default=",".join(TARGETS), help="architectures (default: %(default)s)")
    parser.add_argument("--matrix", choices=MATRICES, default="full", help="kernels: one case each (default: full)")
    parser.add_argument("--kernels", help="names by commas: these alone; with --log the others' lines stay as they are")
    parser.add_argument("--log", type=Path, help="also write the table, with versions, to this file")
    parser.add_argument(
        "--against", type=Path, metavar="LOG", help="list the kernels whose code differs from this log's"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    archs = args.arch.split(",")
    unknown = [arch for arch in archs if arch not in TARGETS]
    if unknown:
        parser.error(f"--arch takes {', '.join(TARGETS)}, got {', '.join(unknown)}")
    kernels = args.kernels.split(",") if args.kernels else None
    if args.child:
        compile_here(args.arch, args.matrix, kernels)
        return 0

    title = f"{versions()}; matrix: {args.matrix}"
    log = args.log.read_text(encoding="utf-8") if args.log and kernels else None
    if log is not None and (log.partition("\n")[0] != title or "FAILED" in log):
        parser.error(f"--kernels changes a log without failures, of {title}")
    earlier = args.against.read_text(encoding="utf-8") if args.against else None
    print(versions(), HEADER, sep="\n", flush=True)
    with ThreadPoolExecutor(len(archs)) as pool:
        of_archs = pool.map(compile_for, archs, [args.matrix] * len(archs), [kernels] * len(archs))
        results = [result for part in of_archs for result in part]
    if missing := sorted(set(kernels or ()) - {result.kernel for result in results}):
        parser.error(f"--kernels: no kernel is called {', '.join(missing)}")
    end = summary(results)
    if earlier is not None:
        end += ["", *comparison(results, earlier)]
    print("", *end, sep="\n")
    failed = any(result.error for result in results)
    if log is not None:
        results = replaced(results_of(log), results)
        end = summary(results)
    if args.log and not (log is not None and failed):
        table = [title, "", HEADER, *(result.line for result in results), "", *end]
        args.log.write_text("\n".join(table) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

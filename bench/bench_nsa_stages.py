"""Time of each stage of NSA per tile on an NVIDIA GPU, beside its floor, as replays of CUDA graphs.

A stage's floor is the larger of its bytes over the copy bandwidth measured here and its operations over the peak; that
of a whole forward, backward or both is the end-to-end benchmark's (bench/roofline.py), with this bandwidth. With
--backward the selected branch is timed both through FlashAttention-4 and, on Hopper, through the kernels without
atomics ("split"), each with its lists; "selected, lists" are those of FlashAttention-4 alone, "split, ..." kernels
without lists.

Nothing is checked here. Writes OUT.json (schema: docs/results_files.md) after every length and option; the same command
resumes where it was stopped or killed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench import roofline
from bench.common import comma_list, make_parser, parse_args, positive
from bench.inputs import Sizes, make_problem
from bench.report import LOCAL_RESULTS, gpu_facts
from bench.results_file import Measurement, Results, Row, run
from bench.roofline import Peaks, Work
from bench.timing import copy_bandwidth, graph_ms
from nsa import NSAConfig, nsa_forward

# Kernels are imported where they are called: the command line needs no CuTe DSL.
if TYPE_CHECKING:
    from cute_kernels import forward
    from cute_kernels.call import Call
    from cute_kernels.fa4.interface import Gradients
    from cute_kernels.gate.backward import GateResults

HEADS, KV_HEADS, DIM = 8, 2, 128
SEQLENS = {"": "8K,32K,128K,1M", "-backward": "32K,128K,512K,1M"}
DEVICE = torch.device("cuda")
LINE = "{n:>8} {stage:<16}{ms:9.4f} ms  floor {floor_ms:8.4f} {share:6.0%}  num_cmp={num_cmp}"


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "peak-tflops")
    parser.add_argument("--backward", action="store_true", help="the stages of the backward")
    parser.add_argument("--out", help="results, without suffix; default: bench/results/local/stages or stages-backward")
    parser.add_argument("--seqlens", type=comma_list(positive), help=f"default: {' or '.join(SEQLENS.values())}")
    args = parse_args(parser, argv)
    which = "-backward" * args.backward
    args.out = args.out or str(LOCAL_RESULTS / f"stages{which}")
    facts = gpu_facts(parser, args.peak_tflops)
    cases = product(args.seqlens or comma_list(positive)(SEQLENS[which]), (None, 16))

    def parts(results: Results) -> Iterator[Measurement]:
        peaks = Peaks(facts["peak_tflops"], results.fact("copy_tbs", copy_bandwidth))
        for n, num_cmp in cases:
            sizes, config = Sizes(1, n, HEADS, KV_HEADS, DIM), NSAConfig(num_cmp_selected_blocks=num_cmp)
            yield f"{n} {HEADS}/{KV_HEADS} {num_cmp}", partial(part, sizes, config, peaks)

    def part(sizes: Sizes, config: NSAConfig, peaks: Peaks) -> list[Row]:
        stages = (backward_stages if args.backward else forward_stages)(sizes, config, peaks)
        return [row_of(sizes, config, stage) for stage in stages]

    return run(args, facts, parts, LINE, fields=lambda _: {}, checked=False)


class Stage(NamedTuple):
    name: str
    call: Callable[[], Any]
    floor_ms: float


def row_of(sizes: Sizes, config: NSAConfig, stage: Stage) -> Row:
    """A stage's median GPU time."""
    stage.call()
    ms = graph_ms(stage.call, DEVICE, most=10)
    row = {"n": sizes.tokens, "h": sizes.heads, "h_kv": sizes.kv_heads, "num_cmp": config.num_cmp_selected_blocks}
    return {**row, "stage": stage.name, "ms": ms, "floor_ms": stage.floor_ms, "share": stage.floor_ms / ms}


def forward_stages(sizes: Sizes, config: NSAConfig, peaks: Peaks) -> list[Stage]:
    """Stages of the forward of one sequence."""
    from cute_kernels import forward
    from cute_kernels.call import prepare, selected_lists
    from cute_kernels.pool.compress import compress_kv, tile_means
    from cute_kernels.select.tile import tile_topk

    inputs, n = make_problem("random", sizes, device=DEVICE, dtype=torch.bfloat16), sizes.tokens
    q, k, v = inputs.q, inputs.k, inputs.v
    call = prepare(inputs, config)
    k_cmp, v_cmp, entries = call.k_cmp, call.v_cmp, call.k_cmp.shape[1]
    branches, means = forward.attend(call, 0, n, lse=False), tile_means(q, call.plan.tile)
    indices, cmp_indices = branches.indices, branches.cmp_indices
    compressed_keys, selected_keys, window_keys = roofline.branch_keys(n, config)
    row_bytes, key_bytes = 2 * n * sizes.heads * sizes.dim, 2 * n * sizes.kv_heads * sizes.dim
    scoring = roofline.score_flops(sizes, config)

    def attend_compressed() -> Any:
        return forward.attend_compressed(call, q, k_cmp, v_cmp, cmp_indices, 0, False)

    def attend_selected() -> Any:
        return forward.attend_selected(call, q, k, v, indices, 0, False, holds_forced=True)

    def choose(blocks: Any) -> Callable[[], Tensor]:
        return lambda: tile_topk(means, k_cmp, blocks, keys=call.entry, tile=call.plan.tile, tokens=n)

    def lists() -> Any:
        return selected_lists(call, q, k, indices, 0), forward.entry_lists(call, q, k_cmp, cmp_indices, 0)

    def everything() -> Tensor:
        return nsa_forward(q, k, v, gate_proj_weight=inputs.gate_proj_weight, config=config)

    def stage(name: str, call: Callable[[], Any], moved: float, flops: float = 0) -> Stage:
        return Stage(name, call, Work(moved, flops).floor_ms(peaks.tbs, peaks.tflops))

    def attention(name: str, call: Callable[[], Any], keys: float) -> Stage:
        return stage(name, call, 2 * row_bytes, roofline.attention_flops(sizes, keys))

    entry_bytes = 2 * 2 * entries * sizes.kv_heads * sizes.dim
    return [
        stage("compress", lambda: compress_kv(inputs, config), 2 * key_bytes + entry_bytes),
        stage("tile means", lambda: tile_means(q, call.plan.tile), row_bytes),
        stage("score", choose(call.select), 0, scoring),
        *([] if call.select_cmp is None else [stage("score, cmp", choose(call.select_cmp), 0, scoring)]),
        stage("lists", lists, 0),
        attention("compressed", attend_compressed, compressed_keys),
        attention("selected", attend_selected, selected_keys),
        attention("window", lambda: forward.attend_window(call, q, k, v, 0, False), window_keys),
        stage("gate", lambda: forward.gate(call, branches, 0, n), 5 * row_bytes),
        Stage("all", everything, roofline.nsa_floor_ms(sizes, config, peaks)),
    ]


class HeadChunk(NamedTuple):
    """Tensors that the stages read and write for a range of key/value heads, as cute_kernels.backward makes them."""

    call: Call
    branches: forward.BranchOutputs
    do: Tensor
    gates: Tensor
    gated: GateResults
    cmp: Gradients
    slc: Gradients
    win: Gradients
    dk: Tensor
    dv: Tensor
    entries: tuple[Tensor, Tensor]


def make_head_chunk(
    call: Call, saved: forward.Saved, do: Tensor, results: tuple[Tensor, ...], kv_heads: slice
) -> HeadChunk:
    """Args: `results`, dq, dk and dv of all heads; the compressed branch writes into dq too."""
    from cute_kernels.fa4.interface import Gradients

    heads = call.query_heads(kv_heads)
    chunk, branches = call.slice_heads(kv_heads), saved.branch_outputs(heads, heads)
    if branches is None or saved.gates is None:
        raise ValueError("needs the branches' outputs and projected gates")
    do, gates = do[:, :, heads], saved.gates[:, :, heads]
    gated = differentiate_gates(chunk, branches, do, gates)
    q, k, v = chunk.inputs.q, chunk.inputs.k, chunk.inputs.v

    def gradients(branch: int, k: Tensor, v: Tensor, into: Tensor) -> Gradients:
        o, lse = branches.outputs[branch], gated.lse[branch]
        return Gradients(q, k, v, o, do, lse, into, torch.empty_like(k), torch.empty_like(v))

    dq, dk, dv = results
    cmp = gradients(0, chunk.k_cmp, chunk.v_cmp, dq[:, :, heads])
    slc, win = (gradients(branch, k, v, torch.empty_like(q)) for branch in (1, 2))
    entries = chunk.k_cmp.float(), chunk.v_cmp.float()
    return HeadChunk(chunk, branches, do, gates, gated, cmp, slc, win, dk[:, :, kv_heads], dv[:, :, kv_heads], entries)


def differentiate_gates(call: Call, branches: forward.BranchOutputs, do: Tensor, gates: Tensor) -> GateResults:
    from cute_kernels.gate.backward import gate_gradients

    return gate_gradients(do, branches.outputs, branches.lses, q=call.inputs.q, gates=gates, projected=True)


def backward_stages(sizes: Sizes, config: NSAConfig, peaks: Peaks) -> list[Stage]:
    """Each stage of the backward; then the forward that saves for it, the backward, and both."""
    from cute_kernels import backward, forward
    from cute_kernels.call import prepare
    from cute_kernels.gate.sums import QueryTerms, key_gradients, query_gradients
    from cute_kernels.lists.kv_to_query import tile_bits

    inputs, n = make_problem("random", sizes, device=DEVICE, dtype=torch.bfloat16), sizes.tokens
    _, kept = forward.nsa_saving(inputs, config, recompute=False)
    saved = forward.Saved.from_list(kept, inputs, config)
    if saved.k_cmp is None or saved.v_cmp is None:
        raise ValueError("needs compressed keys that were made from k and v")
    call = prepare(inputs, config, (saved.k_cmp, saved.v_cmp))
    do = torch.randn_like(inputs.q)
    results = tuple(torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v))
    chunks = [make_head_chunk(call, saved, do, results, kv_heads) for kv_heads in backward.head_chunks(call)]

    def every(run: Callable[[HeadChunk], Any]) -> Callable[[], list[Any]]:
        return lambda: [run(chunk) for chunk in chunks]

    def bits(chunk: HeadChunk) -> Tensor:
        return tile_bits(chunk.branches.indices, size=config.select_size, num_keys=n, entries=False)

    def transposed(chunk: HeadChunk) -> None:
        size, width = config.select_size, call.plan.rules.backward_width(config.select_size)
        for _ in backward.list_chunks(call, chunk.slc, bits(chunk), size=size, width=width, entries=False):
            pass

    def compressed(chunk: HeadChunk) -> None:
        backward.backward_compressed(call, chunk.cmp, chunk.branches.cmp_indices, chunk.gated.delta[0])

    def selected(chunk: HeadChunk, call: Call = call) -> None:
        local = backward.local_selected(chunk.call, chunk.gated)
        backward.backward_selected(call, chunk.slc, chunk.branches.indices, chunk.gated.delta[1], local=local)

    def selected_through_fa4(chunk: HeadChunk) -> None:
        selected(chunk, replace(call, plan=replace(call.plan, selected_backward="fa4")))

    def window(chunk: HeadChunk) -> None:
        local = backward.local_selected(chunk.call, chunk.gated)
        backward.backward_window(call, chunk.win, chunk.gated.delta[2], local=local)

    def sum_queries(chunk: HeadChunk) -> None:
        parts = chunk.cmp.dq, chunk.slc.dq, chunk.win.dq
        weight = chunk.call.inputs.gate_proj_weight
        query_gradients(chunk.cmp.dq, QueryTerms(parts, chunk.gated.logits, weight))

    def sum_keys(chunk: HeadChunk) -> None:
        k_parts, v_parts = [chunk.slc.dk, chunk.win.dk], [chunk.slc.dv, chunk.win.dv]
        key_gradients(chunk.dk, chunk.dv, k_parts, v_parts, entries=chunk.entries, keys=call.entry)

    stages: list[tuple[str, Callable[[], Any]]] = [
        ("gate gradients", every(lambda chunk: differentiate_gates(chunk.call, chunk.branches, chunk.do, chunk.gates))),
        ("compressed", every(compressed)),
        ("selected, lists", every(transposed)),
        ("selected, FA4", every(selected_through_fa4)),
    ]
    if call.plan.selected_backward == "split":
        stages += [("selected, split", every(selected)), *atomic_free_halves(call, chunks, bits)]
    stages += [("window", every(window)), ("query sums", every(sum_queries)), ("key sums", every(sum_keys))]
    work = roofline.backward_work(sizes, config)
    floors = {name: work[name].floor_ms(peaks.tbs, peaks.tflops) for name, _ in stages}
    forward_floor, both = (roofline.nsa_floor_ms(sizes, config, peaks, backward=way) for way in (False, True))
    floors |= {"forward, saving": forward_floor, "backward": both - forward_floor, "all": both}

    def differentiate(keep: list[Tensor]) -> dict[str, Tensor]:
        return backward.nsa_backward(inputs, config, keep, do)

    stages += [
        ("forward, saving", lambda: forward.nsa_saving(inputs, config, recompute=False)),
        ("backward", lambda: differentiate(kept)),
        ("all", lambda: differentiate(forward.nsa_saving(inputs, config, recompute=False)[1])),
    ]
    return [Stage(name, call, floors[name]) for name, call in stages]


def atomic_free_halves(
    call: Call, chunks: list[HeadChunk], bits: Callable[[HeadChunk], Tensor]
) -> list[tuple[str, Callable[[], None]]]:
    """dq, and dk with dv, of the backward without atomics, from lists that exist."""
    from cute_kernels.attend import selected_backward
    from cute_kernels.call import selected_lists

    made = [
        (chunk, selected_lists(call, chunk.slc.q, chunk.slc.k, chunk.branches.indices, 0), bits(chunk))
        for chunk in chunks
    ]
    options: dict[str, Any] = {"keys": call.token, "scale": call.scale}

    def dq() -> None:
        for chunk, lists, _ in made:
            x = chunk.slc
            selected_backward.selected_dq(x.q, x.k, x.v, x.do, x.lse, chunk.gated.delta[1], lists, dq=x.dq, **options)

    def dkv() -> None:
        for chunk, lists, tile_bits in made:
            x, size = chunk.slc, call.config.select_size
            given = x.q, x.k, x.v, x.do, x.lse, chunk.gated.delta[1], lists, tile_bits
            selected_backward.selected_dkv(*given, size=size, dk=x.dk, dv=x.dv, **options)

    return [("split, dq", dq), ("split, dk dv", dkv)]


if __name__ == "__main__":
    sys.exit(main())

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


def backward_stages(sizes: Sizes, config: NSAConfig, peaks: Peaks) -> list[Stage]:
    """Each stage of the backward; then the forward that saves for it, the backward, and both."""
    from cute_kernels import backward, forward
    from cute_kernels.call import prepare

    inputs = make_problem("random", sizes, device=DEVICE, dtype=torch.bfloat16)
    _, kept = forward.nsa_saving(inputs, config, recompute=False)
    saved = forward.Saved.from_list(kept, inputs, config)
    if saved.k_cmp is None or saved.v_cmp is None:
        raise ValueError("needs compressed keys that were made from k and v")
    call = prepare(inputs, config, (saved.k_cmp, saved.v_cmp))
    do = torch.randn_like(inputs.q)
    results = [torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v)]
    chunks = [head_stages(call, saved, do, results, kv_heads) for kv_heads in backward.head_chunks(call)]

    def every(name: str) -> None:
        for chunk in chunks:
            chunk[name]()

    work = roofline.backward_work(sizes, config)
    stages = [Stage(name, partial(every, name), work[name].floor_ms(peaks.tbs, peaks.tflops)) for name in chunks[0]]
    forward_floor, both = (roofline.nsa_floor_ms(sizes, config, peaks, backward=way) for way in (False, True))

    def save() -> list[Tensor]:
        return forward.nsa_saving(inputs, config, recompute=False)[1]

    def differentiate(keep: list[Tensor]) -> dict[str, Tensor]:
        return backward.nsa_backward(inputs, config, keep, do)

    return [
        *stages,
        Stage("forward, saving", save, forward_floor),
        Stage("backward", lambda: differentiate(kept), both - forward_floor),
        Stage("all", lambda: differentiate(save()), both),
    ]


def head_stages(
    call: Call, saved: forward.Saved, do: Tensor, results: list[Tensor], kv_heads: slice
) -> dict[str, Callable[[], Any]]:
    """Stages of a range of key/value heads, as cute_kernels.backward calls them.

    Args: `results`, dq, dk and dv of all heads; the compressed branch writes into dq too.
    """
    from cute_kernels import backward
    from cute_kernels.attend import selected_backward
    from cute_kernels.call import selected_lists
    from cute_kernels.fa4.interface import Gradients
    from cute_kernels.gate.backward import GateResults, gate_gradients
    from cute_kernels.gate.sums import QueryTerms, key_gradients, query_gradients
    from cute_kernels.lists.kv_to_query import tile_bits

    heads, size = call.query_heads(kv_heads), call.config.select_size
    chunk, branches = call.slice_heads(kv_heads), saved.branch_outputs(heads, heads)
    if branches is None or saved.gates is None:
        raise ValueError("needs the branches' outputs and projected gates")
    q, k, v, weight = chunk.inputs.q, chunk.inputs.k, chunk.inputs.v, chunk.inputs.gate_proj_weight
    do, gates = do[:, :, heads], saved.gates[:, :, heads]
    dq, dk, dv = results[0][:, :, heads], results[1][:, :, kv_heads], results[2][:, :, kv_heads]

    def gate() -> GateResults:
        return gate_gradients(do, branches.outputs, branches.lses, q=q, gates=gates, projected=True)

    gated = gate()

    def gradients(branch: int, k: Tensor, v: Tensor, into: Tensor) -> Gradients:
        o, lse = branches.outputs[branch], gated.lse[branch]
        return Gradients(q, k, v, o, do, lse, into, torch.empty_like(k), torch.empty_like(v))

    cmp = gradients(0, chunk.k_cmp, chunk.v_cmp, dq)
    slc, win = (gradients(branch, k, v, torch.empty_like(q)) for branch in (1, 2))
    entries = chunk.k_cmp.float(), chunk.v_cmp.float()

    def bits() -> Tensor:
        return tile_bits(branches.indices, size=size, num_keys=q.shape[1], entries=False)

    def lists() -> None:
        width = call.plan.rules.backward_width(size)
        for _ in backward.list_chunks(call, slc, bits(), size=size, width=width, entries=False):
            pass

    def selected(call: Call = call) -> None:
        local = backward.local_selected(chunk, gated)
        backward.backward_selected(call, slc, branches.indices, gated.delta[1], local=local)

    def window() -> None:
        backward.backward_window(call, win, gated.delta[2], local=backward.local_selected(chunk, gated))

    stages: dict[str, Callable[[], Any]] = {
        "gate gradients": gate,
        "compressed": lambda: backward.backward_compressed(call, cmp, branches.cmp_indices, gated.delta[0]),
        "selected, lists": lists,
        "selected, FA4": partial(selected, replace(call, plan=replace(call.plan, selected_backward="fa4"))),
    }
    if call.plan.selected_backward == "split":
        of_lists, of_bits = selected_lists(call, q, k, branches.indices, 0), bits()
        given = q, k, v, do, slc.lse, gated.delta[1], of_lists
        options: dict[str, Any] = {"keys": call.token, "scale": call.scale}
        stages |= {
            "selected, split": selected,
            "split, dq": lambda: selected_backward.selected_dq(*given, dq=slc.dq, **options),
            "split, dk dv": lambda: selected_backward.selected_dkv(
                *given, of_bits, size=size, dk=slc.dk, dv=slc.dv, **options
            ),
        }
    sums = [slc.dk, win.dk], [slc.dv, win.dv]
    return stages | {
        "window": window,
        "query sums": lambda: query_gradients(dq, QueryTerms((dq, slc.dq, win.dq), gated.logits, weight)),
        "key sums": lambda: key_gradients(dk, dv, *sums, entries=entries, keys=call.entry),
    }


if __name__ == "__main__":
    sys.exit(main())

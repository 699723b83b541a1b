"""Attention of each token to its own blocks alone (the selected branch of the paper's NSA) on an NVIDIA GPU.

B = 1, bf16, D = D_v = 128, l' = 64, n = 16, at 64 query heads over 4 and over 1 and 32 over 8, for these selections:

    random   any 16 blocks up to the token's own
    local    the first block, the token's own and the one before, then near ones: with a weight of 1 / distance
    text     what NSA selects for the embeddings of a real text (bench/inputs.py)
    file     --indices FILE: NSAAux.indices of some model, `[1,S,N,16]`, saved by torch.save; its S heads in turn

Stages are replays of CUDA graphs: lists (the worklist alone), forward (KV-outer), tiles (the forward query-outer, whose
time depends on the selection), backward, both; beside them fla-core's selected branch as Python calls it. Before
anything is timed, o, dq, dk and dv of samples must be within the budget of bench/oracles.py of fp64.

Writes OUT.json (schema: docs/results_files.md) after every choice and number of heads; the same command goes on where
it was stopped or killed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench import selected_branch
from bench.bars import Bar, figure
from bench.common import comma_list, make_parser, parse_args, positive
from bench.inputs import Sizes, make_problem
from bench.passes import FINITE, PASSES, Measured, Plan, Task, measure_peer, p50, release
from bench.peers import selected_peer
from bench.report import LOCAL_RESULTS, gpu_facts
from bench.results_file import Measurement, Results, Row, WrongResult, run
from bench.roofline import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, Peaks, Work
from bench.selected_branch import Branch, draw_blocks
from bench.timing import copy_bandwidth, graph_ms, peak_memory
from nsa import NSAConfig, nsa_forward_aux

DIM, SIZE, SLOTS = 128, 64, 16
HEADS = ((64, 4), (32, 8), (64, 1))
CHOICES = ("random", "local", "text")
BARS = {(64, 4): {"forward": 13.6, "both": 43.8}, (32, 8): {"forward": 26.9, "both": 65.4}}
"""Milliseconds of the fastest peer (SFNSA both times), random choices of BAR_TOKENS tokens."""
BAR_TOKENS = 64 << 10
PEER_STAGES = {"forward": PASSES["forward"], "both": PASSES["full"]}  # Passes of fla beside ours
DEVICE = torch.device("cuda")
LINE = "{n:>8} {h:>3}/{h_kv} {choice:<8}{stage:<10}{ms:9.3f} ms  floor {floor_ms:8.3f} {share:6.0%}  fla {fla_ms:ms} ms"


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "bars", "peak-tflops", "out", out=str(LOCAL_RESULTS / "token-selected"))
    parser.add_argument("--seqlens", type=comma_list(positive), default="64K", help="default: %(default)s")
    parser.add_argument("--indices", type=Path, metavar="FILE", help="choices to time, too, of all their tokens")
    args = parse_args(parser, argv)
    facts = gpu_facts(parser, args.peak_tflops)
    given = None if args.indices is None else load_indices(args.indices)
    cases = list(product(args.seqlens, CHOICES))
    cases += [] if given is None else [(given.shape[2], "file")]

    def parts(results: Results) -> Iterator[Measurement]:
        peaks = Peaks(facts["peak_tflops"], results.fact("copy_tbs", copy_bandwidth))
        for (n, choice), (heads, kv_heads) in product(cases, HEADS):
            yield f"{n} {heads}/{kv_heads} {choice}", partial(measure_case, n, heads, kv_heads, choice, given, peaks)

    return run(args, facts, parts, LINE, bars=find_bars)


def measure_case(
    n: int, heads: int, kv_heads: int, choice: str, given: Tensor | None, peaks: Peaks
) -> Iterator[Row | str]:
    """A row for each stage. Raises WrongResult."""
    branch, where = make_branch(n, heads, kv_heads, choice, given), f"{n:>8} {heads:>3}/{kv_heads} {choice:<8}"
    if wrong := [f"{where}{error}" for error in errors(branch)]:
        raise WrongResult(*wrong)
    rows = stages(branch, choice, peaks)
    peer = peer_passes(branch)
    for row in rows:
        found = peer.get(row["stage"])
        yield {**row, "fla_ms": p50(found.timing) if isinstance(found, Measured) else None}
    yield from (f"{where}{stage}: fla: {why}" for stage, why in peer.items() if isinstance(why, str))


def make_branch(n: int, heads: int, kv_heads: int, choice: str, given: Tensor | None = None) -> Branch:
    """Normal inputs and chosen blocks. Args: `given`: what was chosen, if `choice` is "file"."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(of: int) -> Tensor:
        return torch.randn((1, n, of, DIM), generator=generator, device=DEVICE, dtype=torch.bfloat16)

    q, do, k, v = normal(heads), normal(heads), normal(kv_heads), normal(kv_heads)
    if choice == "file" and given is not None:
        indices = given[:, torch.arange(kv_heads, device=DEVICE) % given.shape[1]].contiguous()
    elif choice == "text":
        text = make_problem("text", Sizes(1, n, heads, kv_heads, DIM), device=DEVICE, dtype=torch.bfloat16, gated=False)
        config = NSAConfig.paper(select_block_size=SIZE, num_selected_blocks=SLOTS)
        indices = nsa_forward_aux(text.q, text.k, text.v, config=config)[1].indices
    else:
        weigh = near if choice == "local" else lambda noise, *_: noise
        indices = draw_blocks((1, kv_heads, n), SIZE, SLOTS, generator, weigh)
    return Branch(q, k, v, do, indices, SIZE)


def load_indices(path: Path) -> Tensor:
    """int32 `[1,S,N,SLOTS]` from a file. Raises ValueError for another tensor."""
    indices: Tensor = torch.load(path, map_location=DEVICE, weights_only=True)
    if indices.dtype != torch.int32 or indices.dim() != 4 or indices.shape[::3] != (1, SLOTS):
        raise ValueError(f"{path} must hold int32 [1,S,N,{SLOTS}], got {indices.dtype} {list(indices.shape)}")
    own = torch.arange(indices.shape[2], device=DEVICE)[:, None] // SIZE
    if not bool(((indices >= -1) & (indices <= own)).all()):
        raise ValueError(f"{path} must hold blocks of {SIZE} tokens up to each token's own, or -1")
    return indices


def near(noise: Tensor, own: Tensor, block: Tensor) -> Tensor:
    """Scores of the choice "local": with Gumbel noise, what is best is drawn by weight."""
    scores = noise.log().neg().log().neg() - (own - block).clamp(min=1).log()
    return scores.masked_fill((block == 0) | (block >= own - 1), math.inf)


def errors(branch: Branch) -> list[str]:
    """Errors above their budgets, in the groups of the first and the last key/value head."""
    out, *_ = branch.saved
    by_query_outer, _ = branch.query_outer()
    found: list[str] = []
    for head in {0, branch.k.shape[2] - 1}:
        tensors, own = (branch.q, branch.k, branch.v), (branch.do, branch.blocks, SIZE, head)
        both = selected_branch.errors(lambda do: (out, *branch.backward(do)), tensors, *own)
        query_outer = selected_branch.errors(lambda _: (by_query_outer,), tensors, *own)
        found += [f"head {head}: {error}" for error in both if not error.within]
        found += [f"head {head}, query-outer: {error}" for error in query_outer if not error.within]
    return found


def stages(branch: Branch, choice: str, peaks: Peaks) -> list[Row]:
    _, n, heads, _ = branch.q.shape
    kv_heads = branch.k.shape[2]
    group = heads // kv_heads
    seen = float((branch.blocks >= 0).sum()) * SIZE * group  # pairs of a row and a key; the own block's as a whole
    row, key, number = 2 * n * heads * DIM, 2 * n * kv_heads * DIM, 4 * n * heads
    forward = Work(2 * row + 2 * key + number, FORWARD_PRODUCTS * 2 * DIM * seen)
    backward = Work(3 * row + 4 * key + 2 * number, BACKWARD_PRODUCTS * 2 * DIM * seen)

    def lists() -> None:
        from cute_kernels.attend.kv_outer import MIN_TILE_ROWS, PARTIAL_BYTES
        from cute_kernels.lists.worklist import worklist_chunks

        how: dict[str, Any] = {"size": SIZE, "min_rows": -(-MIN_TILE_ROWS // group), "packed": None}
        for _ in worklist_chunks(branch.blocks, **how, token_bytes=SLOTS * group * DIM * 2, max_bytes=PARTIAL_BYTES):
            pass

    calls: dict[str, tuple[Callable[[], Any], Work]] = {
        "lists": (lists, Work(2 * 4 * branch.blocks.numel())),
        "forward": (branch.forward, forward),
        "tiles": (branch.query_outer, forward),
        "backward": (branch.backward, backward),
        "both": (lambda: (branch.forward(), branch.backward()), Work(*map(sum, zip(forward, backward, strict=True)))),
    }
    rows = []
    for stage, (call, work) in calls.items():
        peak_gib = peak_memory(call, DEVICE)
        ms, floor = graph_ms(call, DEVICE, most=20), work.floor_ms(peaks.tbs, peaks.tflops)
        sizes = {"n": n, "h": heads, "h_kv": kv_heads, "choice": choice, "stage": stage}
        rows.append({**sizes, "ms": ms, "floor_ms": floor, "share": floor / ms, "peak_gib": peak_gib})
    return rows


def peer_passes(branch: Branch) -> dict[str, Measured | str]:
    """fla's forward and both, or why they did not run."""
    task = Task((branch.q, branch.k, branch.v), branch.do, ("dq", "dk", "dv"), FINITE)
    plan = Plan(tuple(PEER_STAGES.values()), seconds=0.5)
    _, found = measure_peer(partial(selected_peer, branch.blocks, SIZE), task, plan)
    release(DEVICE)
    return {stage: found[direction] for stage, direction in PEER_STAGES.items()}


def find_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """Faster than the best peer that was measured before, and than the one that is measured beside."""
    for heads, of_stage in BARS.items():
        for stage, ms in of_stage.items():
            where = {"n": BAR_TOKENS, "choice": "random", "h": heads[0], "h_kv": heads[1], "stage": stage}
            what = f"selected alone, {heads[0]}/{heads[1]}, {stage}"
            yield Bar(what, figure(rows, where, "ms"), ms, at_least=False, unit=" ms")
            times = figure(rows, where, "fla_ms", "ms")
            if times is not None:
                yield Bar(f"{what}, fla takes as long or longer", times, 1, at_least=True, unit="x")


if __name__ == "__main__":
    sys.exit(main())

"""Attention of each token to its own blocks alone (the selected branch of the paper's NSA) on an NVIDIA GPU.

B = 1, bf16, D = D_v = 128, l' = 64, n = 16, at 64 query heads over 4 and over 1 and 32 over 8, for these selections:

    random   any 16 blocks up to the token's own
    local    the first block, the token's own and the one before, then near ones: with a weight of 1 / distance
    text     what NSA selects for the embeddings of a real text (bench/inputs.py)
    file     --indices FILE: NSAAux.indices of some model, `[1,S,N,16]`, saved by torch.save; its S heads in turn

Stages are replays of CUDA graphs: lists (the worklist alone), forward (KV-outer), tiles (the forward query-outer, whose
time depends on the selection), backward, both. A floor is the larger of the bytes of inputs and outputs at the copy
bandwidth measured here and of the products at the peak; what KV-outer must move besides is in
cute_kernels/attend/kv_outer.py and kv_outer_backward.py. Before anything is timed, o, dq, dk and dv of samples must be
within twice the error of the same math in PyTorch, plus one rounding, of fp64. fla-core's selected branch for the same
selection, as Python calls it, is measured beside forward and both, where it runs.

Writes OUT.json (schema: docs/results_files.md) after every choice and number of heads; the same command goes on where
it was stopped or killed. With --bars also what has to be reached on one H200: the best of the peers that were measured
there, random choices of 64K tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench import oracles
from bench.bars import Bar, bars_field
from bench.common import above_zero, positive
from bench.inputs import Sizes
from bench.inputs import make_problem as make_inputs
from bench.nsa_peers import Finite, selected_peer
from bench.passes import PASSES, Plan, Task, find_peer, measure_peer, release
from bench.report import LOCAL_RESULTS, command_line, environment
from bench.results_file import open_results
from bench.roofline import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, Work, choose_peaks
from bench.show import show_bars
from bench.timing import capture, copy_bandwidth, measure, peak_memory
from nsa import NSAConfig, nsa_forward_aux

DIM, SIZE, SLOTS = 128, 64, 16
HEADS = ((64, 4), (32, 8), (64, 1))
CHOICES = ("random", "local", "text")
BARS = {(64, 4): {"forward": 13.6, "both": 43.8}, (32, 8): {"forward": 26.9, "both": 65.4}}
"""Milliseconds of the fastest peer (SFNSA both times), random choices of BAR_TOKENS tokens."""
BAR_TOKENS = 64 << 10
CHUNK = 4096
"""Tokens whose blocks are chosen at a time."""
SAMPLES = 256
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Row:
    n: int
    h: int
    h_kv: int
    choice: str
    stage: str
    ms: float
    floor_ms: float
    share: float
    peak_gib: float | None
    fla_ms: float | None = None


@dataclass(frozen=True)
class Problem:
    """Tensors of both passes, and the forward's results."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    indices: Tensor
    o: Tensor
    lse: Tensor
    delta: Tensor

    @property
    def how(self) -> dict[str, Any]:
        return {"size": SIZE, "scale": DIM**-0.5}

    # Kernels are imported where they are called: the command line needs no CuTe DSL.

    def forward(self) -> tuple[Tensor, Tensor]:
        from cute_kernels.attend.kv_outer import kv_outer_forward

        return kv_outer_forward(self.q, self.k, self.v, self.indices, **self.how)

    def query_outer(self) -> tuple[Tensor, Tensor]:
        from cute_kernels.attend.query_outer import query_outer_forward

        return query_outer_forward(self.q, self.k, self.v, self.indices, **self.how)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        from cute_kernels.attend.kv_outer_backward import kv_outer_backward

        into = torch.empty_like(self.q), torch.empty_like(self.k), torch.empty_like(self.v)
        given = self.q, self.k, self.v, self.indices, self.do, self.lse, self.delta
        kv_outer_backward(*given, into=into, **self.how)
        return into


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", default="64K", help="default: %(default)s")
    parser.add_argument("--choices", nargs="*", choices=CHOICES, default=list(CHOICES), help="default: all")
    parser.add_argument(
        "--indices", type=Path, metavar="FILE", help="choices to time, too, for as many tokens as they are"
    )
    parser.add_argument("--bars", action="store_true", help="hold the figures against what they have to reach")
    parser.add_argument("--peak-tflops", type=above_zero, help="of the device; default: known of H100 and H200")
    parser.add_argument("--out", default=str(LOCAL_RESULTS / "token-selected"), help="results, without suffix")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    facts = environment(DEVICE)
    peaks = choose_peaks(facts["device"], args.peak_tflops, None)
    if peaks is None:
        parser.error(f"--peak-tflops: not known of {facts['device']}")
    given = None if args.indices is None else load_indices(args.indices)
    cases = list(product(map(positive, args.seqlens.split(",")), args.choices))
    cases += [] if given is None else [(given.shape[2], "file")]
    head = {**facts, "peak_tflops": peaks.tflops, "command": command_line(argv)}
    with open_results(Path(args.out), head) as results:
        copy_tbs = results.fact("copy_tbs", copy_bandwidth)
        print(f"copy: {copy_tbs:.2f} TB/s", flush=True)
        for (n, choice), (heads, kv_heads) in product(cases, HEADS):
            part = f"{n} {heads}/{kv_heads} {choice}"
            if part in results.parts:
                continue
            problem = make_problem(n, heads, kv_heads, choice, given)
            where = f"{n:>8} {heads:>3}/{kv_heads} {choice:<8}"
            if wrong := [f"{where}{error}" for error in errors(problem)]:
                results.fail(wrong, missing=[])
                sys.exit("\n".join(wrong))
            alone, found = stages(problem, choice, copy_tbs, peaks.tflops), peer_times(problem)
            took = {stage: ms for stage, ms in found.items() if isinstance(ms, float)}
            missing = [f"{where}{stage}: fla: {why}" for stage, why in found.items() if isinstance(why, str)]
            rows = [replace(row, fla_ms=took.get(row.stage)) for row in alone]
            results.add(part, list(map(asdict, rows)), missing)
            for row in rows:
                beside = "" if row.fla_ms is None else f"  fla {row.fla_ms:.3f} ms"
                share = f"floor {row.floor_ms:8.3f} {row.share:6.0%}"
                print(f"{where}{row.stage:<10}{row.ms:9.3f} ms  {share}{beside}", flush=True)
            print(*missing, sep="\n", end="\n" if missing else "", flush=True)
        bars = find_bars([Row(**row) for row in results.rows]) if args.bars else []
        results.finish(missing=results.missing, **bars_field(bars if args.bars else None))
    if bars:
        show_bars(bars)


def make_problem(n: int, heads: int, kv_heads: int, choice: str, given: Tensor | None = None) -> Problem:
    """Normal inputs, chosen blocks, and what the forward makes of them.

    Args:
        given: what was chosen, if `choice` is "file".
    """
    from cute_kernels.attend.kv_outer import kv_outer_forward

    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(of: int) -> Tensor:
        return torch.randn((1, n, of, DIM), generator=generator, device=DEVICE, dtype=torch.bfloat16)

    q, do, k, v = normal(heads), normal(heads), normal(kv_heads), normal(kv_heads)
    if choice == "file" and given is not None:
        indices = given[:, torch.arange(kv_heads, device=DEVICE) % given.shape[1]].contiguous()
    elif choice == "text":
        indices = choose_by_text(n, heads, kv_heads)
    else:
        indices = choose(n, kv_heads, choice, generator)
    o, lse = kv_outer_forward(q, k, v, indices, size=SIZE, scale=DIM**-0.5)
    delta = (o.float() * do.float()).sum(-1).transpose(1, 2).contiguous()
    return Problem(q, k, v, do, indices, o, lse, delta)


def load_indices(path: Path) -> Tensor:
    """int32 `[1,S,N,SLOTS]` from a file.

    Raises:
        ValueError: for what is no choice of blocks up to each token's own, ascending, then -1.
    """
    indices = torch.load(path, map_location=DEVICE, weights_only=True)
    if not isinstance(indices, Tensor) or indices.dtype != torch.int32:
        raise ValueError(f"{path} must hold an int32 tensor, got {getattr(indices, 'dtype', type(indices).__name__)}")
    if indices.dim() != 4 or indices.shape[0] != 1 or indices.shape[3] != SLOTS:
        raise ValueError(f"{path} must hold [1,S,N,{SLOTS}], got {list(indices.shape)}")
    own = torch.arange(indices.shape[2], device=DEVICE)[:, None] // SIZE
    behind_all = len(own) + torch.arange(SLOTS, device=DEVICE)
    ascending = (indices.where(indices != -1, behind_all).diff(dim=-1) > 0).all()
    if not bool(((indices >= -1) & (indices <= own)).all() & ascending):
        raise ValueError(f"{path} must hold blocks of {SIZE} tokens up to each token's own, ascending, then -1")
    return indices


def choose_by_text(n: int, heads: int, kv_heads: int) -> Tensor:
    """Blocks that token mode chooses for queries and keys that are embeddings of a text."""
    text = make_inputs("text", Sizes(1, n, heads, kv_heads, DIM), device=DEVICE, dtype=torch.bfloat16, gated=False)
    config = NSAConfig.paper(select_block_size=SIZE, num_selected_blocks=SLOTS)
    return nsa_forward_aux(text.q, text.k, text.v, config=config)[1].indices


def choose(n: int, kv_heads: int, choice: str, generator: torch.Generator) -> Tensor:
    """int32 `[1,H_kv,n,SLOTS]`, ascending, then -1: the highest of random scores of the blocks up to each token's."""
    blocks = torch.arange(-(-n // SIZE), device=DEVICE)
    chosen = torch.full((1, kv_heads, n, SLOTS), -1, dtype=torch.int32, device=DEVICE)
    for head in range(kv_heads):
        for start in range(0, n, CHUNK):
            own = torch.arange(start, min(start + CHUNK, n), device=DEVICE)[:, None] // SIZE
            noise = torch.rand((len(own), len(blocks)), generator=generator, device=DEVICE)
            scores = noise
            if choice == "local":
                scores = noise.log().neg().log().neg() - (own - blocks).clamp(min=1).log()  # Gumbel: drawn by weight
                scores = scores.masked_fill((blocks == 0) | (blocks >= own - 1), math.inf)
            best = scores.masked_fill(blocks > own, -math.inf).topk(min(SLOTS, len(blocks)), dim=1)
            order = best.indices.masked_fill(best.values == -math.inf, len(blocks)).sort(1).values
            chosen[0, head, start : start + CHUNK, : order.shape[1]] = order.where(order < len(blocks), -1)
    return chosen


def errors(problem: Problem) -> list[str]:
    """Errors above their budgets: of o and dq of some tokens, dk and dv of a block, against fp64."""
    n, kv_heads = problem.k.shape[1:3]
    group = problem.q.shape[2] // kv_heads
    generator = torch.Generator().manual_seed(1)
    dq, dk, dv = problem.backward()
    by_query_outer, _ = problem.query_outer()
    found: list[str] = []
    for kv_head in {0, kv_heads - 1}:
        heads = slice(kv_head * group, (kv_head + 1) * group)
        tokens = torch.randperm(n, generator=generator)[:SAMPLES].sort().values.to(DEVICE)
        chosen = problem.indices[0, kv_head, tokens].long()
        keys = (chosen[..., None] * SIZE + torch.arange(SIZE, device=DEVICE)).where(chosen[..., None] >= 0, n)
        block = int(torch.randint(-(-n // SIZE), (1,), generator=generator))
        of_block = torch.arange(block * SIZE, min((block + 1) * SIZE, n), device=DEVICE)
        selecting = (problem.indices[0, kv_head] == block).any(1).nonzero()[:, 0]
        got = {"o": problem.o[0, tokens, heads], "o, query-outer": by_query_outer[0, tokens, heads]}
        got |= {"dq": dq[0, tokens, heads], "dk": dk[0, of_block, kv_head], "dv": dv[0, of_block, kv_head]}
        exact, low = (
            expected(problem, kv_head, heads, tokens, keys.flatten(1), selecting, of_block, dtype)
            for dtype in (torch.float64, torch.bfloat16)
        )
        for name, result in got.items():
            right = exact[name.partition(",")[0]]
            error = (result.double() - right).abs().max().item()
            allowed = 2 * (low[name.partition(",")[0]].double() - right).abs().max().item()
            allowed += torch.finfo(result.dtype).eps * right.abs().max().item()
            if not error <= allowed:
                found.append(f"{name} of head {kv_head}: error {error:.3e} is above {allowed:.3e}")
    return found


def expected(
    problem: Problem,
    kv_head: int,
    heads: slice,
    tokens: Tensor,
    keys: Tensor,
    selecting: Tensor,
    block: Tensor,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """o and dq of tokens that chose `keys` `[tokens,m]`, dk and dv of the keys of a block that some tokens selected.

    Args:
        dtype: what is multiplied is rounded to it, and so are results.
    """
    wide, scale, n = oracles.wide(dtype), DIM**-0.5, problem.k.shape[1]

    def of(tokens: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, do = (x[0, tokens, heads][:, None].to(wide) for x in (problem.q, problem.do))  # [tokens,1,heads,D]
        k, v = (
            x[0, keys.clamp(max=n - 1), kv_head][:, None].to(wide) for x in (problem.k, problem.v)
        )  # [tokens,1,m,D]
        lse, delta = (x[0, heads, tokens].T[:, None, :, None].to(wide) for x in (problem.lse, problem.delta))
        logits = (q @ k.mT * scale).masked_fill((keys > tokens[:, None])[:, None, None], -math.inf)
        o = oracles.rounded(logits.softmax(-1), dtype) @ v
        return o, *oracles.head_gradients(do, q, k, v, (logits - lse).exp(), delta, scale, dtype)

    o, dq, *_ = of(tokens, keys)
    parts = [of(some, block.expand(len(some), -1))[2:] for some in selecting.split(CHUNK)]
    dk, dv = (torch.stack([x.sum(0) for x in part]).sum(0) for part in zip(*parts, strict=True))
    found = {"o": o[:, 0], "dq": dq[:, 0], "dk": dk[0], "dv": dv[0]}
    return {name: oracles.rounded(x, dtype) for name, x in found.items()}


def stages(problem: Problem, choice: str, copy_tbs: float, tflops: float) -> list[Row]:
    _, n, heads, _ = problem.q.shape
    kv_heads = problem.k.shape[2]
    group = heads // kv_heads
    seen = float((problem.indices >= 0).sum()) * SIZE * group  # pairs of a row and a key; the own block's as a whole
    row, key, number = 2 * n * heads * DIM, 2 * n * kv_heads * DIM, 4 * n * heads
    work = {
        "lists": Work(2 * 4 * problem.indices.numel()),
        "forward": Work(2 * row + 2 * key + number, FORWARD_PRODUCTS * 2 * DIM * seen),
        "backward": Work(3 * row + 4 * key + 2 * number, BACKWARD_PRODUCTS * 2 * DIM * seen),
    }
    forward, backward = work["forward"], work["backward"]
    work["tiles"] = forward
    work["both"] = Work(forward.bytes + backward.bytes, forward.flops + backward.flops)

    def lists() -> None:
        from cute_kernels.attend.kv_outer import MIN_TILE_ROWS, PARTIAL_BYTES
        from cute_kernels.lists.worklist import worklist_chunks

        min_rows, token_bytes = -(-MIN_TILE_ROWS // group), SLOTS * group * DIM * 2
        how = {
            "size": SIZE,
            "min_rows": min_rows,
            "token_bytes": token_bytes,
            "max_bytes": PARTIAL_BYTES,
            "packed": None,
        }
        for _ in worklist_chunks(problem.indices, **how):  # type: ignore[arg-type]
            pass

    calls: dict[str, Callable[[], Any]] = {
        "lists": lists,
        "forward": problem.forward,
        "tiles": problem.query_outer,
        "backward": problem.backward,
        "both": lambda: (problem.forward(), problem.backward()),
    }
    rows = []
    for stage, call in calls.items():
        peak_gib = peak_memory(call, DEVICE)
        ms = measure(capture(call, DEVICE).replay, DEVICE, seconds=0.5, most=20).ms_p50
        torch.cuda.empty_cache()  # graphs keep what they reserved
        floor = work[stage].floor_ms(copy_tbs, tflops)
        rows.append(Row(n, heads, kv_heads, choice, stage, ms, floor, floor / ms, peak_gib))
    return rows


def peer_times(problem: Problem) -> dict[str, float | str]:
    """Milliseconds of fla's forward and of both, or why there are none."""
    task = Task((problem.q, problem.k, problem.v), problem.do, ("dq", "dk", "dv"), Finite())
    peer = find_peer(partial(selected_peer, problem.indices, SIZE), task)
    found: dict[str, float | str] = {}
    for stage, direction in (("forward", PASSES["forward"]), ("both", PASSES["full"])):
        measured = measure_peer(peer, direction, task, Plan((direction,), timed=True, memory=False, seconds=0.5))
        if isinstance(measured, str):
            found[stage] = measured
        elif measured.timing is not None:
            found[stage] = measured.timing.ms_p50
    release(DEVICE)
    return found


def find_bars(rows: list[Row]) -> list[Bar]:
    """Faster than the best peer that was measured before, and than the one that is measured beside."""
    measured = {((row.h, row.h_kv), row.stage): row for row in rows if (row.n, row.choice) == (BAR_TOKENS, "random")}
    bars = []
    for heads, of_stage in BARS.items():
        for stage, ms in of_stage.items():
            row, what = measured.get((heads, stage)), f"selected alone, {heads[0]}/{heads[1]}, {stage}"
            bars.append(Bar(what, None if row is None else row.ms, ms, at_least=False, unit=" ms"))
            if row is not None and row.fla_ms is not None:
                ratio = row.fla_ms / row.ms
                bars.append(Bar(f"{what}, fla takes as long or longer", ratio, 1, at_least=True, unit="x"))
    return bars


if __name__ == "__main__":
    main()

"""Attention of each token to its own blocks alone (the selected branch of the paper's NSA) on an NVIDIA GPU.

B = 1, bf16, D = D_v = 128, l' = 64, n = 16, at 64 query heads over 4 and 32 over 8, for two ways to choose:

    random   any 16 blocks up to the token's own
    local    the first block, the token's own and the one before, then near ones: with a weight of 1 / distance

Stages are replays of CUDA graphs: lists (the choices turned around), forward, backward, both. A floor is the larger of
the bytes of inputs and outputs at the copy bandwidth measured here and of the products at the peak; what this way to
compute must move besides is in cute_kernels/token_selected*.py. Before anything is timed, o, dq, dk and dv of samples
must be within twice the error of the same math in PyTorch, plus one rounding, of fp64.

Writes OUT.json: {device, versions, commit, gate, copy_tbs, peak_tflops, command, rows: [{n, h, h_kv, choice, stage, ms,
floor_ms, share, peak_gib}]}; on a red gate there are no rows.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.common import positive
from bench.report import LOCAL_RESULTS, command_line, environment, write_json
from bench.roofline import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, Work, choose_peaks
from bench.timing import capture, copy_bandwidth, measure, peak_memory
from cute_kernels.segments import passes
from cute_kernels.token_selected import PART_BYTES, SEGMENT_ROWS, token_selected_forward
from cute_kernels.token_selected_backward import token_selected_backward

DIM, SIZE, SLOTS = 128, 64, 16
HEADS = ((64, 4), (32, 8))
CHOICES = ("random", "local")
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

    def forward(self) -> tuple[Tensor, Tensor]:
        return token_selected_forward(self.q, self.k, self.v, self.indices, **self.how)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        return token_selected_backward(self.q, self.k, self.v, self.indices, self.do, self.lse, self.delta, **self.how)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", default="64K", help="default: %(default)s")
    parser.add_argument("--peak-tflops", type=float, help="of the device; default: known of H100 and H200")
    parser.add_argument("--out", default=str(LOCAL_RESULTS / "token-selected"), help="results, without suffix")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    facts = environment(DEVICE)
    peaks = choose_peaks(facts["device"], args.peak_tflops, None)
    if peaks is None:
        parser.error(f"--peak-tflops: not known of {facts['device']}")
    copy_tbs = copy_bandwidth()
    print(f"copy: {copy_tbs:.2f} TB/s")
    rows: list[Row] = []
    wrong: list[str] = []
    for n in map(positive, args.seqlens.split(",")):
        for heads, kv_heads in HEADS:
            for choice in CHOICES:
                problem = make_problem(n, heads, kv_heads, choice)
                wrong += [f"{n}, {heads}/{kv_heads}, {choice}: {error}" for error in errors(problem)]
                for row in stages(problem, choice, copy_tbs, peaks.tflops) if not wrong else []:
                    rows.append(row)
                    shown = f"{row.ms:9.3f} ms  floor {row.floor_ms:8.3f} {row.share:6.0%}"
                    print(f"{n:>8} {heads:>3}/{kv_heads} {choice:<8}{row.stage:<10}{shown}")
    content = {
        **facts,
        "gate": "red" if wrong else "green",
        "copy_tbs": copy_tbs,
        "peak_tflops": peaks.tflops,
        "command": command_line(),
        "rows": [] if wrong else [asdict(row) for row in rows],
    }
    write_json(Path(args.out).with_suffix(".json"), content)
    if wrong:
        sys.exit("\n".join(wrong))


def make_problem(n: int, heads: int, kv_heads: int, choice: str) -> Problem:
    """Normal inputs, chosen blocks, and what the forward makes of them."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(of: int) -> Tensor:
        return torch.randn((1, n, of, DIM), generator=generator, device=DEVICE, dtype=torch.bfloat16)

    q, do, k, v = normal(heads), normal(heads), normal(kv_heads), normal(kv_heads)
    indices = choose(n, kv_heads, choice, generator)
    o, lse = token_selected_forward(q, k, v, indices, size=SIZE, scale=DIM**-0.5)
    delta = (o.float() * do.float()).sum(-1).transpose(1, 2).contiguous()
    return Problem(q, k, v, do, indices, o, lse, delta)


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
    """What is not within its budget: o and dq of some tokens, dk and dv of a block, against fp64."""
    n, kv_heads = problem.k.shape[1:3]
    group = problem.q.shape[2] // kv_heads
    generator = torch.Generator().manual_seed(1)
    dq, dk, dv = problem.backward()
    found: list[str] = []
    for kv_head in {0, kv_heads - 1}:
        heads = slice(kv_head * group, (kv_head + 1) * group)
        tokens = torch.randperm(n, generator=generator)[:SAMPLES].sort().values.to(DEVICE)
        chosen = problem.indices[0, kv_head, tokens].long()
        keys = (chosen[..., None] * SIZE + torch.arange(SIZE, device=DEVICE)).flatten(1)
        seen = (chosen >= 0).repeat_interleave(SIZE, 1) & (keys <= tokens[:, None])
        keys = keys.clamp(0, n - 1)
        rows = rows_of(problem, kv_head, heads, tokens, keys, seen)
        block = int(torch.randint(-(-n // SIZE), (1,), generator=generator))
        of_block = torch.arange(block * SIZE, min((block + 1) * SIZE, n), device=DEVICE)
        visitors = (problem.indices[0, kv_head] == block).any(1).nonzero()[:, 0]
        columns = columns_of(problem, kv_head, heads, visitors, of_block)
        got = {"o": problem.o[0, tokens, heads], "dq": dq[0, tokens, heads]}
        got |= {"dk": dk[0, of_block, kv_head], "dv": dv[0, of_block, kv_head]}
        for name, (oracle, naive) in {**rows, **columns}.items():
            error = (got[name].double() - oracle).abs().max().item()
            allowed = 2 * (naive.double() - oracle).abs().max().item()
            allowed += torch.finfo(got[name].dtype).eps * oracle.abs().max().item()
            if not error <= allowed:
                found.append(f"{name} of head {kv_head}: error {error:.3e} is above {allowed:.3e}")
    return found


def rows_of(
    problem: Problem, kv_head: int, heads: slice, tokens: Tensor, keys: Tensor, seen: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """o and dq of tokens that see `keys` where `seen`, `[tokens,m]`: in fp64, and with what is multiplied rounded."""
    results: dict[str, list[Tensor]] = {"o": [], "dq": []}
    scale = DIM**-0.5
    for low in (False, True):
        dtype = torch.float32 if low else torch.float64

        def rounded(x: Tensor, low: bool = low) -> Tensor:
            return x.to(torch.bfloat16).to(x.dtype) if low else x

        q, do = (x[0, tokens, heads].to(dtype) for x in (problem.q, problem.do))
        k, v = (x[0, keys, kv_head].to(dtype) for x in (problem.k, problem.v))
        lse, delta = (x[0, heads, tokens].T[..., None].to(dtype) for x in (problem.lse, problem.delta))
        logits = (torch.einsum("thd,tmd->thm", q, k) * scale).masked_fill(~seen[:, None], -math.inf)
        results["o"].append(rounded(torch.einsum("thm,tmd->thd", rounded(logits.softmax(-1)), v)))
        ds = (logits - lse).exp() * (torch.einsum("thd,tmd->thm", do, v) - delta)
        results["dq"].append(rounded(torch.einsum("thm,tmd->thd", rounded(ds), k) * scale))
    return {name: (exact, low) for name, (exact, low) in results.items()}


def columns_of(
    problem: Problem, kv_head: int, heads: slice, tokens: Tensor, keys: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """dk and dv of `keys` that `tokens` chose, likewise."""
    results: dict[str, list[Tensor]] = {"dk": [], "dv": []}
    scale = DIM**-0.5
    for low in (False, True):
        dtype = torch.float32 if low else torch.float64
        sums = [torch.zeros((len(keys), DIM), dtype=dtype, device=DEVICE) for _ in range(2)]
        for some in tokens.split(CHUNK):
            q, do = (x[0, some, heads].to(dtype) for x in (problem.q, problem.do))
            k, v = (x[0, keys, kv_head].to(dtype) for x in (problem.k, problem.v))
            lse, delta = (x[0, heads, some].T[..., None].to(dtype) for x in (problem.lse, problem.delta))
            logits = (q @ k.T * scale).masked_fill((keys > some[:, None])[:, None], -math.inf)
            p = (logits - lse).exp()
            ds = p * (do @ v.T - delta)
            if low:
                p, ds = (x.to(torch.bfloat16).to(dtype) for x in (p, ds))
            sums[0] += torch.einsum("thm,thd->md", ds, q) * scale
            sums[1] += torch.einsum("thm,thd->md", p, do)
        for name, x in zip(results, sums, strict=True):
            results[name].append(x.to(torch.bfloat16).to(dtype) if low else x)
    return {name: (exact, low) for name, (exact, low) in results.items()}


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
    work["both"] = Work(forward.bytes + backward.bytes, forward.flops + backward.flops)

    def lists() -> None:
        length, token_bytes = -(-SEGMENT_ROWS // group), SLOTS * group * DIM * 2
        how = {"size": SIZE, "length": length, "token_bytes": token_bytes, "most_bytes": PART_BYTES, "bounds": None}
        for _ in passes(problem.indices, **how):  # type: ignore[arg-type]
            pass

    calls: dict[str, Callable[[], Any]] = {
        "lists": lists,
        "forward": problem.forward,
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


if __name__ == "__main__":
    main()

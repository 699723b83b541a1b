"""Packed documents against the other ways to run them: padded to the longest, or one call after the other.

Lengths are drawn log-uniformly between 256 and 32K tokens from a fixed seed until TOKENS are reached. The packed result
must equal each document's alone, bit for bit, or nothing is timed.
Writes OUT.json: {device, versions, commit, tokens, lengths, rows: [{name, ms_p50, peak_gib, tokens_per_ms}]}.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.common import positive
from bench.inputs import Sizes, make_problem
from bench.report import LOCAL_RESULTS, command_line, environment, write_json
from bench.timing import measure
from nsa import NSAConfig, nsa_forward

SHORTEST, LONGEST = 256, 32 << 10
HEADS, KV_HEADS, DIM = 8, 2, 128


@dataclass(frozen=True)
class Row:
    name: str
    ms_p50: float
    peak_gib: float | None
    tokens_per_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=256 << 10, help="of all documents; default: 256K")
    parser.add_argument("--out", default=str(LOCAL_RESULTS / "varlen"), help="results, without suffix")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    device, config = torch.device("cuda"), NSAConfig()
    lengths = draw_lengths(args.tokens)
    print(f"{len(lengths)} documents, {sum(lengths):,} tokens, from {min(lengths):,} to {max(lengths):,}")

    sizes = Sizes(1, sum(lengths), HEADS, KV_HEADS, DIM)
    problem = make_problem("random", sizes, device=device, dtype=torch.bfloat16)
    q, k, v, weight = problem.q[0], problem.k[0], problem.v[0], problem.gate_proj_weight
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    slices = [slice(start, stop) for start, stop in pairwise([0, *accumulate(lengths)])]
    padded_q, padded_k, padded_v = (_padded(x, slices) for x in (q, k, v))

    def packed() -> Tensor:
        return nsa_forward(q, k, v, gate_proj_weight=weight, cu_seqlens=bounds, config=config)

    def padded() -> Tensor:
        return nsa_forward(padded_q, padded_k, padded_v, gate_proj_weight=weight, config=config)

    def one_by_one() -> list[Tensor]:
        return [nsa_forward(q[None, s], k[None, s], v[None, s], gate_proj_weight=weight, config=config) for s in slices]

    out = packed()
    for some, alone in zip(slices, one_by_one(), strict=True):
        if not torch.equal(out[some], alone[0]):
            raise SystemExit(f"tokens {some.start} to {some.stop} differ from their document alone: no times")
    ways: dict[str, Callable[[], object]] = {"packed": packed, "padded": padded, "one by one": one_by_one}
    rows = []
    for name, call in ways.items():
        timing = measure(call, device, seconds=0.5)
        rows.append(Row(name, timing.ms_p50, timing.peak_gib, sum(lengths) / timing.ms_p50))
        rate = f"{rows[-1].tokens_per_ms:7.0f} tokens/ms"
        print(f"{name:<12}{timing.ms_p50:9.3f} ms  {timing.peak_gib or 0:6.2f} GiB  {rate}")
    content = {
        **environment(device),
        "tokens": sum(lengths),
        "lengths": lengths,
        "command": command_line(),
        "rows": [asdict(row) for row in rows],
    }
    write_json(Path(args.out).with_suffix(".json"), content)


def draw_lengths(tokens: int) -> list[int]:
    """Lengths that add up to `tokens`; the last one is cut."""
    generator = random.Random(0)
    lengths: list[int] = []
    while (rest := tokens - sum(lengths)) > 0:
        lengths.append(min(rest, round(SHORTEST * (LONGEST / SHORTEST) ** generator.random())))
    return lengths


def _padded(packed: Tensor, slices: list[slice]) -> Tensor:
    longest = max(some.stop - some.start for some in slices)
    padded = packed.new_zeros((len(slices), longest, *packed.shape[1:]))
    for row, some in zip(padded, slices, strict=True):
        row[: some.stop - some.start] = packed[some]
    return padded


if __name__ == "__main__":
    main()

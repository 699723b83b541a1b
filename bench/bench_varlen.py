"""Packed documents against the other ways to run them: padded to the longest, or one call after the other.

Lengths are drawn log-uniformly between 256 and 32K tokens from a fixed seed. The packed output must equal each
document's alone, bit for bit, and with --backward gradients but for rounding, or nothing is timed. Writes OUT.json
(schema: docs/results_files.md) after every way to run them; the same command resumes where it was stopped or killed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.common import make_parser, parse_args, positive
from bench.inputs import Sizes, make_problem
from bench.report import LOCAL_RESULTS, environment
from bench.results_file import Measurement, Results, Row, WrongResult, run
from bench.timing import measure
from nsa import NSAConfig, nsa, nsa_forward
from nsa.inputs import NSAInputs

SHORTEST, LONGEST = 256, 32 << 10
HEADS, KV_HEADS, DIM = 8, 2, 128
LINE = "{name:<12}{ms_p50:9.3f} ms  {peak_gib:.2f} GiB  {tokens_per_ms:7.0f} tokens/ms"


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "out", out=str(LOCAL_RESULTS / "varlen"))
    parser.add_argument("--tokens", type=positive, default=256 << 10, help="of all documents; default: 256K")
    parser.add_argument("--backward", action="store_true", help="forward + backward")
    args = parse_args(parser, argv)
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    device, lengths = torch.device("cuda"), draw_lengths(args.tokens)
    print(f"{len(lengths)} documents, {sum(lengths):,} tokens, from {min(lengths):,} to {max(lengths):,}")
    facts = {"direction": "fwd+bwd" if args.backward else "fwd", "tokens": sum(lengths), "lengths": lengths}

    def parts(_: Results) -> Iterator[Measurement]:
        sizes = Sizes(1, sum(lengths), HEADS, KV_HEADS, DIM)
        inputs = make_problem("random", sizes, device=device, dtype=torch.bfloat16, requires_grad=args.backward)
        ways = make_ways(inputs, lengths, NSAConfig(), args.backward)
        wrong = compare(ways["packed"].call(), ways["one by one"].call(), lengths)
        if wrong is not None:
            raise WrongResult(wrong)
        for name, way in ways.items():
            yield name, partial(measured, name, way)

    def measured(name: str, way: Way) -> Iterator[Row]:
        timing = measure(way.call, device, seconds=0.5).holding(way.given if args.backward else [])
        row = {"name": name, "ms_p50": timing.ms_p50, "peak_gib": timing.peak_gib}
        yield {**row, "tokens_per_ms": sum(lengths) / timing.ms_p50}

    return run(args, {**environment(device), **facts}, parts, LINE, fields=lambda _: {})


Outputs = dict[str, Tensor]  # out; with backward also the gradients of q, k, v and the gates' projection


class Way(NamedTuple):
    call: Callable[[], list[Outputs]]  # Results of each call of the op that it takes
    given: list[Tensor]  # Tensors that exist before: inputs and do


def make_ways(inputs: NSAInputs, lengths: list[int], config: NSAConfig, backward: bool) -> dict[str, Way]:
    """Packed; padded to the longest; one by one. Args: `inputs`, of one sequence as long as all documents."""
    do = torch.randn_like(inputs.q[0])
    starts = [0, *accumulate(lengths)]
    slices = [slice(start, stop) for start, stop in pairwise(starts)]
    bounds = torch.tensor(starts, dtype=torch.int32, device=do.device)

    def leaves(change: Callable[[Tensor], Tensor]) -> NSAInputs:
        q, k, v = (change(x[0].detach()).requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v))
        return NSAInputs(q, k, v, gate_proj_weight=inputs.gate_proj_weight)

    def run(some: NSAInputs, do: Tensor, **packed: Tensor) -> Outputs:
        wanted = some.tensors()
        given: dict[str, Any] = {**wanted, "config": config, **packed}
        if not backward:
            return {"out": nsa_forward(**given)}
        out = nsa(**given)
        gradients = torch.autograd.grad(out, list(wanted.values()), do, materialize_grads=True)
        return {"out": out.detach(), **dict(zip(wanted, gradients, strict=True))}

    def given(some: NSAInputs, do: Tensor) -> list[Tensor]:
        return [some.q, some.k, some.v, do]

    packed, padded_do = leaves(lambda x: x), _padded(do, slices)
    padded = leaves(lambda x: _padded(x, slices))
    alone = [leaves(lambda x, some=some: x[None, some]) for some in slices]  # type: ignore[misc]
    one_by_one = list(zip(alone, (do[None, some] for some in slices), strict=True))
    return {
        "packed": Way(lambda: [run(packed, do, cu_seqlens=bounds)], given(packed, do)),
        "padded": Way(lambda: [run(padded, padded_do)], given(padded, padded_do)),
        "one by one": Way(lambda: [run(*one) for one in one_by_one], given(packed, do)),
    }


def compare(packed: list[Outputs], alone: list[Outputs], lengths: list[int]) -> str | None:
    """Description of the first wrong packed result, or None.

    Outputs must be the same bits. Gradients are sums whose order differs: packed ones may be off by the dtype's eps in
    the root mean square, which is more than the roundings of the parts and the result amount to (each at most eps / 2),
    of the document's or of all documents' gradient (a row that sees one key has none but rounding).
    """
    whole = dict(packed[0])
    starts = [0, *accumulate(lengths)]
    mean_squares = {name: tensor.float().square().mean() for name, tensor in whole.items()}
    for (start, stop), expected in zip(pairwise(starts), alone, strict=True):
        for name in [name for name in whole if name != "gate_proj_weight"]:
            got, right = whole[name][start:stop], expected[name][0]
            if not (torch.equal(got, right) if name == "out" else _close(got, right, mean_squares[name])):
                what = "" if name == "out" else f" in the gradient of {name}"
                return f"tokens {start} to {stop} differ from their document alone{what}"
    if "gate_proj_weight" in whole:
        total = torch.stack([expected["gate_proj_weight"].float() for expected in alone]).sum(0)
        if not _close(whole["gate_proj_weight"], total, mean_squares["gate_proj_weight"]):
            return "the gradient of gate_proj_weight differs from the sum over documents"
    return None


def _close(got: Tensor, right: Tensor, mean_square: Tensor) -> bool:
    error = (got.float() - right.float()).square().mean()
    return bool(error <= torch.finfo(got.dtype).eps ** 2 * torch.maximum(right.float().square().mean(), mean_square))


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
    sys.exit(main())

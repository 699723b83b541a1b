"""Packed documents against the other ways to run them: padded to the longest, or one call after the other.

Lengths are drawn log-uniformly between 256 and 32K tokens from a fixed seed. The packed output must equal each
document's alone, bit for bit, and with --backward gradients but for rounding, or nothing is timed. Writes OUT.json
(schema: docs/results_files.md) after every way to run them; the same command resumes where it was stopped or killed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
        inputs = make_problem("random", sizes, device=device, dtype=torch.bfloat16)
        ways = make_ways(inputs, lengths, args.backward)
        (packed,), alone = (call_all(ways[name], NSAConfig()) for name in ("packed", "one by one"))
        if wrong := compare(packed, alone, lengths):
            raise WrongResult(wrong)
        del packed, alone
        for name, calls in ways.items():
            yield name, partial(measured, name, calls)

    def measured(name: str, calls: list[Call]) -> Iterator[Row]:
        given = [x for some, do, _ in calls for x in (some.q, some.k, some.v, do)]
        timing = measure(partial(call_all, calls, NSAConfig()), device, seconds=0.5)
        timing = timing.holding(given if args.backward else [])
        row = {"name": name, "ms_p50": timing.ms_p50, "peak_gib": timing.peak_gib}
        yield {**row, "tokens_per_ms": sum(lengths) / timing.ms_p50}

    return run(args, {**environment(device), **facts}, parts, LINE, fields=lambda _: {})


Call = tuple[NSAInputs, Tensor, dict[str, Tensor]]  # A call of the op: its inputs, its do, and cu_seqlens of a pack
Outputs = dict[str, Tensor]  # out; with backward also the gradients of q, k, v and the gates' projection


def make_ways(inputs: NSAInputs, lengths: list[int], backward: bool) -> dict[str, list[Call]]:
    """Packed; padded to the longest; one by one. Args: `inputs`, of one sequence as long as all documents."""
    whole = [inputs.q[0], inputs.k[0], inputs.v[0], torch.randn_like(inputs.q[0])]
    weight = None if inputs.gate_proj_weight is None else inputs.gate_proj_weight.requires_grad_(backward)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=inputs.q.device)

    def call(tensors: Iterable[Tensor], **packed: Tensor) -> Call:
        q, k, v, do = (x.detach() for x in tensors)
        q, k, v = (x.requires_grad_(backward) for x in (q, k, v))
        return NSAInputs(q, k, v, gate_proj_weight=weight), do, packed

    return {
        "packed": [call(whole, cu_seqlens=bounds)],
        "padded": [call(pad_sequence(x.split(lengths), batch_first=True) for x in whole)],
        "one by one": [call(x[None] for x in one) for one in zip(*(x.split(lengths) for x in whole), strict=True)],
    }


def call_all(calls: list[Call], config: NSAConfig) -> list[Outputs]:
    outputs = []
    for some, do, packed in calls:
        wanted = some.tensors()
        given: dict[str, Any] = {**wanted, "config": config, **packed}
        if some.q.requires_grad:
            out = nsa(**given)
            gradients = torch.autograd.grad(out, list(wanted.values()), do, materialize_grads=True)
            outputs.append({"out": out.detach(), **dict(zip(wanted, gradients, strict=True))})
        else:
            outputs.append({"out": nsa_forward(**given)})
    return outputs


def compare(packed: Outputs, alone: list[Outputs], lengths: list[int]) -> str:
    """Description of the first wrong packed result, or "".

    Outputs must be the same bits. Gradients are sums whose order differs: packed ones may be off by the dtype's eps in
    the root mean square, which is more than the roundings of the parts and the result amount to (each at most eps / 2),
    of the document's or of all documents' gradient (a row that sees one key has none but rounding).
    """
    for name, whole in packed.items():
        mean_square = whole.float().square().mean()
        if name == "gate_proj_weight":
            total = torch.stack([expected[name].float() for expected in alone]).sum(0)
            if not _close(whole, total, mean_square):
                return f"the gradient of {name} differs from the sum over documents"
            continue
        for i, (got, expected) in enumerate(zip(whole.split(lengths), alone, strict=True)):
            right = expected[name][0]
            if not (torch.equal(got, right) if name == "out" else _close(got, right, mean_square)):
                return (
                    f"document {i} differs from the same alone{'' if name == 'out' else f' in the gradient of {name}'}"
                )
    return ""


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


if __name__ == "__main__":
    sys.exit(main())

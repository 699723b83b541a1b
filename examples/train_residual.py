"""Train a byte-level language model on real text, with a residual stream and with attention residual.

    sum a pre-norm transformer: the input of every layer is the sum of the embedding and of all earlier outputs
    attention the input of every layer, and of the head, is their attention residual instead: a mixture with weights per
    token, from a learned query (arXiv 2603.15031)

Weights, batches and causal softmax attention are the same. Queries start at zero, so that all outputs have equal
weights, and layers normalise their input. Both models are therefore equal before the first step.

Writes OUT.json (schema: docs/results_files.md) and OUT.png after each variant.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import dispatch
from bench.common import SDPA, choose_backend, with_ending
from bench.report import write_json
from bench.results_file import replaced_results
from examples.shared.byte_models import (
    MODEL_OPTIONS,
    ByteModel,
    ByteTrainer,
    Curves,
    DenseAttention,
    Row,
    Show,
    TextTrainer,
    add_numbers,
    add_run_options,
    add_training_options,
    bits_per_byte,
    check_length,
    console,
    cost_texts,
    introduce,
    load_corpus,
    new_table,
    plot,
    resolve_options,
    run_facts,
    show_results,
    train_variants,
)
from nsa import AttentionResidual

VARIANTS = ("sum", "attention")
DEFAULTS: dict[str, dict[str, int]] = {
    "cpu": {
        "steps": 200,
        "batch": 8,
        "context": 128,
        "layers": 6,
        "width": 96,
        "heads": 3,
        "kv_heads": 1,
        "eval_every": 20,
        "eval_windows": 64,
    },
    "cuda": {
        "steps": 600,
        "batch": 16,
        "context": 1024,
        "layers": 12,
        "width": 512,
        "heads": 8,
        "kv_heads": 2,
        "eval_every": 50,
        "eval_windows": 128,
    },
}
"""Defaults by device: about a minute for both variants on one CPU core; not timed on a GPU."""


class AttentionResidualModel(ByteModel):
    """ByteModel whose layers and head have the attention residual of all earlier outputs as input."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, backend: str | None) -> None:
        super().__init__(layers, width, lambda: DenseAttention(width, heads, kv_heads, SDPA))
        self.mixtures = nn.ModuleList(AttentionResidual(width, backend=backend) for _ in range(2 * layers + 1))

    def through_blocks(self, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        outputs, mixtures = [hidden], iter(self.mixtures)
        for block in self.blocks:
            # Under autocast outputs have 16 bits; keep them in fp32 like the residual stream
            outputs.append(block.attend(next(mixtures)(outputs), table).to(hidden.dtype))  # type: ignore[operator]
            outputs.append(block.feed_forward(next(mixtures)(outputs)).to(hidden.dtype))  # type: ignore[operator]
        mixed: Tensor = next(mixtures)(outputs)
        return mixed


def make_model(variant: str, args: argparse.Namespace) -> ByteModel:
    """The model of a variant; `ByteModel.initialise` sets its weights."""
    if variant == "attention":
        return AttentionResidualModel(args.layers, args.width, args.heads, args.kv_heads, args.mixing_backend)
    return ByteModel(args.layers, args.width, lambda: DenseAttention(args.width, args.heads, args.kv_heads, SDPA))


def count_parameters(variant: str, args: argparse.Namespace) -> int:
    with torch.device("meta"):  # shapes without memory
        return sum(parameter.numel() for parameter in make_model(variant, args).parameters())


@dataclass(frozen=True)
class Summary:
    """Results of a variant."""

    variant: str
    steps: int
    final_val_loss: float
    bits_per_byte: float
    tokens_per_s: float | None
    peak_gib: float | None


def summarise(trainer: ByteTrainer, show: Show) -> tuple[list[Row], Summary]:
    rows, cost = trainer.train(show)
    final = rows[-1]
    losses = (final.val_loss, bits_per_byte(final.val_loss))
    return rows, Summary(trainer.variant, final.step, *losses, cost.tokens_per_s, cost.peak_gib)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with replaced_results(Path(args.out), ".png"):
        return run(args)


def run(args: argparse.Namespace) -> int:
    corpus = load_corpus(Path(sysconfig.get_path("stdlib")))
    check_length(corpus, args.context)
    try:
        args.mixing_backend, note = resolve(args)
    except (ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal
    content = run_facts(args, corpus.facts(), {variant: count_parameters(variant, args) for variant in args.variants})
    content["backend"] = args.mixing_backend
    introduce(args, content, f"attention residual by {args.mixing_backend}")
    if note:
        console.print(note, style="yellow", markup=False)
    rows: list[Row] = []
    summaries: list[Summary] = []
    out = Path(args.out)

    def train(variant: str, show: Show) -> None:
        own, summary = summarise(TextTrainer(variant, make_model(variant, args), args, corpus), show)
        rows.extend(own)
        summaries.append(summary)
        results = {
            "verdict": verdict(summaries),
            "rows": [asdict(row) for row in rows],
            "summary": [asdict(summary) for summary in summaries],
        }
        write_json(with_ending(out, ".json"), {**content, **results})
        plot(rows, with_ending(out, ".png"), content["device"], CURVES)

    train_variants(args, train)
    table = new_table("variant", "val loss", "bits/byte", "bytes/s", "peak GiB", "steps")
    for s in summaries:
        table.add_row(s.variant, f"{s.final_val_loss:.4f}", f"{s.bits_per_byte:.4f}", *cost_texts(s), str(s.steps))
    show_results(table, verdict(summaries), out)
    return 0


def resolve(args: argparse.Namespace) -> tuple[str, str]:
    """The backend of attention residual, and a note if it is the reference because no kernel is available.

    Raises:
        ValueError, dispatch.BackendError: for a named backend that is not available.
    """
    shape = (args.batch, args.context, args.width)
    options = {"blocks": 2 * args.layers + 1, "stacked": False, "shape": shape}
    device = torch.device(args.device)
    return choose_backend(
        dispatch.Call("attention_residual", device, torch.float32, backward=True, options=options), args.backend
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser, VARIANTS, "train-residual", "attention residual")
    add_numbers(parser.add_argument_group("model"), DEFAULTS, MODEL_OPTIONS)
    add_training_options(parser, DEFAULTS)
    args = parser.parse_args(argv)
    resolve_options(parser, args, DEFAULTS)
    return args


# What is shown


def verdict(summaries: list[Summary]) -> str:
    """Conclusion from the losses, with its limits."""
    by_name = {summary.variant: summary for summary in summaries}
    summed, attention = (by_name.get(name) for name in VARIANTS)
    if summed is None or attention is None:
        return "One variant alone says nothing about the other."
    if summed.steps != attention.steps:
        return f"The variants did {summed.steps} and {attention.steps} steps, so they are not compared."
    share = attention.final_val_loss / summed.final_val_loss - 1
    return (
        f"With attention residual the final validation loss is {abs(share):.1%} "
        f"{'below' if share < 0 else 'above'} that with sums. One seed each: small differences may be noise."
    )


def _style(variant: str) -> dict[str, Any]:
    return {"color": {"sum": "black", "attention": "C0"}[variant], "linewidth": 2}


CURVES = Curves("sum", "sums", _style)


if __name__ == "__main__":
    sys.exit(main())

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
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import dispatch
from examples.shared import byte_models as common
from nsa import AttentionResidual

VARIANTS = ("sum", "attention")
DEFAULTS = {
    "steps": (200, 600),
    "batch": (8, 16),
    "context": (128, 1024),
    "layers": (6, 12),
    "width": (96, 512),
    "heads": (3, 8),
    "kv_heads": (1, 2),
    "eval_every": (20, 50),
    "eval_windows": (64, 128),
}
"""Defaults on CPUs and GPUs: about a minute for both variants on one CPU core; not timed on a GPU."""


class AttentionResidualModel(common.ByteModel):
    """ByteModel whose layers and head have the attention residual of all earlier outputs as input."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, backend: str | None) -> None:
        super().__init__(layers, width, lambda: common.DenseAttention(width, heads, kv_heads))
        self.mixtures = nn.ModuleList(AttentionResidual(width, backend=backend) for _ in range(2 * layers + 1))

    def through_blocks(self, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        outputs, mixtures = [hidden], iter(self.mixtures)
        for block in self.blocks:
            # Under autocast outputs have 16 bits; keep them in fp32 like the residual stream
            outputs.append(block.attend(next(mixtures)(outputs), table).to(hidden.dtype))  # type: ignore[operator]
            outputs.append(block.feed_forward(next(mixtures)(outputs)).to(hidden.dtype))  # type: ignore[operator]
        return next(mixtures)(outputs)


def make_model(variant: str, args: argparse.Namespace) -> common.ByteModel:
    heads = (args.width, args.heads, args.kv_heads)
    if variant == "attention":
        return AttentionResidualModel(args.layers, *heads, args.mixing_backend)
    return common.ByteModel(args.layers, args.width, lambda: common.DenseAttention(*heads))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    corpus = common.load_text(args.context)
    args.mixing_backend = resolve(args)
    facts = common.describe(args, corpus.facts(), make_model, f"attention residual by {args.mixing_backend}")
    facts["backend"] = args.mixing_backend

    common.record_variants(
        args,
        facts,
        train=lambda variant: common.TextTrainer(variant, make_model(variant, args), args, corpus).train(),
        conclude=lambda results: {"verdict": verdict(results["summary"])},
        draw=partial(common.draw_curves, "sum"),
    )
    return 0


def resolve(args: argparse.Namespace) -> str:
    options = {"blocks": 2 * args.layers + 1, "stacked": False, "shape": (args.batch, args.context, args.width)}
    what = ("attention_residual", torch.device(args.device), torch.float32)
    return common.backend_of(lambda: dispatch.Call(*what, backward=True, options=options), args.backend)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = common.new_parser(__doc__, DEFAULTS, out="train-residual")
    common.add_variants(parser, VARIANTS)
    args = parser.parse_args(argv)
    common.resolve_options(parser, args, DEFAULTS)
    return args


def verdict(summaries: list[common.Row]) -> str:
    losses = {summary["variant"]: summary["final_val_loss"] for summary in summaries}
    if len(losses) < len(VARIANTS):
        return "One variant alone says nothing about the other."
    share = losses["attention"] / losses["sum"] - 1
    return (
        f"With attention residual the final validation loss is {abs(share):.1%} "
        f"{'below' if share < 0 else 'above'} that with sums. One seed each: small differences may be noise."
    )


if __name__ == "__main__":
    sys.exit(main())

"""Trains a byte-level language model on real text: dense attention, NSA, and NSA with branches taken away.

The text is what every machine has: the sources of the Python standard library, some files of it kept for validation.
All variants start from the same weights, as far as they share them, and see the same batches in the same order:

    dense           causal softmax attention over the whole context
    nsa             compressed, selected and window branch
    window          the window branch alone: what a model reaches without long-range attention
    no-compressed, no-selected, no-window    NSA without one branch

NSA has learned gates that dense attention lacks, and `window` keeps its own, so that it is as strong as it can be.

Selection per tile looks at all queries of a tile, later ones too. What a model gains from that is measured: for sampled
bytes the loss is computed again with everything behind them cut off (`lookahead`, the loss that this adds).

Writes OUT.json (schema: docs/architecture.md) and OUT.png after each variant.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import dispatch
from bench.common import DTYPES, SDPA, Dense, choose_backend, choose_dense, nsa_facts
from bench.inputs import Sizes
from bench.report import write_json
from examples.byte_models import (
    MODEL_OPTIONS,
    ByteModel,
    ByteTrainer,
    Corpus,
    Curves,
    DenseAttention,
    Row,
    Show,
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
    rotate,
    run_facts,
    show_results,
    train_variants,
)
from nsa import NSAConfig, NSAttention

BRANCHES = ("compressed", "selected", "window")
VARIANTS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "nsa": BRANCHES,
    "window": ("window",),
    "no-compressed": ("selected", "window"),
    "no-selected": ("compressed", "window"),
    "no-window": ("compressed", "selected"),
}
"""The branches of NSA that each variant has."""

DEFAULTS: dict[str, dict[str, int]] = {
    "cpu": {
        "steps": 120,
        "batch": 4,
        "context": 512,
        "layers": 2,
        "width": 96,
        "heads": 3,
        "kv_heads": 1,
        "block_size": 16,
        "k": 4,
        "w": 16,
        "q_tile": 64,
        "eval_every": 20,
        "eval_windows": 16,
        "cuts": 8,
    },
    "cuda": {
        "steps": 1600,
        "batch": 4,
        "context": 8192,
        "layers": 6,
        "width": 512,
        "heads": 8,
        "kv_heads": 2,
        "block_size": 64,
        "k": 8,
        "w": 128,
        "q_tile": 256,
        "eval_every": 100,
        "eval_windows": 32,
        "cuts": 32,
    },
}
"""What depends on the device: a few seconds per variant on two CPU cores, a minute on an H200.

1600 steps of 32 KiB read 10 MB of sources five times; after that the models begin to know them by heart."""

TOLERANCE = 0.02
"""A loss within this share of dense attention's counts as equal to it."""


# The variants


def close_compressed(_projection: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
    """Forward hook of a gate projection: the compressed branch weighs sigmoid(-inf) = 0 and still scores blocks."""
    per_head: Tensor = logits.unflatten(-1, (-1, len(BRANCHES)))
    compressed = torch.arange(len(BRANCHES), device=logits.device) == BRANCHES.index("compressed")
    return per_head.masked_fill(compressed, -math.inf).flatten(-2)


def variant_config(variant: str, config: NSAConfig) -> NSAConfig:
    """`config` without the selected or the window branch, where the variant has none."""
    if "selected" not in VARIANTS[variant]:
        config = replace(config, num_selected_blocks=0, num_init_blocks=0, num_local_blocks=0)
    return config if "window" in VARIANTS[variant] else replace(config, window_size=0)


def make_attention(
    variant: str, width: int, heads: int, kv_heads: int, *, config: NSAConfig, dense: Dense, backend: str | None
) -> NSAttention:
    if variant == "dense":
        return DenseAttention(width, heads, kv_heads, dense)
    config = variant_config(variant, config)
    attention = NSAttention(width, heads, kv_heads, config=config, gate="x", rope=rotate, backend=backend)
    if "compressed" not in VARIANTS[variant] and attention.gate_proj is not None:
        attention.gate_proj.register_forward_hook(close_compressed)
    return attention


def make_model(variant: str, args: argparse.Namespace) -> ByteModel:
    """Without values of its own choice: `ByteModel.initialise` comes after."""

    def attention() -> NSAttention:
        return make_attention(
            variant,
            args.width,
            args.heads,
            args.kv_heads,
            config=args.config,
            dense=args.dense,
            backend=args.backends[variant],
        )

    return ByteModel(args.layers, args.width, attention, checkpointing=args.checkpointing)


def count_parameters(variant: str, args: argparse.Namespace) -> int:
    with torch.device("meta"):  # sizes, no values
        return sum(parameter.numel() for parameter in make_model(variant, args).parameters())


# Training


@dataclass(frozen=True)
class Summary:
    """What a variant came to. `relative_to_dense`: final loss over dense attention's, where both did the same steps."""

    variant: str
    steps: int
    final_val_loss: float
    bits_per_byte: float
    relative_to_dense: float | None
    lookahead: float | None
    """Loss that cutting off the bytes behind the predicted one adds, where selection is per tile; else None."""
    lookahead_error: float | None
    """Its standard error over the sampled bytes."""
    tokens_per_s: float | None
    peak_gib: float | None


class Trainer(ByteTrainer):
    """One variant, with what its selection gains from later queries."""

    def __init__(self, variant: str, args: argparse.Namespace, corpus: Corpus) -> None:
        super().__init__(variant, make_model(variant, args), args, corpus)

    @torch.no_grad()
    def lookahead(self, cuts: list[int]) -> tuple[float, float]:
        """Nats that predictions lose when the text is cut off behind each of these positions: mean, standard error."""
        added = []
        for part in self.validation.split(self.args.batch):
            whole = self.losses(part)
            added += [self.losses(part[:, : cut + 2])[:, cut] - whole[:, cut] for cut in cuts]
        samples = torch.cat(added).double()
        return samples.mean().item(), (samples.std() / math.sqrt(len(samples))).item()

    def looks_ahead(self) -> bool:
        return "selected" in VARIANTS[self.variant] and not self.args.config.token_mode

    def run(self, show: Show) -> tuple[list[Row], Summary]:
        rows, cost = self.train(show)
        added = error = None
        if self.looks_ahead():
            generator = torch.Generator().manual_seed(self.args.seed)
            cuts = torch.randperm(self.args.context, generator=generator)[: self.args.cuts].tolist()
            added, error = self.lookahead(cuts)
        final = rows[-1]
        losses = (final.val_loss, bits_per_byte(final.val_loss))
        return rows, Summary(self.variant, final.step, *losses, None, added, error, cost.tokens_per_s, cost.peak_gib)


def relate(summaries: list[Summary]) -> list[Summary]:
    """The summaries with each final loss related to that of dense attention."""
    dense = next((s for s in summaries if s.variant == "dense"), None)
    if dense is None:
        return summaries
    return [
        replace(s, relative_to_dense=s.final_val_loss / dense.final_val_loss if s.steps == dense.steps else None)
        for s in summaries
    ]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    corpus = load_corpus(Path(sysconfig.get_path("stdlib")))
    check_length(corpus, args.context)
    try:
        notes = resolve(args)
    except (TypeError, ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal

    content = facts(args, corpus)
    introduce(args, content, f"dense attention by {args.dense.name}")
    for note in notes:
        console.print(note, style="yellow", markup=False)
    rows: list[Row] = []
    summaries: list[Summary] = []
    out = Path(args.out)

    def train(variant: str, show: Show) -> None:
        own, summary = Trainer(variant, args, corpus).run(show)
        rows.extend(own)
        summaries[:] = relate([*summaries, summary])
        results = {
            "rows": [asdict(row) for row in rows],
            "summary": [asdict(summary) for summary in summaries],
            "verdict": verdict(summaries),
        }
        write_json(out.with_suffix(".json"), {**content, **results})
        plot(rows, out.with_suffix(".png"), content["device"], CURVES)

    train_variants(args, train)
    print_summary(summaries, out)
    return 0


def resolve(args: argparse.Namespace) -> list[str]:
    """Set `args.dense` and `args.backends`, by variant; say where that is the reference for want of a kernel.

    Raises:
        ValueError, dispatch.BackendError: for a backend asked for by name that cannot run a variant.
    """
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    args.dense = choose_dense(device, dtype) if args.flash else SDPA
    args.backends = dict.fromkeys(args.variants)
    notes: dict[str, None] = {}
    sizes = Sizes(args.batch, args.context, args.heads, args.kv_heads, args.width // args.heads)
    for variant in args.variants:
        if variant == "dense":
            continue
        call = nsa_facts(sizes, variant_config(variant, args.config), device, dtype, backward=True)
        args.backends[variant], note = choose_backend(call, args.backend)
        if note:
            notes[note] = None
    return list(notes)


def facts(args: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """What the results file says about the run beside its results."""
    found = run_facts(args, corpus, {variant: count_parameters(variant, args) for variant in args.variants})
    found["training"]["checkpointing"] = args.checkpointing
    return {**found, "variants": {variant: describe(variant, args) for variant in args.variants}}


def describe(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    if variant == "dense":
        return {"attention": args.dense.name}
    config = asdict(variant_config(variant, args.config))
    return {"attention": "NSA", "branches": VARIANTS[variant], "backend": args.backends[variant], "config": config}


# The command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser, list(VARIANTS), "train", "NSA, as in nsa")
    parser.add_argument(
        "--flash", action="store_true", help="dense attention by FlashAttention-4 where it is installed, not by PyTorch"
    )
    add_numbers(parser.add_argument_group("model"), DEFAULTS, MODEL_OPTIONS)
    group = parser.add_argument_group("options of NSA (see NSAConfig)")
    options = (
        ("block-size", "compress_block_size and select_block_size"),
        ("k", "num_selected_blocks"),
        ("w", "window_size"),
        ("q-tile", "q_tile_size"),
    )
    add_numbers(group, DEFAULTS, options)
    group.add_argument("--init-blocks", type=int, default=1, help="num_init_blocks; default: %(default)s")
    group.add_argument("--local-blocks", type=int, default=1, help="num_local_blocks; default: %(default)s")
    cuts = ("cuts", "places per validation sequence at which the lookahead is measured")
    group = add_training_options(parser, DEFAULTS, [cuts])
    group.add_argument("--checkpointing", action="store_true", help="keep block inputs only, and recompute in backward")
    args = parser.parse_args(argv)
    resolve_options(parser, args, DEFAULTS)
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set `args.config`, or end with what is wrong with the arguments."""
    if args.k * args.block_size >= args.context:
        parser.error(
            f"--context must hold more than --k blocks of --block-size, or nothing is left to select: "
            f"got {args.context}, {args.k} and {args.block_size}"
        )
    if args.cuts > args.context:
        parser.error(f"--cuts must be at most --context, got {args.cuts} and {args.context}")
    try:
        args.config = NSAConfig.seed(
            compress_block_size=args.block_size,
            num_selected_blocks=args.k,
            window_size=args.w,
            q_tile_size=args.q_tile,
            num_init_blocks=args.init_blocks,
            num_local_blocks=args.local_blocks,
        )
    except (TypeError, ValueError) as error:
        parser.error(str(error))


# What is shown


def verdict(summaries: list[Summary]) -> str:
    """What the losses say about NSA, with what speaks against it."""
    by_name = {summary.variant: summary for summary in summaries}
    nsa, dense, window = (by_name.get(name) for name in ("nsa", "dense", "window"))
    if nsa is None:
        return "NSA itself was not trained, so there is nothing to conclude about it."
    sentences = []
    for other, name in ((dense, "dense attention"), (window, "the window-only control")):
        if other is None:
            continue
        if other.steps != nsa.steps:
            sentences.append(f"NSA and {name} did {nsa.steps} and {other.steps} steps, so they are not compared.")
            continue
        share = nsa.final_val_loss / other.final_val_loss - 1
        place = f"{abs(share):.1%} {'below' if share < 0 else 'above'}"
        if other is dense:
            answer = "within" if abs(share) <= TOLERANCE else "better than" if share < 0 else "not within"
            sentences.append(f"NSA's final validation loss is {place} that of {name}: {answer} {TOLERANCE:.0%}.")
        else:
            answer = "better" if share < 0 else "not better"
            sentences.append(f"It is {place} that of {name}: {answer}.")
    if nsa.lookahead is not None and nsa.lookahead_error is not None:
        sentences.append(
            f"Cutting off the bytes behind the predicted one, which selection per tile looks at, changes NSA's loss by "
            f"{nsa.lookahead / nsa.final_val_loss:+.1%} ± {nsa.lookahead_error / nsa.final_val_loss:.1%}."
        )
    return " ".join([*sentences, "One seed each: small differences may be noise."])


def print_summary(summaries: list[Summary], out: Path) -> None:
    table = new_table("variant", "val loss", "bits/byte", "vs dense", "lookahead", "bytes/s", "peak GiB", "steps")
    for s in summaries:
        distance = "" if s.relative_to_dense is None else f"{s.relative_to_dense - 1:+.1%}"
        added = "" if s.lookahead is None else f"{s.lookahead:+.4f} ± {s.lookahead_error:.4f}"
        losses = (f"{s.final_val_loss:.4f}", f"{s.bits_per_byte:.4f}")
        table.add_row(s.variant, *losses, distance, added, *cost_texts(s), str(s.steps))
    show_results(table, verdict(summaries), out)


def _style(variant: str) -> dict[str, Any]:
    return {
        "color": "black" if variant == "dense" else f"C{list(VARIANTS).index(variant) - 1}",
        "linestyle": "--" if variant.startswith("no-") else "-",
        "linewidth": 2 if variant in ("dense", "nsa") else 1.4,
    }


CURVES = Curves("dense", "dense attention", _style, band=TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

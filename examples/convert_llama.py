"""Train a tiny dense Llama of transformers, convert it to NSA, and measure the jump in loss and the recovery.

The model reads bytes of the Python standard library. After training it is converted once for each choice of initial
gates, and the increase of the loss right after conversion is the jump. Then each model, and the dense one, continues
training on the same batches; the remaining difference is the cost of NSA. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.common import above_zero, make_parser, positive, with_ending
from bench.extras import needed
from bench.report import command_line, environment, relative, write_json
from bench.results_file import replaced_results
from bench.show import print_table, say
from examples.shared import byte_models as common
from nsa import NSAConfig

STARTS: dict[str, tuple[float, float, float] | None] = {
    "near dense, the default": None,
    "selected branch almost alone": (0.01, 0.98, 0.01),
    "one third each": (1 / 3, 1 / 3, 1 / 3),
    "one half each": (0.5, 0.5, 0.5),
}
"""Gates of compressed, selected and window branch right after conversion."""
OPTIONS = {
    "steps": (800, "training steps of the dense model"),
    "more": (60, "training steps after conversion"),
    "context": (256, "bytes of a sequence"),
    "width": (64, "width of the residual stream, a multiple of 8"),
    "layers": (2, "transformer blocks"),
    "batch": (8, "sequences per step"),
    "windows": (32, "validation sequences"),
}
"""Defaults and meanings of options that are positive integers."""
WARM_UP = 20


def options(context: int) -> NSAConfig:
    """The paper's options, with sizes that are sparse in a short context: a token selects at most an eighth of it."""
    block = max(2, context // 32)
    sizes = {"compress_block_size": block, "compress_stride": max(1, block // 2), "select_block_size": block}
    return NSAConfig.paper(**sizes, num_selected_blocks=4, window_size=block)  # type: ignore[arg-type]


def loss_of(model: Any, windows: Tensor) -> Tensor:
    """Mean loss in nats per byte."""
    return model(input_ids=windows, labels=windows, use_cache=False).loss


@torch.no_grad()
def validation_loss(model: Any, corpus: common.Corpus, args: argparse.Namespace) -> float:
    model.eval()
    starts = common.validation_starts(corpus, args.windows, args.context).split(args.batch)
    batches = [common.windows_at(corpus.validation, part, args.context) for part in starts]
    loss = sum(float(loss_of(model, batch)) * len(batch) for batch in batches) / sum(map(len, batches))
    check_finite(loss, "validation")
    return loss


def check_finite(loss: float, where: str) -> None:
    if not math.isfinite(loss):
        raise SystemExit(f"the loss is {loss} at {where}: a smaller --lr may help")


def train(model: Any, corpus: common.Corpus, args: argparse.Namespace, steps: int, seed: int, rate: float) -> None:
    """Train with AdamW, a short warm-up, then decay to a tenth of the rate; exit if the loss is not finite."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    for step, starts in enumerate(common.training_starts(corpus, steps, args.batch, args.context, seed)):
        share = min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        loss = loss_of(model, common.windows_at(corpus.training, starts, args.context))
        check_finite(float(loss.detach()), f"step {step}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def run(args: argparse.Namespace, corpus: common.Corpus) -> dict[str, Any]:
    """Return the loss of the dense model, its loss after more steps, and a row for each choice of gates."""
    with needed("transformers"):  # imported late, because it takes seconds
        from transformers import LlamaConfig, LlamaForCausalLM

        from nsa.integrations.transformers import convert
    torch.manual_seed(args.seed)
    sizes = {"hidden_size": args.width, "intermediate_size": 3 * args.width, "num_hidden_layers": args.layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=common.VOCABULARY, max_position_embeddings=args.context, **sizes, **heads)
    dense = LlamaForCausalLM(config)
    begin = time.perf_counter()
    train(dense, corpus, args, args.steps, args.seed, args.lr)
    before = validation_loss(dense, corpus, args)
    say(f"dense Llama: {args.steps} steps in {time.perf_counter() - begin:.0f} s, loss {before:.3f}")
    rows = []
    for name, gates in STARTS.items():
        model = convert(copy.deepcopy(dense), options(args.context), gate_init=gates)
        converted = validation_loss(model, corpus, args)
        train(model, corpus, args, args.more, args.seed + 1, args.lr / 4)
        after = validation_loss(model, corpus, args)
        start = {"start": name, "gates": model.config.nsa_gate_init}
        rows.append({**start, "converted_loss": converted, "trained_loss": after})
        say(f"{name}: {converted:.3f} right after conversion, {after:.3f} after {args.more} steps")
    train(dense, corpus, args, args.more, args.seed + 1, args.lr / 4)
    after = validation_loss(dense, corpus, args)
    columns = {
        "gates to start with": lambda row: row["start"],
        "after conversion": lambda row: f"{row['converted_loss']:.3f}",
        "jump": lambda row: f"{row['converted_loss'] - before:+.3f}" if row["gates"] else "",
        f"{args.more} steps later": lambda row: f"{row['trained_loss']:.3f}",
        "against dense": lambda row: f"{row['trained_loss'] - after:+.3f}" if row["gates"] else "",
    }
    of_dense = {"start": "(dense)", "gates": None, "converted_loss": before, "trained_loss": after}
    print_table("validation loss in nats per byte", columns, [of_dense, *rows], left=("gates to start with",))
    return {"dense_loss": before, "dense_trained_loss": after, "rows": rows}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with replaced_results(args.out):
        corpus = common.load_text(args.context)
        losses = run(args, corpus)
        training = {name: getattr(args, name) for name in (*OPTIONS, "lr", "seed")}
        facts = {**environment(torch.device("cpu")), "command": command_line(argv), "training": training}
        out = with_ending(args.out, ".json")
        write_json(out, {**facts, "data": corpus.facts(), **losses})
    say(f"Everything: {relative(out)}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    for name, (default, meaning) in OPTIONS.items():
        add(f"--{name}", type=positive, default=default, help=f"{meaning}; default: %(default)s")
    shown = "peak learning rate, a quarter of it after conversion; default: %(default)s"
    add("--lr", type=above_zero, default=4e-3, help=shown)
    add("--seed", type=int, default=0, help="seed of weights and batches; default: %(default)s")
    common.add_out(parser, "convert-llama")
    args = parser.parse_args(argv)
    if args.width % 8:
        parser.error(f"--width must be a multiple of 8, got {args.width}")
    if args.context < 2:
        parser.error(f"--context must be at least 2, or no byte is predicted, got {args.context}")
    return args


if __name__ == "__main__":
    sys.exit(main())

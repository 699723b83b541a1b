"""Train a tiny dense Llama of transformers, convert it to NSA, and measure the jump in loss and the recovery.

The model reads bytes of the Python standard library. After training it is converted once for each choice of initial
gates, and the increase of the loss right after conversion is the jump. Then each model, and the dense one, continues
training on the same batches; the remaining difference is the cost of NSA.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from bench.common import above_zero, positive, with_ending
from bench.extras import needed
from bench.report import LOCAL_RESULTS, command_line, environment, relative, write_json
from bench.results_file import replaced_results
from dispatch.device import device_types
from examples.shared.byte_models import (
    VOCABULARY,
    Corpus,
    check_length,
    check_out,
    console,
    load_corpus,
    training_starts,
    validation_starts,
    windows_at,
)
from nsa import NSAConfig

with needed("rich"):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

STARTS: dict[str, tuple[float, float, float] | None] = {
    "near dense, the default": None,
    "selected branch almost alone": (0.01, 0.98, 0.01),
    "one third each": (1 / 3, 1 / 3, 1 / 3),
    "one half each": (0.5, 0.5, 0.5),
}
"""Gates of compressed, selected and window branch right after conversion."""
DEFAULTS = {"steps": 800, "more": 60, "context": 256, "width": 64, "layers": 2, "batch": 8, "windows": 32}
WARM_UP = 20


@dataclass(frozen=True)
class Row:
    """Results of one choice of gates; losses are in nats per byte of validation text."""

    start: str
    gates: list[float]
    converted_loss: float
    trained_loss: float


def options(context: int) -> NSAConfig:
    """The paper's options, with sizes that are sparse in a short context: a token selects at most an eighth of it."""
    block = max(2, context // 32)
    sizes = {"compress_block_size": block, "compress_stride": max(1, block // 2), "select_block_size": block}
    return NSAConfig.paper(**sizes, num_selected_blocks=4, window_size=block)  # type: ignore[arg-type]


def loss_of(model: Any, windows: Tensor) -> Tensor:
    """Mean loss in nats per byte."""
    loss: Tensor = model(input_ids=windows, labels=windows, use_cache=False).loss
    return loss


@torch.no_grad()
def validation_loss(model: Any, corpus: Corpus, args: argparse.Namespace) -> float:
    model.eval()
    starts = validation_starts(corpus, args.windows, args.context).split(args.batch)
    batches = [windows_at(corpus.validation, part, args.context).to(args.device) for part in starts]
    loss = sum(float(loss_of(model, batch)) * len(batch) for batch in batches) / sum(map(len, batches))
    check_finite(loss, "validation")
    return loss


def check_finite(loss: float, where: str) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at {where}")


def train(model: Any, corpus: Corpus, args: argparse.Namespace, steps: int, seed: int, rate: float) -> None:
    """Train with AdamW, a short warm-up, then decay to a tenth of the rate.

    Raises:
        FloatingPointError: if the loss is not finite, as in `validation_loss`.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    for step, starts in enumerate(training_starts(corpus, steps, args.batch, args.context, seed)):
        share = min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        loss = loss_of(model, windows_at(corpus.training, starts, args.context).to(args.device))
        check_finite(float(loss.detach()), f"step {step}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def run(args: argparse.Namespace, corpus: Corpus) -> tuple[float, float, list[Row]]:
    """Return the loss of the dense model, its loss after more steps, and a row for each choice of gates."""
    with needed("transformers"):  # imported late, because it takes seconds
        from transformers import LlamaConfig, LlamaForCausalLM

        from nsa.integrations.transformers import convert
    torch.manual_seed(args.seed)
    sizes = {"hidden_size": args.width, "intermediate_size": 3 * args.width, "num_hidden_layers": args.layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=args.context, **sizes, **heads)
    dense = LlamaForCausalLM(config).to(args.device)
    with torch.no_grad():  # fail early if the backend does not support it
        convert(copy.deepcopy(dense), options(args.context))(torch.zeros(1, 2, dtype=torch.long, device=args.device))
    begin = time.perf_counter()
    train(dense, corpus, args, args.steps, args.seed, args.lr)
    before = validation_loss(dense, corpus, args)
    console.print(f"dense Llama: {args.steps} steps in {time.perf_counter() - begin:.0f} s, loss {before:.3f}")
    rows = []
    for name, gates in STARTS.items():
        model = convert(copy.deepcopy(dense), options(args.context), gate_init=gates)
        converted = validation_loss(model, corpus, args)
        train(model, corpus, args, args.more, args.seed + 1, args.lr / 4)
        after = validation_loss(model, corpus, args)
        rows.append(Row(name, model.config.nsa_gate_init, converted, after))
        console.print(f"{name}: {converted:.3f} right after conversion, {after:.3f} after {args.more} steps")
    train(dense, corpus, args, args.more, args.seed + 1, args.lr / 4)
    return before, validation_loss(dense, corpus, args), rows


def show(before: float, after: float, rows: Sequence[Row], more: int) -> None:
    table = Table(title="validation loss in nats per byte", box=SIMPLE_HEAD)
    for heading in ("gates to start with", "after conversion", "jump", f"{more} steps later", "against dense"):
        table.add_column(heading, justify="left" if heading == "gates to start with" else "right")
    table.add_row("(dense)", f"{before:.3f}", "", f"{after:.3f}", "")
    for row in rows:
        jump, left = row.converted_loss - before, row.trained_loss - after
        table.add_row(row.start, f"{row.converted_loss:.3f}", f"{jump:+.3f}", f"{row.trained_loss:.3f}", f"{left:+.3f}")
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with replaced_results(Path(args.out)):
        return compare(args, command_line(argv))


def compare(args: argparse.Namespace, command: str) -> int:
    corpus = load_corpus(Path(sysconfig.get_path("stdlib")))
    check_length(corpus, args.context)
    try:
        before, after, rows = run(args, corpus)
    except FloatingPointError as failure:
        raise SystemExit(f"{failure}: a smaller --lr may help") from failure
    except dispatch.BackendError as refusal:
        raise SystemExit(str(refusal)) from refusal
    show(before, after, rows, args.more)
    training = {name: getattr(args, name) for name in (*DEFAULTS, "lr", "seed")}
    facts = {**environment(torch.device(args.device)), "command": command, "training": training}
    out = with_ending(Path(args.out), ".json")
    losses = {"dense_loss": before, "dense_trained_loss": after, "rows": [asdict(row) for row in rows]}
    write_json(out, {**facts, "data": corpus.facts(), **losses})
    console.print(f"Everything: {relative(out)}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=device_types(), default="cpu", help="default: %(default)s; GPUs do not support NSA in fp32")
    meanings = {
        "steps": "training steps of the dense model",
        "more": "training steps after conversion",
        "context": "bytes of a sequence",
        "width": "width of the residual stream, a multiple of 8",
        "layers": "transformer blocks",
        "batch": "sequences per step",
        "windows": "validation sequences",
    }
    for name, meaning in meanings.items():
        add(f"--{name}", type=positive, default=DEFAULTS[name], help=f"{meaning}; default: %(default)s")
    add(
        "--lr",
        type=above_zero,
        default=4e-3,
        help="peak learning rate, a quarter of it after conversion; default: %(default)s",
    )
    add("--seed", type=int, default=0, help="seed of weights and batches; default: %(default)s")
    add("--out", default=str(LOCAL_RESULTS / "convert-llama"), help="results, without suffix; default: %(default)s")
    args = parser.parse_args(argv)
    if args.width % 8:
        parser.error(f"--width must be a multiple of 8, got {args.width}")
    if args.context < 2:
        parser.error(f"--context must be at least 2, or no byte is predicted, got {args.context}")
    if args.device != "cpu":
        parser.error(
            f"--device must be cpu, got {args.device}: the model is in fp32 with heads of {args.width // 4}, and "
            "kernels of NSA support bf16 and fp16 with heads of 64 or 128"
        )
    check_out(parser, args, ".json")
    return args


if __name__ == "__main__":
    sys.exit(main())

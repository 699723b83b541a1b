"""Train a tiny dense Llama of transformers, convert it to NSA, and measure the jump in loss and the recovery.

The model reads bytes of the Python standard library. After training it is converted once for each choice of initial
gates, and the increase of the loss right after conversion is the jump. Then each model, and the dense one, continues
training on the same batches; the remaining difference is the cost of NSA. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from bench.common import above_zero, make_parser, positive, with_ending
from bench.extras import needed
from bench.report import LOCAL_RESULTS, command_line, environment, relative, write_json
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


def options(context: int) -> NSAConfig:
    """The paper's options, with sizes that are sparse in a short context: a token selects at most an eighth of it."""
    block = max(2, context // 32)
    sizes = {"compress_block_size": block, "compress_stride": max(1, block // 2), "select_block_size": block}
    return NSAConfig.paper(**sizes, num_selected_blocks=4, window_size=block)  # type: ignore[arg-type]


class Logits(nn.Module):
    """A model of transformers, with the weights that it has, for a trainer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def initialise(self, seed: int) -> None:
        pass

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def train(name: str, model: Any, corpus: common.Corpus, args: argparse.Namespace, **changes: Any) -> list[float]:
    """Validation losses in nats per byte before and after training. Args: `changes`: of `args`."""
    fixed = {"device": "cpu", "dtype": "fp32", "cuda_graph": False, "eval_windows": args.windows}
    own = argparse.Namespace(**{**vars(args), **fixed, **changes})
    own.eval_every = own.steps
    return [row["val_loss"] for row in common.TextTrainer(name, Logits(model), own, corpus).train()["rows"]]


def run(args: argparse.Namespace, corpus: common.Corpus) -> dict[str, Any]:
    """Return the loss of the dense model, its loss after more steps, and a row for each choice of gates."""
    with needed("transformers"):  # imported late, because it takes seconds
        from transformers import LlamaConfig, LlamaForCausalLM

        from nsa.integrations.transformers import convert
    torch.manual_seed(args.seed)
    sizes = {"hidden_size": args.width, "intermediate_size": 3 * args.width, "num_hidden_layers": args.layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=common.VOCABULARY, max_position_embeddings=args.context, **sizes, **heads)
    )
    train("dense Llama", dense, corpus, args)
    further: dict[str, Any] = {"steps": args.more, "seed": args.seed + 1, "lr": args.lr / 4}
    rows = []
    for name, gates in STARTS.items():
        model = convert(copy.deepcopy(dense), options(args.context), gate_init=gates)
        converted, trained = train(name, model, corpus, args, **further)
        losses = {"converted_loss": converted, "trained_loss": trained}
        rows.append({"start": name, "gates": model.config.nsa_gate_init, **losses})
    before, after = train("dense Llama", dense, corpus, args, **further)
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
    out = Path(args.out)
    with replaced_results(out):
        corpus = common.load_text(args.context)
        losses = run(args, corpus)
        training = {name: getattr(args, name) for name in (*OPTIONS, "lr", "seed")}
        facts = {**environment(torch.device("cpu")), "command": command_line(argv), "training": training}
        write_json(with_ending(out, ".json"), {**facts, "data": corpus.facts(), **losses})
    say(f"Everything: {relative(with_ending(out, '.json'))}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "out", out=str(LOCAL_RESULTS / "convert-llama"))
    add = parser.add_argument
    for name, (default, meaning) in OPTIONS.items():
        add(f"--{name}", type=positive, default=default, help=f"{meaning}; default: %(default)s")
    shown = "peak learning rate, a quarter of it after conversion; default: %(default)s"
    add("--lr", type=above_zero, default=4e-3, help=shown)
    add("--seed", type=int, default=0, help="seed of weights and batches; default: %(default)s")
    args = parser.parse_args(argv)
    if args.width % 8:
        parser.error(f"--width must be a multiple of 8, got {args.width}")
    if args.context < 2:
        parser.error(f"--context must be at least 2, or no byte is predicted, got {args.context}")
    return args


if __name__ == "__main__":
    sys.exit(main())

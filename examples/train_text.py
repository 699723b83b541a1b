"""Train a byte-level language model on real text with dense attention, NSA, and NSA without single branches.

The text is on every machine: the sources of the Python standard library, with some files held out for validation. All
variants (examples/shared/nsa_variants.py) start from the same weights, if they share them, and see the same batches in
the same order. With `--preset paper` NSA selects per token, else per tile.

Selection per tile depends on all queries of a tile, also later ones. To measure what a model gains from this, the loss
of sampled bytes is recomputed with the text cut off after them; `lookahead` is the increase in loss.

`torchrun --nproc-per-node=2 examples/train_text.py --context-parallel 2` divides every sequence between two processes
(docs/distributed.md). Writes OUT.json (schema: docs/results_files.md) and OUT.png after each variant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.common import DTYPES
from bench.report import relative
from bench.show import console, say
from examples.shared import byte_models as common
from examples.shared import nsa_variants
from examples.shared.nsa_variants import VARIANTS
from nsa.distributed import ContextParallel

PER_TILE = {
    "steps": (120, 1600),
    "batch": (4, 4),
    "context": (512, 8192),
    "layers": (2, 6),
    "width": (96, 512),
    "heads": (3, 8),
    "kv_heads": (1, 2),
    "block_size": (16, 64),
    "k": (4, 8),
    "w": (16, 128),
    "q_tile": (64, 256),
    "eval_every": (20, 100),
    "eval_windows": (16, 32),
    "cuts": (8, 32),
}
"""Defaults on CPUs and GPUs: 20 seconds of CPU time per variant on one core, a minute on an H200.

1600 steps of 32 KiB read the 10 MB of sources five times; longer training memorises them."""
PAPER = {**PER_TILE, "k": (5, 16), "w": (16, 512), "q_tile": (1, 1)}
"""The same with `--preset paper`; on GPUs the paper's values."""
DEFAULTS = {"per_tile": PER_TILE, "paper": PAPER}


class Trainer(common.TextTrainer):
    """Trainer of a variant that also measures the lookahead of its selection."""

    parallel: ContextParallel | None = None  # Divides sequences

    def __init__(self, variant: str, args: argparse.Namespace, corpus: common.Corpus) -> None:
        model = nsa_variants.make_model(variant, args, self.parallel, checkpointing=args.checkpointing)
        super().__init__(variant, model, args, corpus)

    @torch.no_grad()
    def lookahead(self, cuts: list[int]) -> tuple[float, float]:
        """Increase in loss if the text after each of these positions is cut off, in nats: mean, standard error."""
        added = []
        for part in self.validation.split(self.args.batch):
            whole = self.losses(part)
            added += [self.losses(part[:, : cut + 2])[:, cut] - whole[:, cut] for cut in cuts]
        samples = torch.cat(added).double()
        return samples.mean().item(), (samples.std() / math.sqrt(len(samples))).item()

    def looks_ahead(self) -> bool:
        return "selected" in VARIANTS[self.variant] and not self.args.config.token_mode

    def run(self) -> common.Results:
        """Train, and measure the lookahead; None unless selection is per tile."""
        results = self.train()
        added = error = None
        if self.looks_ahead():
            generator = torch.Generator().manual_seed(self.args.seed)
            cuts = torch.randperm(self.args.context, generator=generator)[: self.args.cuts].tolist()
            added, error = self.lookahead(cuts)
        if self.variant == "nsa" and self.args.save_indices is not None:
            with nsa_variants.recorded(self.model) as indices:
                self.losses(self.validation[:1])
            torch.save(torch.cat(indices, 1).cpu(), self.args.save_indices)
        results["summary"][0] |= {"relative_to_dense": None, "lookahead": added, "lookahead_error": error}
        return results


class DividedTrainer(Trainer):
    """Trainer with each sequence divided among the processes of torchrun, which all have the whole text."""

    parallel: ContextParallel

    def __init__(self, variant: str, args: argparse.Namespace, corpus: common.Corpus) -> None:
        self.parallel = ContextParallel(dist.group.WORLD, tile=args.config.q_tile_size)  # type: ignore[arg-type]
        super().__init__(variant, args, corpus)

    def losses(self, windows: Tensor) -> Tensor:
        """Losses of all bytes on every rank, for evaluation; `gradients` has the training loss."""
        labels = self.parallel.shard(windows[:, 1:])
        own = cross_entropy(self.logits(windows).flatten(0, 1), labels.flatten(), reduction="none")
        return self.parallel.unshard(own.view(labels.shape))

    def gradients(self, windows: Tensor) -> Tensor:
        share = self.parallel.cross_entropy(self.logits(windows), self.parallel.shard(windows[:, 1:]))
        share.backward()
        # Gradients of weights are shares, too: sum them in one message
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        total = self.parallel.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, total.split([x.numel() for x in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        return self.parallel.sum(share.detach())


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.context_parallel is None:
        return run(args)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        console.quiet = dist.get_rank() > 0
        return run(args, writes=dist.get_rank() == 0)
    finally:
        dist.destroy_process_group()


def run(args: argparse.Namespace, *, writes: bool = True) -> int:
    """Run the example. Only one process, with `writes`, writes files and prints results."""
    corpus = common.load_text(args.context)
    facts = nsa_variants.facts(args, corpus.facts())
    facts["training"] |= {"checkpointing": args.checkpointing, "context_parallel": args.context_parallel}
    earlier = [read_beside(path, facts) for path in args.beside]
    # A run is short if models see fewer bytes than they have parameters
    short = args.steps * args.batch * args.context < max(facts["model"]["parameters"].values())

    def train(variant: str) -> common.Results:
        trainer = Trainer if args.context_parallel is None else DividedTrainer
        return trainer(variant, args, corpus).run()

    def conclude(results: common.Results) -> dict[str, Any]:
        losses = {summary["variant"]: summary["final_val_loss"] for summary in results["summary"]}
        for summary in results["summary"] if "dense" in losses else ():
            summary["relative_to_dense"] = summary["final_val_loss"] / losses["dense"]
        beside = [differences(run, results["rows"], rounding_tolerance(args)) for run in earlier]
        return {"verdict": verdict(results["summary"], short=short), **({"beside": beside} if beside else {})}

    if not writes:
        for variant in args.variants:
            train(variant)
        return 0
    columns = {
        "vs dense": lambda s: "" if s["relative_to_dense"] is None else f"{s['relative_to_dense'] - 1:+.1%}",
        "lookahead": lambda s: "" if s["lookahead"] is None else f"{s['lookahead']:+.4f} ± {s['lookahead_error']:.4f}",
    }
    draw = partial(common.draw_curves, "dense")
    beside = common.record_variants(args, facts, train, conclude, draw, columns).get("beside", [])
    verdicts = {True: "equal", False: "NOT equal", None: "more than rounding cannot be told from it in this dtype"}
    for path, one in zip(args.beside, beside, strict=True):
        largest = max((x for x in one["differences"].values() if x is not None), default=math.nan)
        tolerance = "" if one["tolerance"] is None else f", {one['tolerance']:.1e} of a loss is rounding"
        say(f"Largest difference from losses of {relative(path)} {largest:.1e}{tolerance}: {verdicts[one['equal']]}")
    return int(any(one["equal"] is False for one in beside))


def read_beside(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Read the results of an earlier run; exit unless it had the arguments that `facts` of this run describe."""
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        here, there = ({**x, "training": {**x["training"], "context_parallel": None}} for x in (facts, run))
        for name in ("model", "training", "data", "preset"):
            if (mine := here[name]) != (theirs := there[name]):
                raise SystemExit(f"--beside must name a run with the same {name}, got {theirs} in {path}, not {mine}")
    except (OSError, ValueError, KeyError) as problem:
        raise SystemExit(f"--beside must name results of this example, got {path}: {problem}") from problem
    return run


def rounding_tolerance(args: argparse.Namespace) -> float | None:
    """Relative difference in loss that rounding explains between runs with the same arguments; None if too large.

    Sums of n terms in different orders differ by about sqrt(n) eps of their terms. Gradients of weights are sums over
    the n bytes of a batch, and Adam divides them by their magnitude, so every update differs by that share: after T
    updates by T sqrt(n) eps of the change by training, which is at most the loss itself. From a tenth on, as in bf16,
    rounding cannot be distinguished from an error.
    """
    eps = torch.finfo(DTYPES[args.dtype]).eps
    tolerance = args.steps * math.sqrt(args.batch * args.context) * eps
    return tolerance if tolerance < 0.1 else None


def differences(run: dict[str, Any], rows: list[common.Row], tolerance: float | None) -> dict[str, Any]:
    """Losses of an earlier run at the steps of this one's rows, and how much they differ.

    `equal` is True if no loss differs by more than `tolerance` of it, None without a tolerance.
    """
    own = {(row["variant"], row["step"]): row for row in rows}
    pairs = [(row, own[key]) for row in run["rows"] if (key := (row["variant"], row["step"])) in own]
    names = ("train_loss", "val_loss")
    losses = {name: [(row[name], mine[name]) for row, mine in pairs if row[name] is not None] for name in names}
    equal = None
    if tolerance is not None:
        equal = all(abs(a - b) <= tolerance * a for own in losses.values() for a, b in own)  # NaN is unequal
    return {
        "command": run["command"],
        "context_parallel": run["training"]["context_parallel"],
        "differences": {name: max((abs(a - b) for a, b in own), default=None) for name, own in losses.items()},
        "tolerance": tolerance,
        "equal": equal,
        "rows": [row for row, _ in pairs],
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = common.new_parser(__doc__, PER_TILE, out="train")
    common.add_variants(parser, VARIANTS)
    nsa_variants.add_nsa_options(parser)
    add = parser.add_argument
    add("--checkpointing", action="store_true", help="keep block inputs only, and recompute in backward")
    shown = (
        "divide each sequence among the R processes that torchrun starts; without dense attention, and only nsa "
        "unless --variants lists others; default: one process, whole sequences"
    )
    add("--context-parallel", type=int, metavar="R", help=shown)
    shown = (
        "results of a run that differs at most in --context-parallel: record its losses and the differences, "
        "and fail if these exceed rounding"
    )
    add("--beside", type=Path, nargs="+", default=[], metavar="FILE", help=shown)
    shown = "save all selections of variant nsa for a held-out text, for bench_token_selected.py --indices"
    add("--save-indices", type=Path, metavar="FILE", help=shown)
    every = parser.get_default("variants")
    parser.set_defaults(variants=None)
    args = parser.parse_args(argv)
    args.variants = args.variants or (every if args.context_parallel is None else ["nsa"])
    if args.context_parallel is not None:
        check_processes(parser, args)
    common.resolve_options(parser, args, DEFAULTS[args.preset])
    if args.save_indices is not None and "nsa" not in args.variants:
        parser.error(f"--save-indices needs variant nsa, got {args.variants}")
    if args.cuts > args.context:
        parser.error(f"--cuts must be at most --context, got {args.cuts} and {args.context}")
    args.config = nsa_variants.make_config(parser, args)
    if args.save_indices is not None:  # fails before the training if the file cannot be written
        args.save_indices.parent.mkdir(parents=True, exist_ok=True)
        args.save_indices.touch()
    return args


def check_processes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit if --context-parallel does not match the number of processes, or conflicts with another option."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.context_parallel != size or "RANK" not in os.environ:
        parser.error(
            f"--context-parallel must be the number of processes that torchrun starts, {size} here, "
            f"got {args.context_parallel}: torchrun --nproc-per-node={args.context_parallel} examples/train_text.py ..."
        )
    given = {"--variants with dense": "dense" in args.variants, "--save-indices": args.save_indices is not None}
    if wrong := [option for option, is_given in {**given, "--cuda-graph": args.cuda_graph}.items() if is_given]:
        parser.error(f"{wrong[0]} does not go with --context-parallel")


def verdict(summaries: list[common.Row], *, short: bool = False) -> str:
    """Conclusion about NSA, with its limits. Args: `short`: True if distant attention could not show its value."""
    by_name = {summary["variant"]: summary for summary in summaries}
    if "nsa" not in by_name:
        return "NSA itself was not trained, so there is nothing to conclude about it."
    nsa = by_name["nsa"]
    sentences, loss = [], nsa["final_val_loss"]
    for name, words in (("dense", "dense attention"), ("window", "the window-only control")):
        if name in by_name:
            share = loss / by_name[name]["final_val_loss"] - 1
            difference = f"{abs(share):.1%} {'below' if share < 0 else 'above'}"
            sentences.append(f"NSA's final validation loss is {difference} that of {words}.")
    if nsa["lookahead"] is not None:
        sentences.append(
            f"Cutting off the text after the predicted byte, which selection per tile looks at, changes NSA's loss by "
            f"{nsa['lookahead'] / loss:+.1%} ± {nsa['lookahead_error'] / loss:.1%}."
        )
    if short:
        sentences.append(
            "So short a run, of fewer bytes than a model has parameters, shows that the variants train, not yet what "
            "attention over distance is worth."
        )
    return " ".join([*sentences, "One seed each: small differences may be noise."])


if __name__ == "__main__":
    sys.exit(main())

"""Train a byte-level language model briefly, or load one, and generate text with a cache and without.

The model is that of train_text.py in the paper's preset, which selects per token. With a cache each byte costs one step
of `nsa_with_cache`; without one the whole text is recomputed for each byte. Decoding is greedy, so both texts must be
equal; a difference ends the program with status 1. In 16 bits the two ways round differently, so bytes that are equally
likely up to rounding may differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.common import DTYPES
from bench.extras import needed
from bench.show import console, print_table, say
from examples.shared import byte_models as common
from examples.shared import nsa_variants
from nsa import NSAttention, PageTable

with needed("rich"):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

DEFAULTS = {
    "steps": (150, 1600),
    "batch": (4, 4),
    "context": (512, 8192),
    "layers": (2, 6),
    "width": (96, 512),
    "heads": (3, 8),
    "kv_heads": (1, 2),
    "block_size": (16, 64),
    "k": (5, 16),
    "w": (16, 512),
    "q_tile": (1, 1),
    "eval_every": (75, 400),
    "eval_windows": (8, 8),
    "prompt": (512, 4096),
    "length": (256, 256),
}
"""Defaults on CPUs and GPUs: half a minute of training on one core, or two minutes on an H200."""


# The model


def trained_model(args: argparse.Namespace, corpus: common.Corpus) -> common.ByteModel:
    """Load the model of `--load`, or train one and save it to `--save`."""
    if args.load is not None:
        model = nsa_variants.make_model("nsa", args)
        try:
            model.load_state_dict(torch.load(args.load, map_location="cpu", weights_only=True))
        except Exception as failure:  # the error for an unrelated file depends on torch, zipfile and pickle
            raise SystemExit(
                f"--load must be a file written by --save with the same model options, got {args.load}: "
                f"{type(failure).__name__}: {failure}"
            ) from None
        return model.to(args.device)
    trainer = common.TextTrainer("nsa", nsa_variants.make_model("nsa", args), args, corpus)

    def train(_variant: str, show: common.Show) -> None:
        _, summary = trainer.train(show)
        say(f"trained {summary.steps} steps, validation loss {summary.final_val_loss:.3f} nats per byte")

    common.train_variants(args, train)
    if args.save is not None:
        torch.save(trainer.model.state_dict(), args.save)
    return trainer.model


# Writing


NEAR = 2**-4
"""Relative difference, in 16 bits, below which either of two logits may come out as the larger one: both ways have an
error of a few units of 2^-8 per layer."""


def cached(model: common.ByteModel, prompt: Tensor, length: int) -> Iterator[Tensor]:
    """Yield the likeliest bytes after a prompt `[1,N]`, each `[1,1]`, by one step with a cache per byte."""
    device = prompt.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    table = PageTable.empty(1, prompt.shape[1] + length, device=prompt.device)
    layers = [module for module in model.modules() if isinstance(module, NSAttention)]
    caches = [layer.new_cache(table, dtype) for layer in layers]
    before, new = prompt[:, :0], prompt
    for _ in range(length):
        logits = model.continued(new, before, caches)
        before = torch.cat([before, new], 1)[:, 1 - common.NGRAM :]
        new = logits[:, -1:].argmax(-1)
        yield new
    table.check()


def uncached(model: common.ByteModel, prompt: Tensor, length: int) -> Iterator[Tensor]:
    """The same, by a call on the whole text per byte."""
    text = prompt
    for _ in range(length):
        new = model(text)[:, -1:].argmax(-1)
        text = torch.cat([text, new], 1)
        yield new


@dataclass(frozen=True)
class Written:
    """A text and its times in seconds: for the prompt and the first byte, and for all further bytes."""

    text: bytes
    first: float
    further: float

    @property
    def tokens_per_s(self) -> float:
        return (len(self.text) - 1) / self.further if len(self.text) > 1 else float("nan")


WAYS = {"cached": cached, "uncached": uncached}


@torch.no_grad()
def write(model: common.ByteModel, prompt: Tensor, length: int, way: str) -> Written:
    """Generate text in one way, with a progress bar; reading each byte synchronizes, so bytes can be timed."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]} tokens/s"), TimeRemainingColumn())
    text = bytearray()
    with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as progress:
        task = progress.add_task(way, total=length, speed="")
        begin = first = time.perf_counter()
        for new in WAYS[way](model, prompt, length):
            text.append(int(new))
            if len(text) == 1:
                first = time.perf_counter()
            else:
                speed = (len(text) - 1) / (time.perf_counter() - first)
                progress.update(task, completed=len(text), speed=f"{speed:,.0f}")
        end = time.perf_counter()
    return Written(bytes(text), first - begin, end - first)


def difference(one: bytes, other: bytes) -> str | None:
    """Description of the first difference of two texts, or None."""
    pairs = zip(one, other, strict=True)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return None if at is None else f"byte {at} is {one[at : at + 1]!r} with a cache and {other[at : at + 1]!r} without"


def is_near_tie(model: common.ByteModel, prompt: Tensor, one: bytes, other: bytes) -> bool:
    """True if two texts after a prompt `[1,N]` first differ in bytes whose logits are nearly equal."""
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    text = torch.cat([prompt, torch.tensor([[*one[:at]]], dtype=prompt.dtype, device=prompt.device)], 1)
    logits = model(text)[0, -1].float()
    return bool((logits[one[at]] - logits[other[at]]).abs() <= NEAR * logits.abs().max())


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    corpus = common.load_corpus()
    common.check_length(corpus, args.context)
    common.check_length(corpus, args.prompt, "--prompt")
    for note in nsa_variants.resolve(args):
        say(note, style="yellow")
    model = trained_model(args, corpus)
    prompt = corpus.validation[: args.prompt].long()[None].to(args.device)
    dtype = DTYPES[args.dtype]
    in_16_bits = torch.autocast(torch.device(args.device).type, dtype, enabled=dtype != torch.float32)
    with in_16_bits:
        results = {way: write(model, prompt, args.length, way) for way in WAYS}

    text = results["cached"].text
    console.print(
        "\n… " + bytes(prompt[0, -200:].tolist()).decode("utf-8", "replace"), style="dim", markup=False, end=""
    )
    console.print(text.decode("utf-8", "replace"), markup=False, highlight=False)
    slow = results["uncached"]
    columns: dict[str, Callable[[str], str]] = {
        "way": str,
        "prompt, s": lambda way: f"{results[way].first:.3f}",
        "tokens/s": lambda way: f"{results[way].tokens_per_s:,.1f}",
        "speed-up": lambda way: f"{results[way].tokens_per_s / slow.tokens_per_s:.1f}x",
    }
    print_table("", columns, [*results], left=("way",))
    found = difference(text, slow.text)
    if found is not None and dtype != torch.float32:
        with torch.no_grad(), in_16_bits:
            near = is_near_tie(model, prompt, text, slow.text)
        if near:
            say(f"The texts differ in bytes that are equally likely up to rounding: {found}.")
            return 0
    if found is not None:
        say(f"The texts differ: {found}.", style="red")
        return 1
    say(f"Both generated the same {len(text)} bytes after a prompt of {args.prompt}.")
    return 0


# The command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = common.new_parser(__doc__, "NSA")
    add = parser.add_argument
    own = {"prompt": "bytes of held-out text before the model's own", "length": "bytes to generate"}
    common.add_numbers(parser, DEFAULTS, own)
    add("--save", type=Path, metavar="FILE", help="save the trained weights")
    add("--load", type=Path, metavar="FILE", help="load weights written by --save with the same model options")
    nsa_variants.add_nsa_options(parser, {"paper": DEFAULTS}, "paper")
    common.add_training_options(parser, DEFAULTS)
    args = parser.parse_args(argv)
    if args.preset != "paper" or args.q_tile not in (None, 1):
        got = f"--preset {args.preset} and --q-tile {args.q_tile}"
        parser.error(f"only selection per token generates the same text without a cache: got {got}")
    if args.load is not None and args.save is not None:
        parser.error(f"--save would overwrite the file of --load, got {args.save} and {args.load}")
    args.variants = ["nsa"]
    common.resolve_options(parser, args, DEFAULTS)
    args.config = nsa_variants.make_config(parser, args)
    if args.save is not None:
        common.check_output(parser, "--save", args.save)
    return args


if __name__ == "__main__":
    sys.exit(main())

"""Train a byte-level language model briefly, or load one, and generate text with a cache and without.

The model is that of train_text.py in the paper's preset, which selects per token. With a cache each byte costs one step
of `nsa_with_cache`; without one the whole text is recomputed for each byte. Decoding is greedy, so both texts must be
equal; a difference ends the program with status 1. In 16 bits the two ways round differently, so bytes that are equally
likely up to rounding may differ.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.extras import needed
from bench.show import console, print_table, say
from examples import train_text
from examples.shared import byte_models as common
from examples.shared import nsa_variants
from nsa import NSAttention, PageTable

with needed("rich"):
    from rich.progress import track

DEFAULTS = {
    **train_text.PAPER,
    "steps": (150, 1600),
    "eval_every": (75, 400),
    "eval_windows": (8, 8),
    "prompt": (512, 4096),
    "length": (256, 256),
}
del DEFAULTS["cuts"]
"""Defaults on CPUs and GPUs: half a minute of training on one core, or two minutes on an H200."""


def trained_model(args: argparse.Namespace, corpus: common.Corpus) -> common.ByteModel:
    """Load the model of `--load`, or train one and save it to `--save`."""
    model = nsa_variants.make_model("nsa", args)
    if args.load is not None:
        try:
            model.load_state_dict(torch.load(args.load, map_location="cpu", weights_only=True))
        except Exception as failure:  # the error for an unrelated file depends on torch, zipfile and pickle
            raise SystemExit(
                f"--load must be a file written by --save with the same model options, got {args.load}: "
                f"{type(failure).__name__}: {failure}"
            ) from None
        return model.to(args.device)
    common.TextTrainer("nsa", model, args, corpus).train()
    if args.save is not None:
        torch.save(model.state_dict(), args.save)
    return model


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


class Written(NamedTuple):
    """A text, the seconds for the prompt and its first byte, and the speed of all further bytes."""

    text: bytes
    first: float
    tokens_per_s: float


WAYS = {"cached": cached, "uncached": uncached}


@torch.no_grad()
def write(model: common.ByteModel, prompt: Tensor, length: int, way: str) -> Written:
    """Generate text in one way, with a progress bar; reading each byte synchronizes, so bytes can be timed."""
    text, times = bytearray(), [time.perf_counter()]
    steps = WAYS[way](model, prompt, length)
    for new in track(steps, way, total=length, console=console, transient=True):
        text.append(int(new))
        times.append(time.perf_counter())
    further = times[-1] - times[1]
    return Written(bytes(text), times[1] - times[0], (length - 1) / further if further else math.nan)


def differs_at(one: bytes, other: bytes) -> int:
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def difference(one: bytes, other: bytes) -> str | None:
    """Description of the first difference of two texts, or None."""
    if one == other:
        return None
    at = differs_at(one, other)
    return f"byte {at} is {one[at : at + 1]!r} with a cache and {other[at : at + 1]!r} without"


def is_near_tie(model: common.ByteModel, prompt: Tensor, one: bytes, other: bytes) -> bool:
    """True if two texts after a prompt `[1,N]` first differ in bytes whose logits are nearly equal."""
    at = differs_at(one, other)
    text = torch.cat([prompt, torch.tensor([[*one[:at]]], dtype=prompt.dtype, device=prompt.device)], 1)
    logits = model(text)[0, -1].float()
    return bool((logits[one[at]] - logits[other[at]]).abs() <= NEAR * logits.abs().max())


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    corpus = common.load_text(max(args.context, args.prompt), "--context and --prompt")
    nsa_variants.resolve(args)
    model = trained_model(args, corpus)
    prompt = corpus.validation[: args.prompt].long()[None].to(args.device)
    with common.autocast(args):
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
    if found is None:
        say(f"Both generated the same {len(text)} bytes after a prompt of {args.prompt}.")
        return 0
    with torch.no_grad(), common.autocast(args):
        near = args.dtype != "fp32" and is_near_tie(model, prompt, text, slow.text)
    if near:
        say(f"The texts differ in bytes that are equally likely up to rounding: {found}.")
    else:
        say(f"The texts differ: {found}.", style="red")
    return int(not near)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = common.new_parser(__doc__, DEFAULTS)
    add = parser.add_argument
    add("--save", type=Path, metavar="FILE", help="save the trained weights")
    add("--load", type=Path, metavar="FILE", help="load weights written by --save with the same model options")
    nsa_variants.add_nsa_options(parser, "paper")
    args = parser.parse_args(argv)
    if args.preset != "paper" or args.q_tile not in (None, 1):
        got = f"--preset {args.preset} and --q-tile {args.q_tile}"
        parser.error(f"only selection per token generates the same text without a cache: got {got}")
    if args.load is not None and args.save is not None:
        parser.error(f"--save would overwrite the file of --load, got {args.save} and {args.load}")
    args.variants = ["nsa"]
    common.resolve_options(parser, args, DEFAULTS)
    args.config = nsa_variants.make_config(parser, args)
    common.check_output(parser, "--save", args.save)
    return args


if __name__ == "__main__":
    sys.exit(main())

"""Train a byte-level language model briefly, and generate text with a cache and without.

The model is that of train_text.py in the paper's preset, which selects per token. With a cache each byte costs one step
of `nsa_with_cache`; without one the whole text is recomputed for each byte. Decoding is greedy, so both texts must be
equal; in fp32 a difference ends the program with status 1. In 16 bits bytes that are about equally likely may differ.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.extras import needed
from bench.show import console, say
from examples import train_text
from examples.shared import byte_models as common
from examples.shared import nsa_variants
from nsa import NSAttention, PageTable

with needed("rich"):
    from rich.progress import track

OWN = {
    "steps": (150, 1600),
    "eval_every": (75, 400),
    "eval_windows": (8, 8),
    "prompt": (512, 4096),
    "length": (256, 256),
}
DEFAULTS = {**{name: sizes for name, sizes in train_text.PAPER.items() if name not in ("cuts", "q_tile")}, **OWN}
"""Defaults on CPUs and GPUs: half a minute of training on one core, or two minutes on an H200."""


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


WAYS = {"cached": cached, "uncached": uncached}


@torch.no_grad()
def write(model: common.ByteModel, prompt: Tensor, length: int, way: str) -> tuple[bytes, float]:
    """Generate text in one way and say how fast; returns it, and the speed of all bytes but the first."""
    text, times = bytearray(), [time.perf_counter()]
    steps = WAYS[way](model, prompt, length)
    for new in track(steps, way, total=length, console=console, transient=True):
        text.append(int(new))  # waits for the device, so that bytes can be timed
        times.append(time.perf_counter())
    speed = (length - 1) / (times[-1] - times[1]) if length > 1 else math.nan
    say(f"{way}: {times[1] - times[0]:.3f} s for the prompt, {speed:,.1f} tokens/s")
    return bytes(text), speed


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    corpus = common.load_text(max(args.context, args.prompt), "--context and --prompt")
    nsa_variants.resolve(args)
    model = nsa_variants.make_model("nsa", args)
    common.TextTrainer("nsa", model, args, corpus).train()
    prompt = corpus.validation[: args.prompt].long()[None].to(args.device)
    with common.autocast(args):
        (text, fast), (other, slow) = (write(model, prompt, args.length, way) for way in WAYS)
    say(f"With a cache {fast / slow:.1f} times as fast")
    shown = bytes(prompt[0, -200:].tolist()).decode("utf-8", "replace")
    console.print(f"\n… {shown}", style="dim", markup=False, end="")
    console.print(text.decode("utf-8", "replace"), markup=False, highlight=False)
    at = next((i for i, (one, two) in enumerate(zip(text, other, strict=True)) if one != two), None)
    if at is None:
        say(f"Both generated the same {len(text)} bytes after a prompt of {args.prompt}.")
        return 0
    rounding = args.dtype != "fp32"
    say(
        f"The texts differ: byte {at} is {text[at : at + 1]!r} with a cache and {other[at : at + 1]!r} without"
        f"{', which may be rounding in 16 bits' if rounding else ''}.",
        style="red",
    )
    return int(not rounding)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = common.new_parser(__doc__, DEFAULTS)
    parser.set_defaults(variants=["nsa"], preset="paper", q_tile=1, compress="mean")
    args = parser.parse_args(argv)
    common.resolve_options(parser, args, DEFAULTS)
    args.config = nsa_variants.make_config(parser, args)
    return args


if __name__ == "__main__":
    sys.exit(main())

"""Train a byte-level language model briefly, or load one, and generate text with a cache and without.

The model is that of train_text.py in the paper's preset, which selects per token. With a cache each byte costs one step
of `nsa_with_cache`; without one the whole text is recomputed for each byte. Decoding is greedy, so both texts must be
equal; a difference ends the program with status 1. In 16 bits the two ways round differently, so bytes that are equally
likely up to rounding may differ.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from bench.common import DTYPES, positive
from bench.extras import needed
from dispatch.device import device_types
from examples.shared.byte_models import (
    NGRAM,
    ByteModel,
    Corpus,
    Show,
    TextTrainer,
    add_training_options,
    check_length,
    check_output,
    console,
    load_corpus,
    resolve_options,
    train_variants,
)
from examples.shared.nsa_variants import add_nsa_options, make_config, make_model, resolve
from nsa import NSAttention, PageTable

with needed("rich"):
    from rich.box import SIMPLE_HEAD
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

DEFAULTS: dict[str, dict[str, dict[str, int]]] = {
    "paper": {
        "cpu": {
            "steps": 150,
            "batch": 4,
            "context": 512,
            "layers": 2,
            "width": 96,
            "heads": 3,
            "kv_heads": 1,
            "block_size": 16,
            "k": 5,
            "w": 16,
            "q_tile": 1,
            "eval_every": 75,
            "eval_windows": 8,
            "prompt": 512,
            "length": 256,
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
            "k": 16,
            "w": 512,
            "q_tile": 1,
            "eval_every": 400,
            "eval_windows": 8,
            "prompt": 4096,
            "length": 256,
        },
    }
}
"""Defaults by device: half a minute of training on one core, or two minutes on an H200."""


# The model


def trained_model(args: argparse.Namespace, corpus: Corpus) -> ByteModel:
    """Load the model of `--load`, or train one and save it to `--save`."""
    if args.load is not None:
        model = make_model("nsa", args)
        try:
            model.load_state_dict(torch.load(args.load, map_location="cpu", weights_only=True))
        except Exception as failure:  # the error for an unrelated file depends on torch, zipfile and pickle
            raise SystemExit(
                f"--load must be a file written by --save with the same model options, got {args.load}: "
                f"{type(failure).__name__}: {failure}"
            ) from None
        return model.to(args.device)
    trainer = TextTrainer("nsa", make_model("nsa", args), args, corpus)

    def train(_variant: str, show: Show) -> None:
        rows, _ = trainer.train(show)
        console.print(f"trained {rows[-1].step} steps, validation loss {rows[-1].val_loss:.3f} nats per byte")

    train_variants(args, train)
    if args.save is not None:
        torch.save(trainer.model.state_dict(), args.save)
    return trainer.model


# Writing


NEAR = 2**-4
"""Relative difference, in 16 bits, below which either of two logits may come out as the larger one: both ways have an
error of a few units of 2^-8 per layer."""


def cached(model: ByteModel, prompt: Tensor, length: int) -> Iterator[Tensor]:
    """Yield the likeliest bytes after a prompt `[1,N]`, each `[1,1]`, by one step with a cache per byte."""
    device = prompt.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    table = PageTable.empty(1, prompt.shape[1] + length, device=prompt.device)
    layers = [module for module in model.modules() if isinstance(module, NSAttention)]
    caches = [layer.new_cache(table, dtype) for layer in layers]
    before, new = prompt[:, :0], prompt
    for _ in range(length):
        logits = model.continued(new, before, caches)
        before = torch.cat([before, new], 1)[:, 1 - NGRAM :]
        new = logits[:, -1:].argmax(-1)
        yield new
    table.check()


def uncached(model: ByteModel, prompt: Tensor, length: int) -> Iterator[Tensor]:
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
def write(model: ByteModel, prompt: Tensor, length: int, way: str) -> Written:
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


def is_near_tie(model: ByteModel, prompt: Tensor, one: bytes, other: bytes) -> bool:
    """True if two texts after a prompt `[1,N]` first differ in bytes whose logits are nearly equal."""
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    text = torch.cat([prompt, torch.tensor([[*one[:at]]], dtype=prompt.dtype, device=prompt.device)], 1)
    logits = model(text)[0, -1].float()
    return bool((logits[one[at]] - logits[other[at]]).abs() <= NEAR * logits.abs().max())


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    corpus = load_corpus(Path(sysconfig.get_path("stdlib")))
    check_length(corpus, args.context)
    check_length(corpus, args.prompt, "--prompt")
    try:
        notes = resolve(args)
    except (TypeError, ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal
    for note in notes:
        console.print(note, style="yellow", markup=False)
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
    table = Table(box=SIMPLE_HEAD)
    for column in ("", "prompt, s", "tokens/s", "speed-up"):
        table.add_column(column, justify="right" if column else "left")
    slow = results["uncached"]
    for way, result in results.items():
        speedup = f"{result.tokens_per_s / slow.tokens_per_s:.1f}x"
        table.add_row(way, f"{result.first:.3f}", f"{result.tokens_per_s:,.1f}", speedup)
    console.print(table)
    found = difference(text, slow.text)
    if found is not None and dtype != torch.float32:
        with torch.no_grad(), in_16_bits:
            near = is_near_tie(model, prompt, text, slow.text)
        if near:
            console.print(f"The texts differ in bytes that are equally likely up to rounding: {found}.", markup=False)
            return 0
    if found is not None:
        console.print(f"The texts differ: {found}.", style="red", markup=False)
        return 1
    console.print(f"Both generated the same {len(text)} bytes after a prompt of {args.prompt}.")
    return 0


# The command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=device_types(), default=device_types()[0], help="default: %(default)s")
    add("--backend", help="backend of NSA; default: the first that supports it")
    cpu, cuda = (DEFAULTS["paper"][device] for device in ("cpu", "cuda"))
    for name, meaning in (("prompt", "bytes of held-out text before the model's own"), ("length", "bytes to generate")):
        add(f"--{name}", type=positive, help=f"{meaning}; default: {cuda[name]} (CPU: {cpu[name]})")
    add("--save", type=Path, metavar="FILE", help="save the trained weights")
    add("--load", type=Path, metavar="FILE", help="load weights written by --save with the same model options")
    add_nsa_options(parser, DEFAULTS, "paper")
    add_training_options(parser, DEFAULTS["paper"])
    args = parser.parse_args(argv)
    if args.preset != "paper" or args.q_tile not in (None, 1):
        got = f"--preset {args.preset} and --q-tile {args.q_tile}"
        parser.error(f"only selection per token generates the same text without a cache: got {got}")
    if args.load is not None and args.save is not None:
        parser.error(f"--save would overwrite the file of --load, got {args.save} and {args.load}")
    args.variants = ["nsa"]
    resolve_options(parser, args, DEFAULTS["paper"])
    args.config = make_config(parser, args)
    if args.save is not None:
        check_output(parser, "--save", args.save)
    return args


if __name__ == "__main__":
    sys.exit(main())

"""Shared by the examples with NSA: variants of NSA without single branches, dense attention, and their options.

    dense           causal softmax attention over the whole context
    nsa             compressed, selected and window branch
    window          the window branch alone: the baseline without long-range attention
    no-compressed, no-selected, no-window    NSA without one branch

NSA has learned gates, which dense attention lacks; `window` keeps its gate, to be as strong a baseline as possible.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.common import DTYPES, PRESETS, SDPA, choose_backend, choose_dense, nsa_facts, preset_name
from bench.inputs import Sizes
from examples.shared.byte_models import (
    MODEL_OPTIONS,
    ByteModel,
    Defaults,
    DenseAttention,
    add_numbers,
    refusals,
    rotate,
    run_facts,
)
from nsa import NSAConfig, NSAttention
from nsa.distributed import ContextParallel

BRANCHES = ("compressed", "selected", "window")
VARIANTS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "nsa": BRANCHES,
    "window": ("window",),
    "no-compressed": ("selected", "window"),
    "no-selected": ("compressed", "window"),
    "no-window": ("compressed", "selected"),
}
"""Branches of NSA in each variant."""

NSA_OPTIONS = {
    "block_size": "select_block_size; compressed blocks are as long, with --preset paper half as long and overlapping",
    "k": "num_selected_blocks",
    "w": "window_size",
    "q_tile": "q_tile_size",
}
FORCED_BLOCKS = {"per_tile": (1, 1), "paper": (1, 2)}
"""num_init_blocks and num_local_blocks of each preset."""


# The variants


class ClosedGate:
    """Forward hook of a gate projection that sets the gate of one branch to sigmoid(-inf) = 0.

    With a closed gate the compressed branch still scores blocks, and the selected branch still selects them.
    """

    def __init__(self, branch: str) -> None:
        self.branch = BRANCHES.index(branch)

    def __call__(self, _projection: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
        per_head: Tensor = logits.unflatten(-1, (-1, len(BRANCHES)))
        closed = torch.arange(len(BRANCHES), device=logits.device) == self.branch
        return per_head.masked_fill(closed, -math.inf).flatten(-2)


@contextmanager
def ablated(model: ByteModel, branch: str) -> Iterator[None]:
    """Context in which a branch of a trained model is closed in all layers, without changing weights."""
    hooks = [
        module.gate_proj.register_forward_hook(ClosedGate(branch))
        for module in model.modules()
        if isinstance(module, NSAttention) and module.gate_proj is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def recorded(model: ByteModel) -> Iterator[list[Tensor]]:
    """Context that records the selected blocks of each layer and call (`NSAAux.indices`)."""
    indices: list[Tensor] = []

    def record(attention: NSAttention, inputs: tuple[Any, ...]) -> None:
        indices.append(attention.forward_aux(*inputs)[1].indices)

    layers = [module for module in model.modules() if isinstance(module, NSAttention)]
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        yield indices
    finally:
        for hook in hooks:
            hook.remove()


def variant_config(variant: str, config: NSAConfig) -> NSAConfig:
    """`config` without the selected or the window branch if the variant lacks it."""
    if "selected" not in VARIANTS[variant]:
        config = replace(config, num_selected_blocks=0, num_init_blocks=0, num_local_blocks=0)
    return config if "window" in VARIANTS[variant] else replace(config, window_size=0)


def make_model(
    variant: str, args: argparse.Namespace, context_parallel: ContextParallel | None = None, **options: Any
) -> ByteModel:
    """The model of a variant; `ByteModel.initialise` sets its weights. Only NSA supports divided sequences.

    Args:
        options: those of ByteModel.
    """
    sizes = (args.width, args.heads, args.kv_heads)

    def attention() -> NSAttention:
        if variant == "dense":
            return DenseAttention(*sizes, args.dense)
        made = NSAttention(
            *sizes,
            config=variant_config(variant, args.config),
            gate="x",
            compress="linear" if args.compress == "linear" else None,
            rope=rotate,
            context_parallel=context_parallel,
            backend=args.backends[variant],
        )
        if "compressed" not in VARIANTS[variant] and made.gate_proj is not None:
            made.gate_proj.register_forward_hook(ClosedGate("compressed"))
        return made

    return ByteModel(args.layers, args.width, attention, context_parallel=context_parallel, **options)


def facts(args: argparse.Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a results file that describe the run and `args.variants`."""
    described: dict[str, dict[str, Any]] = {}
    for variant in args.variants:
        if variant == "dense":
            described[variant] = {"attention": args.dense.name}
            continue
        described[variant] = {
            "attention": "NSA",
            "preset": args.preset,
            "branches": VARIANTS[variant],
            "backend": args.backends[variant],
            "config": {**asdict(variant_config(variant, args.config)), "compress": args.compress},
        }
    with torch.device("meta"):  # shapes without memory
        models = {variant: make_model(variant, args) for variant in args.variants}
    return {**run_facts(args, data, models), "preset": args.preset, "variants": described}


# The command line


def add_nsa_options(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Defaults], preset: str = "per_tile"
) -> None:
    """Add the options of the model and of NSA; `make_config` reads them.

    Args:
        defaults: by preset.
        preset: the default preset.
    """
    parser.add_argument(
        "--flash",
        action="store_true",
        help="dense attention by FlashAttention-4 if installed, else PyTorch",
    )
    add_numbers(parser.add_argument_group("model"), defaults[preset], MODEL_OPTIONS)
    group = parser.add_argument_group("options of NSA (see NSAConfig)")
    group.add_argument(
        "--preset",
        type=preset_name,
        choices=PRESETS,
        default=preset,
        help="NSAConfig.per_tile() or .paper(), which selects per token with overlapping compressed blocks; it changes "
        "other defaults than those shown; default: %(default)s",
    )
    add_numbers(group, defaults[preset], NSA_OPTIONS)
    for i, name in enumerate(("init", "local")):
        per_tile, paper = FORCED_BLOCKS["per_tile"][i], FORCED_BLOCKS["paper"][i]
        shown = f"num_{name}_blocks; default: {per_tile}, paper: {paper}"
        group.add_argument(f"--{name}-blocks", type=int, help=shown)
    group.add_argument(
        "--compress", choices=("mean", "linear"), default="mean", help="linear: learned; default: %(default)s"
    )


def make_config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> NSAConfig:
    """The NSAConfig of the options; exits if they are invalid.

    The paper's proportions are kept for any `--block-size` l': l = l'/2, d = l'/4.
    """
    if args.k * args.block_size >= args.context:
        parser.error(
            f"--context must hold more than --k blocks of --block-size, or nothing is left to select: "
            f"got {args.context}, {args.k} and {args.block_size}"
        )
    if args.preset == "paper" and args.block_size % 4:
        parser.error(f"--block-size must be a multiple of 4 with --preset paper, got {args.block_size}")
    init, local = FORCED_BLOCKS[args.preset]
    length, stride = (args.block_size // 2, args.block_size // 4) if args.preset == "paper" else (args.block_size, None)
    try:
        return PRESETS[args.preset](
            compress_block_size=length,
            compress_stride=stride,
            select_block_size=args.block_size,
            num_selected_blocks=args.k,
            window_size=args.w,
            q_tile_size=args.q_tile,
            num_init_blocks=init if args.init_blocks is None else args.init_blocks,
            num_local_blocks=local if args.local_blocks is None else args.local_blocks,
        )
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def resolve(args: argparse.Namespace) -> list[str]:
    """Set `args.dense` and `args.backends`, by variant.

    Returns:
        Notes on variants that run on the reference because no kernel supports them.

    Raises:
        SystemExit: for a named backend that cannot run a variant.
    """
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    args.dense = choose_dense(device, dtype) if args.flash else SDPA
    args.backends = dict.fromkeys(args.variants)
    notes: dict[str, None] = {}
    sizes = Sizes(args.batch, args.context, args.heads, args.kv_heads, args.width // args.heads)
    for variant in args.variants:
        if variant == "dense":
            continue
        with refusals():
            call = nsa_facts(sizes, variant_config(variant, args.config), device, dtype, backward=True)
            args.backends[variant], note = choose_backend(call, args.backend)
        if note:
            notes[note] = None
    return list(notes)

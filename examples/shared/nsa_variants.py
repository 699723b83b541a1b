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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.common import DTYPES, PRESETS, SDPA, nsa_facts, preset_name
from bench.inputs import Sizes
from examples.shared.byte_models import ByteModel, DenseAttention, backend_of, describe, rotate
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


def close_gate(branch: str, layer: NSAttention) -> Any:
    """Set a branch's gate to sigmoid(-inf) = 0, by a hook whose handle is returned.

    With a closed gate the compressed branch still scores blocks, and the selected branch still selects them.
    """

    def hook(_projection: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
        closed = torch.arange(len(BRANCHES), device=logits.device) == BRANCHES.index(branch)
        return logits.unflatten(-1, (-1, len(BRANCHES))).masked_fill(closed, -math.inf).flatten(-2)

    return layer.gate_proj.register_forward_hook(hook)  # type: ignore[union-attr]


@contextmanager
def hooked(model: ByteModel, add: Callable[[NSAttention], Any]) -> Iterator[None]:
    """Context in which all attention layers have a hook. Args: `add`: adds it to a layer and returns its handle."""
    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, NSAttention):
                hooks.enter_context(add(layer))
        yield


def ablated(model: ByteModel, branch: str) -> AbstractContextManager[None]:
    """Context in which a branch of a trained model is closed in all layers, without changing weights."""
    return hooked(model, partial(close_gate, branch))


@contextmanager
def recorded(model: ByteModel) -> Iterator[list[Tensor]]:
    """Context that records the selected blocks of each layer and call (`NSAAux.indices`)."""
    indices: list[Tensor] = []

    def record(attention: NSAttention, inputs: tuple[Any, ...]) -> None:
        indices.append(attention.forward_aux(*inputs)[1].indices)

    with hooked(model, lambda layer: layer.register_forward_pre_hook(record)):
        yield indices


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
            return DenseAttention(*sizes)
        made = NSAttention(
            *sizes,
            config=variant_config(variant, args.config),
            gate="x",
            compress="linear" if args.compress == "linear" else None,
            rope=rotate,
            context_parallel=context_parallel,
            backend=args.backends[variant],
        )
        if "compressed" not in VARIANTS[variant]:
            close_gate("compressed", made)
        return made

    return ByteModel(args.layers, args.width, attention, context_parallel=context_parallel, **options)


def facts(args: argparse.Namespace, data: dict[str, Any], more: str = "") -> dict[str, Any]:
    """The fields of a results file that describe the run and `args.variants`; see `describe` and `resolve`."""
    resolve(args)
    described: dict[str, dict[str, Any]] = {}
    for variant in args.variants:
        described[variant] = {"attention": SDPA.name}
        if variant != "dense":
            config = {**asdict(variant_config(variant, args.config)), "compress": args.compress}
            of_nsa = {"preset": args.preset, "branches": VARIANTS[variant], "backend": args.backends[variant]}
            described[variant] = {"attention": "NSA", **of_nsa, "config": config}
    run = describe(args, data, make_model, f"{more}dense attention by {SDPA.name}")
    return {**run, "preset": args.preset, "variants": described}


def add_nsa_options(parser: argparse.ArgumentParser, preset: str = "per_tile") -> None:
    """Add the options of NSA that are no numbers; `make_config` reads all. Args: `preset`: the default."""
    shown = (
        "NSAConfig.per_tile() or .paper(), which selects per token with overlapping compressed blocks; it changes "
        "other defaults than those shown; default: %(default)s"
    )
    parser.add_argument("--preset", type=preset_name, choices=PRESETS, default=preset, help=shown)
    shown = "linear: learned; default: %(default)s"
    parser.add_argument("--compress", choices=("mean", "linear"), default="mean", help=shown)


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
    per_token = args.preset == "paper"
    try:
        return PRESETS[args.preset](
            compress_block_size=args.block_size // 2 if per_token else args.block_size,
            compress_stride=args.block_size // 4 if per_token else None,
            select_block_size=args.block_size,
            num_selected_blocks=args.k,
            window_size=args.w,
            q_tile_size=args.q_tile,
            num_init_blocks=1,
            num_local_blocks=2 if per_token else 1,
        )
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def resolve(args: argparse.Namespace) -> None:
    """Set `args.backends`, by variant but for dense attention; see `backend_of`."""
    sizes = Sizes(args.batch, args.context, args.heads, args.kv_heads, args.width // args.heads)
    where = torch.device(args.device), DTYPES[args.dtype]
    calls = {
        variant: partial(nsa_facts, sizes, variant_config(variant, args.config), *where, backward=True)
        for variant in args.variants
        if variant != "dense"
    }
    args.backends = {variant: backend_of(call, args.backend) for variant, call in calls.items()}

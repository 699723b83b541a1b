"""Shared by benchmarks: arguments of the command line, the dense baseline, and the backend to time."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dispatch
from bench.inputs import Sizes
from bench.report import command_line
from cute_kernels.fa4.rules import rules
from dispatch.device import device_types
from dispatch.registry import ENVIRONMENT_VARIABLE
from dispatch.table import ROWS
from nsa import NSAConfig
from nsa.inputs import NSAInputs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRESETS: dict[str, Callable[..., NSAConfig]] = {"per_tile": NSAConfig.per_tile, "paper": NSAConfig.paper}


def preset_name(name: str) -> str:
    """Argument type: a name of PRESETS. "seed", as per_tile was called, is taken too."""
    return "per_tile" if name == "seed" else name


def positive(text: str) -> int:
    """Argument type: an integer above 0, with the suffixes K (1024) and M (1024 K)."""
    units = {"K": 1024, "M": 1024**2}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not number.strip().isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer such as 4096 or 4K, got {text!r}")
    return int(number) * unit


def head_counts(text: str) -> tuple[int, int]:
    try:
        heads, kv_heads = map(positive, text.split("/"))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"must be query/key heads such as 64/4, got {text!r}") from error
    if heads % kv_heads:
        raise argparse.ArgumentTypeError(f"must be a multiple of heads over heads, got {text!r}")
    return heads, kv_heads


def comma_list(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Argument type: items with commas between them; what comes twice counts once."""
    return lambda text: list(dict.fromkeys(item(part.strip()) for part in text.split(",")))


def above_zero(text: str) -> float:
    """Argument type: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def with_ending(path: Path, ending: str) -> Path:
    """A file of an --out, such as OUT.png, of OUT or OUT.json: other dots are of its name."""
    name = path.name.removesuffix(".json")
    if not name:
        raise SystemExit(f"--out must name a file, got {str(path)!r}")
    return path.with_name(name + ending)


OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {"type": positive, "default": 1, "help": "default: %(default)s"},
    "heads": {"type": positive, "help": "query heads; default: 8 (CPU: 4)"},
    "kv-heads": {"type": positive, "help": "key/value heads; default: a quarter of the query heads"},
    "dim": {"type": positive, "help": "head dim; default: 128 (CPU: 64)"},
    "dtype": {"choices": DTYPES, "help": "default: fp32 on a CPU, else bf16"},
    "backend": {"help": "default: the one that runs unasked"},
    "no-peers": {"action": "store_true", "help": "time ours alone"},
    "seconds": {"type": above_zero, "default": 0.3, "help": "of each timing; default: %(default)s"},
    "peak-tflops": {"type": above_zero, "help": "TFLOP/s of the floor; default: the GPU's data sheet"},
    "peak-tbs": {"type": above_zero, "help": "TB/s of the floor; default: the GPU's data sheet"},
    "bars": {"action": "store_true", "help": "hold the figures against what they have to reach"},
    "out": {"help": "results, without suffix; default: %(default)s"},
}
"""Options that scripts share. Sizes: `resolve_sizes` fills in what is not given."""
SIZES = ("batch", "heads", "kv-heads", "dim", "dtype")


def make_parser(description: str | None, *options: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the script's docstring, and some of OPTIONS with defaults of the script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in options:
        how = OPTIONS[name]
        if name in defaults:
            text = f"{how['help'].partition('default: ')[0]}default: %(default)s"
            how = {**how, "default": defaults[name], "help": text}
        parser.add_argument(f"--{name}", **how)
    return parser


def parse_args(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Arguments, and the `command` that reproduces the run."""
    args = parser.parse_args(argv)
    args.command = command_line(argv)
    return args


def add_device(parser: argparse.ArgumentParser, *kinds: str) -> None:
    """--device: one of the kinds, default: of all, whose first that is there is the default."""
    usable = [name for name in device_types() if not kinds or name in kinds]
    parser.add_argument("--device", choices=usable, default=usable[0], help="default: %(default)s")


def resolve_sizes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Defaults that depend on the device; an error when the heads do not divide."""
    on_cpu = args.device == "cpu"
    args.dtype = args.dtype or ("fp32" if on_cpu else "bf16")
    args.dim = args.dim or (64 if on_cpu else 128)
    args.heads = args.heads or (4 if on_cpu else 8)
    args.kv_heads = args.kv_heads or max(1, args.heads // 4)
    if args.heads % args.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads, got {args.heads} and {args.kv_heads}")


def nsa_facts(
    sizes: Sizes,
    config: NSAConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    backward: bool,
    recompute: bool = False,
) -> dispatch.Call:
    """Facts that the dispatcher needs of such a call. Raises TypeError or ValueError for sizes that NSA refuses."""
    q, k = (
        torch.empty((sizes.batch, 1, heads, sizes.dim), dtype=dtype, device="meta")
        for heads in (sizes.heads, sizes.kv_heads)
    )
    inputs = NSAInputs(q, k, k)
    inputs.check(config)
    options = {"inputs": inputs, "config": config, "deterministic": False, "recompute": recompute}
    return dispatch.Call("nsa", device, dtype, backward=backward, options=options)


def choose_backend(call: dispatch.Call, named: str | None) -> tuple[str, str]:
    """The backend to run, and a note when that is the reference for want of a kernel. Raises for a named one."""
    try:
        return dispatch.resolve(call, named).backend, ""
    except dispatch.BackendError as error:
        if named is not None or os.environ.get(ENVIRONMENT_VARIABLE):
            raise
        return "reference", f"Running the reference implementation: {error}"


def resolve_backend(parser: argparse.ArgumentParser, args: argparse.Namespace, *ops: str) -> None:
    """Fill in --backend, on a CPU with the reference; end the program where it names none of an op's backends."""
    args.backend = args.backend or ("reference" if args.device == "cpu" else "cute")
    for op in ops:
        known = list(dict.fromkeys(impl.backend for impl in ROWS if impl.op == op))
        if args.backend not in known:
            parser.error(f"--backend must be one of {', '.join(known)} for {op}, got {args.backend!r}")


def able_backends(call: dispatch.Call, named: str | None) -> list[str]:
    """Every backend that runs a call, the default first, the reference only if it is alone; or the named one."""
    first = dispatch.resolve(call, named).backend
    able = [verdict.impl.backend for verdict in dispatch.explain(call, named) if verdict.reason is None]
    return list(dict.fromkeys([first, *(backend for backend in able if backend != "reference")]))


@dataclass(frozen=True)
class Dense:
    """The baseline: dense causal attention on q `[B,N,H,D]` and k, v `[B,N,H_kv,D]`, and whose it is."""

    name: str
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


SDPA = Dense("PyTorch SDPA", _sdpa)
SDPA_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def choose_dense(device: torch.device, dtype: torch.dtype, sdpa: str | None = None) -> Dense:
    """FlashAttention-4 for 16-bit tensors on Hopper, B200 and B300 where it is installed, else PyTorch's own.

    Args:
        sdpa: one of SDPA_BACKENDS, to take that one of PyTorch's.
    """
    if sdpa is not None:
        return Dense(f"PyTorch SDPA ({sdpa})", partial(_sdpa, backend=SDPA_BACKENDS[sdpa]))
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and rules(device):
        try:
            from flash_attn.cute import flash_attn_func
        except Exception:  # absent, or broken in its own way; what is returned says which one it is
            return SDPA
        return Dense("FlashAttention-4", lambda *qkv: flash_attn_func(*qkv, causal=True)[0])  # [1] is the log-sum-exp
    return SDPA

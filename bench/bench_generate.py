"""A decoding step of a whole model of transformers: a Llama, dense and converted to NSA, after a prompt of N tokens.

Weights are random; the step is one forward of one new token a sequence, as `generate` makes it, without choosing the
token. "eager" is with a dynamic cache, from Python; "graph" with a static cache, as a CUDA graph that is replayed as
lengths grow; "compiled" with a static cache by torch.compile, as `generate` does by itself on a GPU. The dense model's
caches are filled with random keys and values: its steps take as long, and a prompt would take longer than all of them.
It checks no results: tests/nsa/test_transformers_generate.py does. What could not run is in `missing`. With --bars also
what the rows have to reach on one H200, and whether they do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import dispatch
from bench.bars import Bar, bars_field
from bench.common import DTYPES, positive
from bench.extras import needed
from bench.pass_report import show_bars
from bench.report import LOCAL_RESULTS, command_line, environment, relative, write_json
from bench.timing import capture, measure
from dispatch.device import device_types

MODELS = ("dense", "nsa")
MODES = ("eager", "graph", "compiled")
DEFAULT_MODES = {"cuda": ["eager", "graph"], "cpu": ["eager"], "npu": ["eager"]}
CHUNK = 8 << 10
"""Tokens of a prompt at a time."""
STEPS = 64
"""Room of a static cache for steps: two to warm up, the others timed."""
SIZES = {"layers": 4, "hidden": 4096, "heads": 64, "kv_heads": 4, "head_dim": 128}


@dataclass(frozen=True)
class Row:
    """A decoding step; milliseconds of all layers, embedding and head."""

    model: str
    mode: str
    b: int
    n: int
    ms_p20: float
    ms_p50: float
    ms_p80: float


def make_models(args: argparse.Namespace) -> dict[str, Any]:
    """A dense Llama, and one of the same sizes with NSA in the paper's preset."""
    with needed("transformers"):  # not for --help, as it takes seconds
        from transformers import AutoModelForCausalLM, LlamaConfig

        from nsa.integrations.transformers import convert
    heads = {"num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads, "head_dim": args.head_dim}
    sizes = {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden, "num_hidden_layers": args.layers}
    dense = LlamaConfig(vocab_size=32_000, max_position_embeddings=1 << 21, **sizes, **heads)
    dtype = DTYPES[args.dtype]
    with torch.device(args.device):
        models = {
            name: AutoModelForCausalLM.from_config(config, dtype=dtype)
            for name, config in (("dense", dense), ("nsa", convert(dense)))
        }
    return {name: model.eval() for name, model in models.items()}


def stepper(model: Any, mode: str, b: int, n: int, device: torch.device) -> Callable[[], Tensor]:
    """A call that appends one token to each sequence of a cache that holds a prompt of N."""
    from transformers import DynamicCache, StaticCache

    from nsa.integrations.transformers.modeling import CACHE_ARGUMENT

    config = model.config
    cache = DynamicCache() if mode == "eager" else StaticCache(config=config, max_cache_len=n + STEPS)
    call = {CACHE_ARGUMENT: cache, "use_cache": True, "logits_to_keep": 1}
    if hasattr(config, "nsa_config"):
        for tokens in torch.randint(config.vocab_size, (b, n), device=device).split(CHUNK, 1):
            model(tokens, **call)
    else:
        for layer in range(config.num_hidden_layers):
            shape = b, config.num_key_value_heads, n, config.head_dim
            cache.update(*(torch.randn(shape, device=device, dtype=model.dtype) for _ in "kv"), layer)
    token, first = torch.randint(config.vocab_size, (b, 1), device=device), cache.layers[0]
    forward = model.get_compiled_call(None) if mode == "compiled" else model

    def positions() -> Tensor:
        """On the device, so that a replay finds those of its step."""
        if hasattr(first, "sequences"):
            at: Tensor = first.sequences.table.positions(1)
            return at
        length = torch.as_tensor(first.get_seq_length(), device=device)
        return length.reshape(1, 1).expand(b, 1)

    def step() -> Tensor:
        logits: Tensor = forward(input_ids=token, position_ids=positions(), **call).logits
        return logits

    return step


def time_step(model: Any, mode: str, b: int, n: int, device: torch.device) -> Any:
    """Timing of a step, whose memory is left out: what was in use before is the cache."""
    torch.compiler.reset()  # shapes of earlier cases would make those of a graph dynamic
    step = stepper(model, mode, b, n, device)
    step()
    run = step
    if mode == "graph":
        run = capture(step, device).replay  # type: ignore[assignment]
    return measure(run, device, seconds=1.0, most=STEPS - 8)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device, rows, missing = torch.device(args.device), [], []
    models = make_models(args)
    with torch.no_grad():
        for (name, model), mode, n, b in product(models.items(), args.modes, args.n, args.batch):
            try:
                timing = time_step(model, mode, b, n, device)
            except (RuntimeError, ValueError, dispatch.BackendError) as failure:  # out of memory, not to be captured
                missing.append(f"{name}, {mode}, N={n}, B={b}: {str(failure).splitlines()[0]}")
                print(f"{missing[-1]}: not measured")
                continue
            rows.append(Row(name, mode, b, n, timing.ms_p20, timing.ms_p50, timing.ms_p80))
            print(f"{name:5} {mode:5} N={n:<8} B={b:<3} {timing.ms_p50:.3f} ms")
    sizes = {key: getattr(args, key) for key in (*SIZES, "dtype")}
    facts = {**environment(device), "command": command_line(argv), "gate": "unchecked", "sizes": sizes}
    out = Path(args.out).with_suffix(".json")
    bars = find_bars(rows if sizes == {**SIZES, "dtype": "bf16"} else []) if args.bars else None
    write_json(out, {**facts, "rows": [asdict(row) for row in rows], "missing": missing, **bars_field(bars)})
    if bars is not None:
        show_bars(bars)
    print(f"Everything: {relative(out)}")
    return 0


def find_bars(rows: Sequence[Row]) -> list[Bar]:
    """Each model in its fastest mode."""
    bars = []
    for b in (1, 16):
        fastest = {
            model: min((row.ms_p50 for row in rows if (row.model, row.b, row.n) == (model, b, 64 << 10)), default=None)
            for model in MODELS
        }
        dense, ours = fastest["dense"], fastest["nsa"]
        ratio = None if dense is None or ours is None else dense / ours
        bars.append(Bar(f"step at 64K, batch {b}: dense takes as long", ratio, 1.0, at_least=True, unit="x"))
    return bars


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument

    def numbers(text: str) -> list[int]:
        return [positive(part) for part in text.split(",")]

    add("--n", type=numbers, default=[8 << 10, 64 << 10], help="tokens of the prompt; default: 8K,64K")
    add("--batch", type=numbers, default=[1, 16], help="sequences; default: 1,16")
    for name, default in SIZES.items():
        add(f"--{name.replace('_', '-')}", type=positive, default=default, help="of the models; default: %(default)s")
    add("--modes", nargs="+", choices=MODES, help="default: eager, on CUDA also graph")
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of weights and cache; default: %(default)s")
    add("--device", choices=device_types(), default=device_types()[0], help="default: %(default)s")
    add("--bars", action="store_true", help="hold the figures against what they have to reach")
    add("--out", default=str(LOCAL_RESULTS / "generate"), help="results, without suffix; default: %(default)s")
    args = parser.parse_args(argv)
    args.modes = args.modes or DEFAULT_MODES[torch.device(args.device).type]
    return args


if __name__ == "__main__":
    sys.exit(main())

"""A decoding step of a whole model of transformers: a Llama, dense and converted to NSA, after a prompt of N tokens.

Weights are random; the step is one forward of one new token a sequence with the inputs that `generate` prepares,
without choosing the token. "eager" is with a dynamic cache, from Python; "graph" with a static cache, as a CUDA graph;
"compiled" with a static cache by torch.compile, as `generate` does by itself on a GPU. The dense models' caches are
filled with random keys and values, as a prompt would take longer than all steps. `generate` drops an attention_mask of
ones, so batches are timed without padding and "padded". "dense_unmasked" is transformers' Llama at its best: all keys
of the cache without a mask.

It checks no results: tests/nsa/test_transformers_generate.py does. Writes OUT.json after every case (schema:
docs/results_files.md). The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dispatch
from bench.bars import Bar, ratio
from bench.common import DTYPES, add_device, comma_list, make_parser, parse_args, positive
from bench.extras import needed
from bench.report import LOCAL_RESULTS, environment
from bench.results_file import Measurement, Results, Row, run
from bench.timing import capture, measure
from dispatch.device import first_line

MODELS = ("dense", "dense_unmasked", "nsa")
MODES = ("eager", "graph", "compiled")
UNMASKED = "bench-unmasked"  # Name of the attention implementation of "dense_unmasked"
CHUNK = 8 << 10  # Tokens of a prompt at a time
PADDING = 16  # Tokens on the left of the first sequence of a padded batch
STEPS = 64  # Room of a static cache for steps: two to warm up, the others timed
SIZES = {"layers": 4, "hidden": 4096, "heads": 64, "kv_heads": 4, "head_dim": 128}
LINE = "{model}, {mode}, N={n}, B={b}, padded={padded}  {ms_p50:ms} ms"


def make_models(args: argparse.Namespace) -> dict[str, Any]:
    """A dense Llama, the same without a mask, and one of the same sizes with NSA in the paper's preset."""
    with needed("transformers"):  # not for --help, as it takes seconds
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LlamaConfig

        from nsa.integrations.transformers import convert
    AttentionInterface.register(UNMASKED, unmasked_attention)
    AttentionMaskInterface.register(UNMASKED, lambda *_, **__: None)
    heads = {"num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads, "head_dim": args.head_dim}
    sizes = {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden, "num_hidden_layers": args.layers}
    common: dict[str, Any] = {"vocab_size": 32_000, "max_position_embeddings": 1 << 21, **sizes, **heads}
    dense, unmasked = (LlamaConfig(**common, attn_implementation=name) for name in ("sdpa", UNMASKED))
    dtype = DTYPES[args.dtype]
    with torch.device(args.device):
        models = {
            name: AutoModelForCausalLM.from_config(config, dtype=dtype)
            for name, config in zip(MODELS, (dense, unmasked, convert(dense)), strict=True)
        }
    return {name: model.eval() for name, model in models.items()}


def unmasked_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers for a step: all keys are seen."""
    out = scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def stepper(model: Any, mode: str, b: int, n: int, padded: bool, device: torch.device) -> Callable[[], Tensor]:
    """A call that appends one token to each sequence of a cache that holds a prompt of N."""
    from transformers import DynamicCache, StaticCache

    from nsa.integrations.transformers.modeling import CACHE_ARGUMENT

    config = model.config
    cache = DynamicCache() if mode == "eager" else StaticCache(config=config, max_cache_len=n + STEPS)
    call = {CACHE_ARGUMENT: cache, "use_cache": True, "logits_to_keep": 1}
    real = torch.ones((b, n), dtype=torch.int64, device=device)
    if padded:
        real[0, :PADDING] = 0
    if hasattr(config, "nsa_config"):
        seen = 0
        for tokens in torch.randint(config.vocab_size, (b, n), device=device).split(CHUNK, 1):
            seen += tokens.shape[1]
            model(tokens, attention_mask=real[:, :seen] if padded else None, **call)
    else:
        for layer in range(config.num_hidden_layers):
            shape = b, config.num_key_value_heads, n, config.head_dim
            cache.update(*(torch.randn(shape, device=device, dtype=model.dtype) for _ in "kv"), layer)
    token = torch.randint(config.vocab_size, (b, 1), device=device)
    position = real.sum(1, keepdim=True) - 1
    mask = real if padded else None
    if padded and mode == "graph":  # in which no shape changes
        mask = torch.nn.functional.pad(real, (0, STEPS), value=1)
    forward = model.get_compiled_call(None) if mode == "compiled" else model

    def step() -> Tensor:
        nonlocal mask
        if mask is not None and mode != "graph":
            mask = torch.cat([mask, mask.new_ones((b, 1))], 1)
        position.add_(1)  # on the device, so that a replay has those of its step
        inputs = model.prepare_inputs_for_generation(token, attention_mask=mask, position_ids=position, **call)
        logits: Tensor = forward(**inputs).logits
        return logits

    return step


def time_step(model: Any, mode: str, b: int, n: int, padded: bool, device: torch.device) -> Any:
    """Timing of a step, whose memory is left out: what was in use before is the cache."""
    torch.compiler.reset()  # shapes of earlier cases would make those of a graph dynamic
    step = stepper(model, mode, b, n, padded, device)
    step()
    call: Callable[[], Any] = capture(step, device).replay if mode == "graph" else step
    return measure(call, device, seconds=1.0, most=STEPS - 8)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    head = {**environment(device), "sizes": {key: getattr(args, key) for key in (*SIZES, "dtype")}}

    def parts(_: Results) -> Iterator[Measurement]:
        models, modes = make_models(args), MODES if args.device == "cuda" else ("eager",)
        for name, mode, n, b, padded in product(models, modes, args.n, args.batch, (False, True)):
            part = f"{name}, {mode}, N={n}, B={b}{', padded' if padded else ''}"
            if not padded or (b > 1 and name != "dense_unmasked"):
                yield part, partial(measure_case, part, models, device, name, mode, n, b, padded)

    with torch.no_grad():
        return run(args, head, parts, LINE, bars=find_bars, checked=False)


def measure_case(
    part: str, models: dict[str, Any], device: torch.device, name: str, mode: str, n: int, b: int, padded: bool
) -> Iterator[Row | str]:
    """The row of a case; or why it cannot run, such as too little memory or a call that no graph can hold."""
    try:
        timing = time_step(models[name], mode, b, n, padded, device)
    except (RuntimeError, ValueError, dispatch.BackendError) as failure:
        yield f"{part}: {first_line(failure)}"
    else:
        yield {"model": name, "mode": mode, "b": b, "n": n, "padded": padded, **timing.fields}


def find_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """NSA and dense, each in its fastest mode, dense also in its faster model."""
    for b, padded in ((1, False), (16, False), (16, True)):
        steps = [row for row in rows if (row["b"], row["n"], row["padded"]) == (b, 64 << 10, padded)]
        ours = min((row["ms_p50"] for row in steps if row["model"] == "nsa"), default=None)
        dense = min((row["ms_p50"] for row in steps if row["model"] != "nsa"), default=None)
        what = f"step at 64K, batch {b}{', padded' if padded else ''}: dense takes as long"
        yield Bar(what, ratio(dense, ours), 1.0, at_least=True, unit="x")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "dtype", "bars", "out", dtype="bf16", out=str(LOCAL_RESULTS / "generate"))
    add_device(parser)
    add = parser.add_argument

    numbers = comma_list(positive)
    add("--n", type=numbers, default=[8 << 10, 64 << 10], help="tokens of the prompt; default: 8K,64K")
    add("--batch", type=numbers, default=[1, 16], help="sequences; default: 1,16")
    for name, default in SIZES.items():
        add(f"--{name.replace('_', '-')}", type=positive, default=default, help="of the models; default: %(default)s")
    return parse_args(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

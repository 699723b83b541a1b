"""Shared by the training examples: a text that every machine has, a byte-level language model, training, loss curves.

The text is the sources of the Python standard library, with some files held out for validation. All variants of an
example start from the same weights, if they share them, and see the same batches in the same order.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import sysconfig
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, silu
from torch.utils.checkpoint import checkpoint

import dispatch
from bench.common import DTYPES, SDPA, above_zero, add_device, comma_list, make_parser, positive, with_ending
from bench.extras import needed
from bench.report import LOCAL_RESULTS, command_line, environment, relative, write_json
from bench.results_file import replaced_results
from bench.show import console, print_table, saved_figure, say
from bench.timing import GIB
from nsa import LinearCompression, NSACache, NSAttention
from nsa.distributed import ContextParallel

with needed("rich"):
    from rich.progress import track

VOCABULARY = 256
SEPARATOR = b"\0"  # Separates files; removed from their contents
VALIDATION_SHARE = 20  # One in this many files is held out for validation
NGRAM = 4  # Number of bytes in the embedding of a position: its own and those before it
ROPE_BASE = 10_000.0
WARM_STEPS = 3  # Number of first steps, which compile and are not timed


# The text


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, uint8, and their files, relative to the library's folder."""

    training: Tensor
    validation: Tensor
    training_files: tuple[str, ...]
    validation_files: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """Sizes and digests, for results files to show that two runs had the same text."""
        return {
            name: {"files": len(files), "bytes": len(text), "sha256": hashlib.sha256(text.numpy().data).hexdigest()}
            for name in ("training", "validation")
            for text, files in [(getattr(self, name), getattr(self, f"{name}_files"))]
        }


def load_corpus() -> Corpus:
    """Load all sources of the standard library, without installed packages, in the order of their paths.

    Whether a file is held out depends only on its path. Among files with equal content only the first is used, so that
    no validation text is trained on.
    """
    split: tuple[dict[str, bytes], dict[str, bytes]] = {}, {}
    seen: set[bytes] = set()
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if {"site-packages", "dist-packages"} & set(path.parts) or not path.is_file():
            continue
        content = path.read_bytes().replace(SEPARATOR, b"").strip()
        if content and content not in seen:
            seen.add(content)
            held_out = zlib.crc32(name.encode()) % VALIDATION_SHARE == 0
            split[held_out][name] = content + b"\n" + SEPARATOR
    texts = (bytearray(b"".join(files.values()) or SEPARATOR) for files in split)
    training, validation = (torch.frombuffer(text, dtype=torch.uint8) for text in texts)
    return Corpus(training, validation, *map(tuple, split))


def windows_at(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Windows of the text that begin at `starts`: int64 `[len(starts), length]`."""
    return text[starts[:, None] + torch.arange(length, device=text.device)].long()


# The model


def rotary_table(tokens: int, dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary position embeddings, `[tokens, 1, D/2]`."""
    frequencies = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angles = torch.arange(tokens, device=device)[:, None, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(tensor: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """A `rope` hook: rotates `[B,N,heads,D]` in fp32 and casts back to its dtype, that of autocast."""
    cos, sin = table
    first, second = tensor.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(tensor.dtype)


class DenseAttention(NSAttention):
    """PyTorch's causal softmax attention with NSAttention's projections and rotary embeddings, and no gates."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, gate=None, rope=rotate)

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(hidden_states).unflatten(-1, (-1, self.head_dim)) for each in projections)
        out = SDPA.attention(rotate(q, position_embeddings), rotate(k, position_embeddings), v)
        return self.o_proj(out.flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = -(-8 * width // 3 // 64) * 64
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        return self.down(silu(self.gate(normed)) * self.up(normed))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, attention: NSAttention, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.attention = attention
        self.feed_forward = FeedForward(width)

    def attend(self, hidden: Tensor, table: tuple[Tensor, Tensor], cache: NSACache | None = None) -> Tensor:
        return self.attention(self.norm(hidden), table, **({} if cache is None else {"cache": cache}))

    def forward(self, hidden: Tensor, table: tuple[Tensor, Tensor], cache: NSACache | None = None) -> Tensor:
        hidden = hidden + self.attend(hidden, table, cache)
        return hidden + self.feed_forward(hidden)


class NgramEmbedding(nn.Module):
    """Sum of embeddings of a byte and of the bytes before it, so that a position represents more than one letter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(NGRAM))

    def forward(self, tokens: Tensor) -> Tensor:
        before = pad(tokens, [NGRAM - 1, 0], value=SEPARATOR[0])
        shifted = (before[:, NGRAM - 1 - back : before.shape[1] - back] for back in range(NGRAM))
        return torch.stack([table(ids) for table, ids in zip(self.tables, shifted, strict=True)]).sum(0)


class ByteModel(nn.Module):
    """Logits of the next byte, `[B,N,256]`, for bytes `[B,N]`; with `context_parallel`, those of this rank's bytes."""

    def __init__(
        self,
        layers: int,
        width: int,
        attention: Callable[[], NSAttention],
        *,
        rope_base: float = ROPE_BASE,
        checkpointing: bool = False,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        self.context_parallel = context_parallel
        self.embed = NgramEmbedding(width)
        self.blocks = nn.ModuleList(Block(attention(), width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.rope_base, self.checkpointing = rope_base, checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        table = rotary_table(tokens.shape[1], self.head_dim, self.rope_base, tokens.device)
        hidden = self.embed(tokens)
        if self.context_parallel is not None:  # divided after the embedding, which includes earlier bytes
            positions = self.context_parallel.positions(tokens.shape[1], device=tokens.device)
            hidden, table = self.context_parallel.shard(hidden), (table[0][positions], table[1][positions])
        return self.head(self.norm(self.through_blocks(hidden, table)))

    def continued(self, tokens: Tensor, before: Tensor, caches: Sequence[NSACache]) -> Tensor:
        """Logits of bytes `[B,N]` after those in the caches, of which `before`, `[B,n]`, are the last."""
        pages, count = caches[0].table, tokens.shape[1]
        hidden = self.embed(torch.cat([before[:, 1 - NGRAM :], tokens], 1))[:, -count:]
        table = rotary_table(pages.capacity, self.head_dim, self.rope_base, tokens.device)
        cos, sin = (part[pages.positions(count)] for part in table)
        with pages.step(count):
            for block, cache in zip(self.blocks, caches, strict=True):
                hidden = block(hidden, (cos, sin), cache)
        return self.head(self.norm(hidden))

    def through_blocks(self, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.checkpointing else block
            hidden = run(hidden, table)
        return hidden

    @property
    def head_dim(self) -> int:
        return self.blocks[0].attention.head_dim  # type: ignore[union-attr, return-value]

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set weights from the seed and each parameter's name, so that variants start with equal shared parameters.

        Biases and the queries of attention residual are 0, all other vectors (weights of norms) 1. Learned compression
        starts as the mean.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith(("bias", "w_query")) else 1.0)
                continue
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            residual = name.endswith(("o_proj.weight", "down.weight"))  # adds to the residual stream
            scale = 1 / math.sqrt(parameter.shape[-1] * (2 * len(self.blocks) if residual else 1))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        for module in self.modules():
            if isinstance(module, LinearCompression):
                module.reset_parameters()


# Training


Row = dict[str, Any]
"""Fields of a row of results, as docs/results_files.md lists them for each example; losses are in nats per byte."""
Results = dict[str, list[Row]]
"""Lists of rows by field of the results file: "rows" of loss curves, "summary" of variants, and an example's own."""


def autocast(args: argparse.Namespace) -> torch.autocast:
    dtype = DTYPES[args.dtype]
    return torch.autocast(torch.device(args.device).type, dtype, enabled=dtype != torch.float32)


class GraphedGradients:
    """Forward and backward as one CUDA graph, for batches of one shape.

    Args:
        gradients: maps a batch to its loss; adds gradients to those of `parameters`.
        batch: an example.
    """

    def __init__(
        self, gradients: Callable[[Tensor], Tensor], batch: Tensor, parameters: Iterable[nn.Parameter]
    ) -> None:
        self.batch = batch.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile kernels before the capture
            for _ in range(WARM_STEPS):
                gradients(self.batch)
        torch.cuda.current_stream().wait_stream(side)
        for parameter in parameters:
            parameter.grad = None  # so that the graph writes gradients instead of adding to them
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = gradients(self.batch)

    def __call__(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch. Parameters' gradients are overwritten in place and must not be set to None."""
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss


class ByteTrainer(ABC):
    """One variant on one device: its model, its optimiser and its validation windows.

    Args:
        model: a ByteModel, or what has its `initialise` and `forward`.
        validation: windows `[W, context + 1]`.
    """

    def __init__(self, variant: str, model: Any, args: argparse.Namespace, validation: Tensor) -> None:
        self.variant, self.args, self.device = variant, args, torch.device(args.device)
        self.validation = validation.to(self.device)
        self.model = model
        self.model.initialise(args.seed)
        self.model.to(self.device)
        groups = [
            {"params": [p for p in self.model.parameters() if (p.dim() > 1) == matrices], "weight_decay": decay}
            for matrices, decay in ((True, 0.1), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=self.device.type == "cuda")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.learning_rate)
        self.graph: GraphedGradients | None = None

    @abstractmethod
    def batch(self, step: int) -> Tensor:
        """Training windows of a step, `[B, context + 1]`."""

    def learning_rate(self, step: int) -> float:
        """Factor of the peak rate: a linear warm-up over a tenth of the steps, then a cosine down to 0.1."""
        warmup = max(1, self.args.steps // 10)
        done = (step - warmup) / max(1, self.args.steps - warmup)
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))
        return float((step + 1) / warmup if step < warmup else cosine)

    def logits(self, windows: Tensor) -> Tensor:
        """Logits of each byte but the first, `[B, length - 1, 256]` in fp32."""
        with autocast(self.args):
            return self.model(windows[:, :-1]).float()

    def losses(self, windows: Tensor) -> Tensor:
        """Cross entropy of each byte but the first in nats, `[B, length - 1]`."""
        flat = cross_entropy(self.logits(windows).flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
        return flat.view(len(windows), -1)

    def step(self, step: int) -> float:
        """One update; returns the loss before it. Reading the loss waits for the device, so a step can be timed.

        Raises:
            SystemExit: when the loss is not finite.
        """
        windows = self.batch(step)
        if self.args.cuda_graph:
            self.graph = self.graph or GraphedGradients(self.gradients, windows, self.model.parameters())
            loss = self.graph(windows)
        else:
            self.optimizer.zero_grad()
            loss = self.gradients(windows)
        value = loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        if not math.isfinite(value):
            raise SystemExit(f"{self.variant}: the loss is {value} at step {step}: a smaller --lr may help")
        return value

    def gradients(self, windows: Tensor) -> Tensor:
        """Return the mean loss after adding its gradients to the parameters'."""
        loss = self.losses(windows).mean()
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self) -> float:
        losses = torch.cat([self.losses(part) for part in self.validation.split(self.args.batch)])
        return float(losses.mean())

    def row(self, step: int, train_loss: float | None) -> Row:
        """A point of the loss curve. Args: `train_loss`: the mean since the row before."""
        loss = self.evaluate()
        say(f"{self.variant}, step {step}: validation loss {loss:.4f}")
        row = {"variant": self.variant, "step": step, "tokens": step * self.args.batch * self.args.context}
        return {**row, "train_loss": train_loss, "val_loss": loss}

    def train(self) -> Results:
        """Run all steps; evaluate every `--eval-every` steps and after the last.

        Returns:
            The loss curve, and a summary, whose `tokens_per_s` is without warm-up steps and evaluation.
        """
        args, cuda = self.args, self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        rows, losses, seconds = [self.row(0, None)], [], []
        for step in track(range(1, args.steps + 1), self.variant, console=console, transient=True):
            begin = time.perf_counter()
            losses.append(self.step(step - 1))
            seconds.append(time.perf_counter() - begin)
            if step == args.steps or step % args.eval_every == 0:
                rows.append(self.row(step, fmean(losses[rows[-1]["step"] :])))
        timed, loss = seconds[WARM_STEPS:], rows[-1]["val_loss"]
        summary = {
            "variant": self.variant,
            "steps": args.steps,
            "final_val_loss": loss,
            "bits_per_byte": loss / math.log(2),
            "tokens_per_s": args.batch * args.context * len(timed) / sum(timed) if timed else None,
            "peak_gib": torch.cuda.max_memory_allocated(self.device) / GIB if cuda else None,
        }
        return {"rows": rows, "summary": [summary]}


class TextTrainer(ByteTrainer):
    """ByteTrainer on a corpus: random training windows, and evenly spaced validation windows without overlap."""

    def __init__(self, variant: str, model: Any, args: argparse.Namespace, corpus: Corpus) -> None:
        last = len(corpus.validation) - 1
        windows = min(args.eval_windows, last // args.context)
        held_out = torch.arange(windows) * (last // windows)
        super().__init__(variant, model, args, windows_at(corpus.validation, held_out, args.context + 1))
        self.training = corpus.training.to(self.device)
        generator, shape = torch.Generator().manual_seed(args.seed), (args.steps, args.batch)
        self.starts = torch.randint(len(self.training) - args.context, shape, generator=generator).to(self.device)

    def batch(self, step: int) -> Tensor:
        return windows_at(self.training, self.starts[step], self.args.context + 1)


def record_variants(
    args: argparse.Namespace,
    facts: Mapping[str, Any],
    train: Callable[[str], Results],
    conclude: Callable[[Results], dict[str, Any]],
    draw: Callable[[Results, Path, str], None],
    columns: Mapping[str, Callable[[Row], str]] | None = None,
) -> dict[str, Any]:
    """Train `args.variants`, write OUT.json and OUT.png after each, and print what was found at the end.

    Args:
        facts: fields of OUT.json that describe the run.
        train: trains a variant and returns its results.
        conclude: further fields of OUT.json from all results so far, "verdict" among them.
        draw: writes OUT.png, given its path and the name of the device.
        columns: texts of a summary by heading, beside those of every example.

    Returns:
        The last conclusion.
    """
    results: Results = {}
    conclusion: dict[str, Any] = {}
    out = Path(args.out)
    table, picture = (with_ending(out, suffix) for suffix in (".json", ".png"))

    with replaced_results(out):
        for variant in args.variants:
            for field, new in train(variant).items():
                results.setdefault(field, []).extend(new)
            conclusion.update(conclude(results))
            write_json(table, {**facts, **results, **conclusion})
            draw(results, picture, facts["device"])
            gc.collect()  # frees the variant
    shown = {
        "variant": lambda s: s["variant"],
        "val loss": lambda s: f"{s['final_val_loss']:.4f}",
        "bits/byte": lambda s: f"{s['bits_per_byte']:.4f}",
        **(columns or {}),
        "bytes/s": lambda s: "?" if s["tokens_per_s"] is None else f"{s['tokens_per_s']:,.0f}",
        "peak GiB": lambda s: "" if s["peak_gib"] is None else f"{s['peak_gib']:.2f}",
        "steps": lambda s: str(s["steps"]),
    }
    print_table("after the last step; loss in nats per byte", shown, results["summary"], left=("variant",))
    console.print(f"What this says: {conclusion['verdict']}")
    say(f"Plot: {relative(picture)}   everything: {relative(table)}")
    return conclusion


def draw_curves(baseline: str, results: Results, path: Path, device: str) -> None:
    """Plot validation loss by bytes seen and, if the baseline was trained, the difference from it at each step."""
    curves: dict[str, list[Row]] = {}
    for row in results["rows"]:
        curves.setdefault(row["variant"], []).append(row)
    base = {row["step"]: row["val_loss"] for row in curves.get(baseline, [])}
    panels = 2 if base else 1
    with saved_figure(path, 1, panels, (6 * panels, 5)) as (figure, ((losses, *against),)):
        for name, curve in sorted(curves.items(), key=lambda item: item[1][-1]["val_loss"], reverse=True):
            style = {"color": "black"} if name == baseline else {}
            points = [(row["tokens"] / 1e6, row["val_loss"], base.get(row["step"])) for row in curve]
            label = f"{name}  {curve[-1]['val_loss']:.3f}"
            losses.plot([seen for seen, _, _ in points], [loss for _, loss, _ in points], label=label, **style)
            for axes in against:
                shared = [(seen, 100 * (loss / other - 1)) for seen, loss, other in points if other is not None]
                axes.plot(*zip(*shared, strict=True), **style)
                axes.set(title=f"against {baseline}", ylabel="%, above 0 is worse")
        # Without the steep first points, which would flatten the differences between variants
        early = [curve[min(2, len(curve) - 1)]["val_loss"] for curve in curves.values()]
        losses.set_ylim(min(curve[-1]["val_loss"] for curve in curves.values()) * 0.97, max(early) * 1.03)
        losses.set(title="validation loss", ylabel="nats per byte")
        losses.legend(title="variant, final loss")
        for axes in (losses, *against):
            axes.set_xlabel("million bytes seen")
            axes.grid(alpha=0.3)
        figure.suptitle(f"Language models on the sources of the Python standard library, {device}")


def backend_of(make_call: Callable[[], dispatch.Call], named: str | None) -> str:
    """The backend that runs a call; exits with the reason if none, or not the named one, does."""
    try:
        return dispatch.resolve(make_call(), named).backend
    except (TypeError, ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal


# The command line

Defaults = Mapping[str, tuple[int, int]]
"""Default integers by option, on the CPU and on GPUs, for a few seconds or a minute per variant."""
MODEL_OPTIONS = ("layers", "width", "heads", "kv_heads", "context")
MEANINGS = {
    "steps": "training steps of each variant",
    "batch": "sequences per step",
    "context": "bytes per sequence, such as 8192 or 8K",
    "layers": "transformer blocks",
    "width": "width of the residual stream",
    "heads": "query heads",
    "kv_heads": "key/value heads",
    "block_size": "select_block_size; compressed blocks are as long, with --preset paper half as long and overlapping",
    "k": "num_selected_blocks",
    "w": "window_size",
    "q_tile": "q_tile_size",
    "eval_every": "steps between two evaluations",
    "eval_windows": "validation sequences, the same each time",
    "cuts": "positions per validation sequence at which the lookahead is measured",
    "needles": "keys with values in a sequence",
    "questions": "keys asked for at the end of it",
    "prompt": "bytes of held-out text before the model's own",
    "length": "bytes to generate",
}
"""Meanings of options that are positive integers."""


def new_parser(doc: str | None, defaults: Defaults, **out: str) -> argparse.ArgumentParser:
    """A parser with an option for each of the defaults, and those that all trained models have.

    Args:
        doc: describes the example. out: default of --out, if it has this option.
    """
    parser = make_parser(doc, "backend", *out, **{option: str(LOCAL_RESULTS / name) for option, name in out.items()})
    add_device(parser)
    add = parser.add_argument
    for name, (cpu, gpu) in defaults.items():
        shown = f"{MEANINGS[name]}; default: {gpu} (CPU: {cpu})"
        add(f"--{name.replace('_', '-')}", type=positive, help=shown)
    add("--lr", type=above_zero, help="peak learning rate; default: 1e-3 (CPU: 4e-3)")
    add("--dtype", choices=("bf16", "fp32"), help="dtype of autocast; default: bf16 (CPU: fp32)")
    add("--seed", type=int, default=0, help="seed of weights and batches; default: %(default)s")
    add("--cuda-graph", action="store_true", help="run forward and backward of a step as one CUDA graph")
    return parser


def add_variants(parser: argparse.ArgumentParser, variants: Collection[str], chosen: Collection[str] = ()) -> None:
    """Add --variants. Args: `chosen`: the default, if not all."""

    def variant(name: str) -> str:
        if name not in variants:
            raise argparse.ArgumentTypeError(f"must be among {', '.join(variants)}, got {name!r}")
        return name

    shown = f"among {', '.join(variants)}; default: {', '.join(chosen) or 'all'}"
    default = [*(chosen or variants)]
    parser.add_argument("--variants", type=comma_list(variant), default=default, metavar="NAME,...", help=shown)


def resolve_options(parser: argparse.ArgumentParser, args: argparse.Namespace, defaults: Defaults) -> None:
    """Set defaults that depend on the device; exit if arguments are invalid."""
    on_cpu = args.device == "cpu"
    for name, (cpu, gpu) in defaults.items():
        setattr(args, name, getattr(args, name) or (cpu if on_cpu else gpu))
    if args.cuda_graph and on_cpu:
        parser.error("--cuda-graph needs a CUDA device, got cpu")
    args.lr = args.lr or (4e-3 if on_cpu else 1e-3)
    args.dtype = args.dtype or ("fp32" if on_cpu else "bf16")
    if args.width % args.heads or args.width // args.heads % 2:
        parser.error(f"--width must be a multiple of 2 * --heads, got {args.width} and {args.heads}")
    if args.heads % args.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads, got {args.heads} and {args.kv_heads}")


def load_text(length: int, option: str = "--context") -> Corpus:
    """`load_corpus`; exit unless both texts have more than `length` bytes."""
    corpus = load_corpus()
    shortest = min(len(corpus.training), len(corpus.validation))
    if shortest < length + 1:
        raise SystemExit(f"{option} must be less than the {shortest:,} bytes of text here, got {length:,}")
    return corpus


def describe(
    args: argparse.Namespace,
    data: dict[str, Any],
    make_model: Callable[[str, argparse.Namespace], ByteModel],
    more: str,
) -> dict[str, Any]:
    """The fields of a results file that describe the run, which is introduced to readers, too.

    Args:
        make_model: makes the model of a variant. more: words on the run.
    """
    training = ("steps", "batch", "lr", "dtype", "seed", "eval_windows", "cuda_graph")
    with torch.device("meta"):  # shapes without memory
        models = {name: make_model(name, args) for name in args.variants}
    parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    facts = environment(torch.device(args.device))
    say(
        f"A byte-level language model of {max(parameters.values()) / 1e6:.1f} M parameters "
        f"({args.layers} layers, width {args.width}, {args.heads} heads over {args.kv_heads}), context "
        f"{args.context:,}, {args.steps} steps of {args.batch * args.context:,} bytes, {args.dtype}, {more}, "
        f"on {facts['device']}"
    )
    return {
        **facts,
        "command": command_line(),
        "model": {**{name: getattr(args, name) for name in MODEL_OPTIONS}, "parameters": parameters},
        "training": {name: getattr(args, name) for name in training},
        "data": data,
    }

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
import tempfile
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, silu
from torch.utils.checkpoint import checkpoint

import dispatch
from bench.common import DTYPES, Dense, above_zero, add_device, make_parser, positive, with_ending
from bench.extras import needed
from bench.report import LOCAL_RESULTS, command_line, environment, relative, write_json
from bench.results_file import replaced_results
from bench.show import console, print_table, saved_figure, say
from bench.timing import GIB
from nsa import LinearCompression, NSACache, NSAttention
from nsa.distributed import ContextParallel

with needed("rich"):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

VOCABULARY = 256
SEPARATOR = b"\0"
"""Separates files; removed from their contents."""
VALIDATION_SHARE = 20
"""One in this many files is held out for validation."""
NGRAM = 4
"""Number of bytes in the embedding of a position: its own and those before it."""
ROPE_BASE = 10_000.0
WARM_STEPS = 3
"""Number of first steps, which compile and are not timed."""


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
            for name, files, text in (
                ("training", self.training_files, self.training),
                ("validation", self.validation_files, self.validation),
            )
        }


def load_corpus() -> Corpus:
    """Load all sources of the standard library, without installed packages, in the order of their paths.

    Whether a file is held out depends only on its path. Among files with equal content only the first is used, so that
    no validation text is trained on.
    """
    training: dict[str, bytes] = {}
    validation: dict[str, bytes] = {}
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
            (validation if held_out else training)[name] = content + b"\n" + SEPARATOR
    texts = [
        torch.frombuffer(bytearray(b"".join(files.values()) or SEPARATOR), dtype=torch.uint8)
        for files in (training, validation)
    ]
    return Corpus(texts[0], texts[1], tuple(training), tuple(validation))


def windows_at(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Windows of the text that begin at `starts`: int64 `[len(starts), length]`."""
    return text[starts[:, None] + torch.arange(length, device=text.device)].long()


def training_starts(corpus: Corpus, steps: int, batch: int, context: int, seed: int) -> Tensor:
    """First bytes of the windows of every step, `[steps, batch]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(corpus.training) - context, (steps, batch), generator=generator)


def validation_starts(corpus: Corpus, windows: int, context: int) -> Tensor:
    """First bytes of `windows` evenly spaced windows without overlap, or of as many as fit the text."""
    windows = min(windows, (len(corpus.validation) - 1) // context)
    return torch.arange(windows) * ((len(corpus.validation) - 1) // max(windows, 1))


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
    """Causal softmax attention with NSAttention's projections and rotary embeddings, and no gates."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, dense: Dense) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, gate=None, rope=rotate)
        self.dense = dense

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Tensor:
        q, k, v = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.dense.attention(rotate(q, position_embeddings), rotate(k, position_embeddings), v)
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected


class FeedForward(nn.Module):
    """RMSNorm and SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = -(-8 * width // 3 // 64) * 64
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        out: Tensor = self.down(silu(self.gate(normed)) * self.up(normed))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, attention: NSAttention, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.attention = attention
        self.feed_forward = FeedForward(width)

    def attend(self, hidden: Tensor, table: tuple[Tensor, Tensor], cache: NSACache | None = None) -> Tensor:
        normed = self.norm(hidden)
        out: Tensor = self.attention(normed, table) if cache is None else self.attention(normed, table, cache=cache)
        return out

    def forward(self, hidden: Tensor, table: tuple[Tensor, Tensor], cache: NSACache | None = None) -> Tensor:
        hidden = hidden + self.attend(hidden, table, cache)
        out: Tensor = hidden + self.feed_forward(hidden)
        return out


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
        logits: Tensor = self.head(self.norm(self.through_blocks(hidden, table)))
        return logits

    def continued(self, tokens: Tensor, before: Tensor, caches: Sequence[NSACache]) -> Tensor:
        """Logits of bytes `[B,N]` that follow those in the caches; `before` are the last bytes in the caches,
        `[B,n]`.
        """
        pages, count = caches[0].table, tokens.shape[1]
        hidden = self.embed(torch.cat([before[:, 1 - NGRAM :], tokens], 1))[:, -count:]
        table = rotary_table(pages.capacity, self.head_dim, self.rope_base, tokens.device)
        cos, sin = (part[pages.positions(count)] for part in table)
        with pages.step(count):
            for block, cache in zip(self.blocks, caches, strict=True):
                hidden = block(hidden, (cos, sin), cache)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def through_blocks(self, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, table, use_reentrant=False)
            else:
                hidden = block(hidden, table)
        return hidden

    @property
    def head_dim(self) -> int:
        dim: int = self.blocks[0].attention.head_dim  # type: ignore[union-attr, assignment]
        return dim

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


@dataclass(frozen=True)
class Row:
    """A point of a loss curve, in nats per byte. train_loss is the mean since the last row; None before the first
    step.
    """

    variant: str
    step: int
    tokens: int
    train_loss: float | None
    val_loss: float


@dataclass(frozen=True)
class Summary:
    """Results of a variant. Bytes per second are without warm-up steps and evaluation; None where not measured."""

    variant: str
    steps: int
    final_val_loss: float
    bits_per_byte: float
    tokens_per_s: float | None
    peak_gib: float | None


Show = Callable[[int, float, float | None], None]
"""Called after each step with its number, its loss and bytes per second."""


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
        validation: windows `[W, context + 1]`.
    """

    def __init__(self, variant: str, model: ByteModel, args: argparse.Namespace, validation: Tensor) -> None:
        self.variant, self.args, self.device = variant, args, torch.device(args.device)
        self.validation = validation.to(self.device)
        self.model = model
        self.model.initialise(args.seed)
        self.model.to(self.device)
        if args.compile:  # not attention, which breaks the graph
            for block in self.model.blocks:
                block.feed_forward.compile()  # type: ignore[union-attr]
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
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
        dtype = DTYPES[self.args.dtype]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            logits: Tensor = self.model(windows[:, :-1])
        return logits.float()

    def losses(self, windows: Tensor) -> Tensor:
        """Cross entropy of each byte but the first in nats, `[B, length - 1]`."""
        flat = cross_entropy(self.logits(windows).flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
        return flat.view(len(windows), -1)

    def step(self, step: int) -> float:
        """One update; returns the loss before it. Reading the loss waits for the device, so a step can be timed.

        Raises:
            FloatingPointError: when the loss is not finite.
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
            raise FloatingPointError(f"{self.variant}: the loss is {value} at step {step}")
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

    def train(self, show: Show) -> tuple[list[Row], Summary]:
        """Run all steps, or as many as `--minutes` allow, and evaluate every `--eval-every` steps and after the
        last.
        """
        args, per_step = self.args, self.args.batch * self.args.context
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        rows = [Row(self.variant, 0, 0, None, self.evaluate())]
        seconds = timed_seconds = 0.0
        recent: list[float] = []
        for step in range(1, args.steps + 1):
            begin = time.perf_counter()
            recent.append(self.step(step - 1))
            taken = time.perf_counter() - begin
            seconds += taken
            timed_seconds += taken if step > WARM_STEPS else 0.0
            speed = per_step * (step - WARM_STEPS) / timed_seconds if step > WARM_STEPS else None
            show(step, recent[-1], speed)
            last = step == args.steps or (args.minutes is not None and seconds > 60 * args.minutes)
            if last or step % args.eval_every == 0:
                rows.append(Row(self.variant, step, step * per_step, sum(recent) / len(recent), self.evaluate()))
                recent = []
            if last:
                break
        peak_gib = torch.cuda.max_memory_allocated(self.device) / GIB if self.device.type == "cuda" else None
        loss = rows[-1].val_loss
        return rows, Summary(self.variant, step, loss, loss / math.log(2), speed, peak_gib)


class TextTrainer(ByteTrainer):
    """ByteTrainer on a corpus."""

    def __init__(self, variant: str, model: ByteModel, args: argparse.Namespace, corpus: Corpus) -> None:
        held_out = validation_starts(corpus, args.eval_windows, args.context)
        super().__init__(variant, model, args, windows_at(corpus.validation, held_out, args.context + 1))
        self.training = corpus.training.to(self.device)
        self.starts = training_starts(corpus, args.steps, args.batch, args.context, args.seed).to(self.device)

    def batch(self, step: int) -> Tensor:
        return windows_at(self.training, self.starts[step], self.args.context + 1)


def train_variants(args: argparse.Namespace, train: Callable[[str, Show], object]) -> None:
    """Train `args.variants` sequentially, with a progress bar each; exit if one diverges."""
    columns = ("{task.description}", "loss {task.fields[loss]}", "{task.fields[speed]} bytes/s")
    name, loss_column, speed_column = (TextColumn(column) for column in columns)
    bar = (BarColumn(), MofNCompleteColumn(), loss_column, speed_column, TimeRemainingColumn())
    with Progress(name, *bar, console=console, transient=True) as progress:
        for variant in args.variants:
            task = progress.add_task(variant, total=args.steps, loss="", speed="")

            def show(step: int, loss: float, speed: float | None, task: Any = task) -> None:
                shown = "" if speed is None else f"{speed:,.0f}"
                progress.update(task, completed=step, loss=f"{loss:.3f}", speed=shown)

            gc.collect()  # frees the last variant
            try:
                train(variant, show)
            except FloatingPointError as failure:
                raise SystemExit(f"{failure}: a smaller --lr may help") from failure


Results = dict[str, list[Any]]
"""Lists of dataclasses by field of the results file: "rows" of Row, "summary" of Summary, and an example's own."""


def record_variants(
    args: argparse.Namespace,
    facts: Mapping[str, Any],
    train: Callable[[str, Show], Results],
    conclude: Callable[[Results], dict[str, Any]],
    draw: Callable[[Results, Path, str], None],
) -> Results:
    """Train `args.variants` and write OUT.json and OUT.png after each.

    Args:
        facts: fields of OUT.json that describe the run.
        train: trains a variant and returns its results.
        conclude: further fields of OUT.json, such as "verdict", from all results so far.
        draw: writes OUT.png, given its path and the name of the device.
    """
    results: Results = {}
    out = args.out

    def train_and_write(variant: str, show: Show) -> None:
        for field, new in train(variant, show).items():
            results.setdefault(field, []).extend(new)
        conclusion = conclude(results)
        lists = {field: [asdict(each) for each in found] for field, found in results.items()}
        write_json(with_ending(out, ".json"), {**facts, **lists, **conclusion})
        draw(results, with_ending(out, ".png"), facts["device"])

    with replaced_results(out, ".png"):
        train_variants(args, train_and_write)
    return results


@contextmanager
def refusals() -> Iterator[None]:
    """Context that ends the program with the message of an error about its options."""
    try:
        yield
    except (TypeError, ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal


# The command line

Defaults = Mapping[str, tuple[int, int]]
"""Default integers by option, on the CPU and on GPUs, for a few seconds or a minute per variant."""

MODEL_OPTIONS = {
    "layers": "transformer blocks",
    "width": "width of the residual stream",
    "heads": "query heads",
    "kv_heads": "key/value heads",
    "context": "bytes per sequence, such as 8192 or 8K",
}
TRAINING_OPTIONS = {
    "steps": "training steps of each variant",
    "batch": "sequences per step",
    "eval_every": "steps between two evaluations",
    "eval_windows": "validation sequences, the same each time",
}


def add_numbers(group: Any, defaults: Defaults, options: Mapping[str, str]) -> None:
    """Add options that are positive integers, with defaults by device. `options`: meanings by name."""
    for name, meaning in options.items():
        cpu, gpu = defaults[name]
        shown = f"{meaning}; default: {gpu} (CPU: {cpu})"
        group.add_argument(f"--{name.replace('_', '-')}", type=positive, help=shown)


def new_parser(doc: str | None, backend: str) -> argparse.ArgumentParser:
    """A parser with --device and --backend. `doc` describes the example, `backend` is its op."""
    parser = make_parser(doc)
    add_device(parser)
    parser.add_argument("--backend", help=f"backend of {backend}; default: the first that supports it")
    return parser


def add_variants(
    parser: argparse.ArgumentParser, variants: Sequence[str], out: str, chosen: Sequence[str] | None = None
) -> None:
    """Add --variants and --out.

    Args:
        out: default name of the results.
        chosen: default variants. None: all.
    """

    def names(text: str) -> list[str]:
        named = list(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in named:
            if name not in variants:
                raise argparse.ArgumentTypeError(f"must be among {', '.join(variants)}, got {name!r}")
        return named

    shown = f"among {', '.join(variants)}; default: {'all' if chosen is None else ', '.join(chosen)}"
    parser.add_argument("--variants", type=names, default=list(chosen or variants), metavar="NAME,...", help=shown)
    add_out(parser, out)


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    shown = "results, without suffix; default: %(default)s"
    parser.add_argument("--out", type=Path, default=LOCAL_RESULTS / name, help=shown)


def add_training_options(parser: argparse.ArgumentParser, defaults: Defaults, **more: str) -> Any:
    """Add options of training and return their group. `more`: meanings of additional integer options."""
    group = parser.add_argument_group("training")
    add_numbers(group, defaults, {**TRAINING_OPTIONS, **more})
    group.add_argument("--minutes", type=above_zero, help="stop training a variant after this time; default: never")
    group.add_argument("--lr", type=above_zero, help="peak learning rate; default: 1e-3 (CPU: 4e-3)")
    group.add_argument("--dtype", choices=("bf16", "fp32"), help="dtype of autocast; default: bf16 (CPU: fp32)")
    group.add_argument("--seed", type=int, default=0, help="seed of weights and batches; default: %(default)s")
    group.add_argument("--compile", action="store_true", help="torch.compile the feed-forward layers")
    group.add_argument("--cuda-graph", action="store_true", help="run forward and backward of a step as one CUDA graph")
    return group


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


def check_output(parser: argparse.ArgumentParser, option: str, file: Path) -> None:
    """Create the folder of an option's file; exit if the file cannot be written."""
    try:
        if file.is_dir():
            raise IsADirectoryError(f"{file} is a folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as problem:
        parser.error(f"{option} must name a file that can be written: {problem}")


def check_length(corpus: Corpus, length: int, option: str = "--context") -> None:
    """Exit unless both texts have more than `length` bytes."""
    shortest = min(len(corpus.training), len(corpus.validation))
    if shortest < length + 1:
        raise SystemExit(f"{option} must be less than the {shortest:,} bytes of text here, got {length:,}")


def run_facts(args: argparse.Namespace, data: dict[str, Any], models: Mapping[str, ByteModel]) -> dict[str, Any]:
    """The fields of a results file that describe the run. `models`: by variant, on the meta device."""
    training = ("steps", "batch", "lr", "dtype", "seed", "minutes", "eval_windows", "compile", "cuda_graph")
    parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    return {
        **environment(torch.device(args.device)),
        "command": command_line(),
        "model": {**{name: getattr(args, name) for name in MODEL_OPTIONS}, "parameters": parameters},
        "training": {name: getattr(args, name) for name in training},
        "data": data,
    }


def introduce(args: argparse.Namespace, facts: Mapping[str, Any], more: str, notes: Iterable[str]) -> None:
    """Print what is about to run."""
    say(
        f"A byte-level language model of {max(facts['model']['parameters'].values()) / 1e6:.1f} M parameters "
        f"({args.layers} layers, width {args.width}, {args.heads} heads over {args.kv_heads}), context "
        f"{args.context:,}, {args.steps} steps of {args.batch * args.context:,} bytes, {args.dtype}, {more}, "
        f"on {facts['device']}"
    )
    for note in notes:
        say(note, style="yellow")


# What is shown


def show_results(
    summaries: Sequence[Any], columns: Mapping[str, Callable[[Any], str]], verdict: str, out: Path
) -> None:
    """Print summaries, what they say, and where they are. `columns`: texts of a summary by heading."""
    columns = {
        "variant": lambda s: s.variant,
        "val loss": lambda s: f"{s.final_val_loss:.4f}",
        **columns,
        "bytes/s": lambda s: "?" if s.tokens_per_s is None else f"{s.tokens_per_s:,.0f}",
        "peak GiB": lambda s: "" if s.peak_gib is None else f"{s.peak_gib:.2f}",
        "steps": lambda s: str(s.steps),
    }
    print_table("after the last step; loss in nats per byte", columns, summaries, left=("variant",))
    console.print(f"What this says: {verdict}")
    shown = [relative(with_ending(out, suffix)) for suffix in (".png", ".json")]
    say(f"Plot: {shown[0]}   everything: {shown[1]}")


def bits_per_byte(summary: Any) -> str:
    return f"{summary.bits_per_byte:.4f}"


@dataclass(frozen=True)
class Curves:
    """Style of loss curves."""

    baseline: str
    """Variant with which others are compared, if it was trained."""
    baseline_words: str
    style: Callable[[str], dict[str, Any]]
    """Keyword arguments of matplotlib's plot for a variant."""
    band: float = 0
    """Relative difference from the baseline's loss that counts as equal."""

    def draw(self, results: Results, path: Path, device: str) -> None:
        """Plot validation loss by bytes seen and, if the baseline was trained, the difference from it at each step."""
        by_name: dict[str, list[Row]] = {}
        for row in results["rows"]:
            by_name.setdefault(row.variant, []).append(row)
        baseline = {row.step: row.val_loss for row in by_name.get(self.baseline, [])}
        panels = 2 if baseline else 1
        with saved_figure(path, 1, panels, (6 * panels, 5)) as (figure, (panel,)):
            for name, curve in sorted(by_name.items(), key=lambda item: item[1][-1].val_loss, reverse=True):
                label, style = f"{name}  {curve[-1].val_loss:.3f}", self.style(name)
                panel[0].plot(
                    [row.tokens / 1e6 for row in curve], [row.val_loss for row in curve], label=label, **style
                )
                if shared := [row for row in curve if row.step in baseline]:
                    distances = [100 * (row.val_loss / baseline[row.step] - 1) for row in shared]
                    panel[1].plot([row.tokens / 1e6 for row in shared], distances, **style)
            # Without the steep first points, which would flatten the differences between variants
            finals = [curve[-1].val_loss for curve in by_name.values()]
            early = [curve[min(2, len(curve) - 1)].val_loss for curve in by_name.values()]
            panel[0].set_ylim(min(finals) * 0.97, max(early) * 1.03)
            panel[0].set(title="validation loss", ylabel="nats per byte")
            panel[0].legend(title="variant, final loss")
            if baseline:
                within = f" (band: within {self.band:.0%})" if self.band else ""
                panel[1].axhspan(-100 * self.band, 100 * self.band, color="black", alpha=0.06)
                panel[1].set(title=f"against {self.baseline_words}{within}", ylabel="%, above 0 is worse")
            for axes in panel:
                axes.set_xlabel("million bytes seen")
                axes.grid(alpha=0.3)
            figure.suptitle(f"Language models on the sources of the Python standard library, {device}")

"""Trains a byte-level language model on real text: dense attention, NSA, and NSA with branches taken away.

The text is what every machine has: the sources of the Python standard library, some files of it kept for validation.
All variants start from the same weights, as far as they share them, and see the same batches in the same order:

    dense           causal softmax attention over the whole context
    nsa             compressed, selected and window branch
    window          the window branch alone: what a model reaches without long-range attention
    no-compressed, no-selected, no-window    NSA without one branch

NSA has learned gates that dense attention lacks, and `window` keeps its own, so that it is as strong as it can be.

Selection per tile looks at all queries of a tile, later ones too. What a model gains from that is measured: for sampled
bytes the loss is computed again with everything behind them cut off (`lookahead`, the loss that this adds).

Writes OUT.json (schema: docs/architecture.md) and OUT.png after each variant.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, silu
from torch.utils.checkpoint import checkpoint

import dispatch
from bench.common import DTYPES, SDPA, Dense, choose_backend, choose_dense, nsa_facts, positive
from bench.inputs import Sizes
from bench.report import LOCAL_RESULTS, command_line, environment, relative, write_json
from bench.timing import GIB
from dispatch.device import device_types
from nsa import NSAConfig, NSAttention

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "nsa-kernels[bench]"') from error

BRANCHES = ("compressed", "selected", "window")
VARIANTS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "nsa": BRANCHES,
    "window": ("window",),
    "no-compressed": ("selected", "window"),
    "no-selected": ("compressed", "window"),
    "no-window": ("compressed", "selected"),
}
"""The branches of NSA that each variant has."""

DEFAULTS: dict[str, dict[str, int]] = {
    "cpu": {
        "steps": 120,
        "batch": 4,
        "context": 512,
        "layers": 2,
        "width": 96,
        "heads": 3,
        "kv_heads": 1,
        "block_size": 16,
        "k": 4,
        "w": 16,
        "q_tile": 64,
        "eval_every": 20,
        "eval_windows": 16,
        "cuts": 8,
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
        "k": 8,
        "w": 128,
        "q_tile": 256,
        "eval_every": 100,
        "eval_windows": 32,
        "cuts": 32,
    },
}
"""What depends on the device: a few seconds per variant on two CPU cores, a minute on an H200.

1600 steps of 32 KiB read 10 MB of sources five times; after that the models begin to know them by heart."""

VOCABULARY = 256
SEPARATOR = b"\0"
"""Stands between files, and in none of them."""
VALIDATION_SHARE = 20
"""One file in so many is kept for validation."""
NGRAM = 4
"""Bytes that one position's embedding is made of, itself included."""
ROPE_BASE = 10_000.0
WARM_STEPS = 3
"""First steps, which compile, and count for no speed."""
TOLERANCE = 0.02
"""A loss within this share of dense attention's counts as equal to it."""
TABLE_WIDTH = 100
"""Columns that the table may take where the terminal has fewer, or where there is none."""
console = Console()


# The text


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, uint8, and the files that they are made of, relative to the library's folder."""

    training: Tensor
    validation: Tensor
    training_files: tuple[str, ...]
    validation_files: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """Sizes and digests: equal ones say that two runs had the same text."""
        return {
            name: {"files": len(files), "bytes": len(text), "sha256": hashlib.sha256(text.numpy().data).hexdigest()}
            for name, files, text in (
                ("training", self.training_files, self.training),
                ("validation", self.validation_files, self.validation),
            )
        }


def load_corpus(folder: Path) -> Corpus:
    """All Python sources below `folder` but installed packages, in the order of their paths.

    A file's path alone decides whether it is for validation. Of files with the same content only the first counts, so
    that no validation text was trained on.
    """
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    names: dict[bool, list[str]] = {True: [], False: []}
    seen: set[bytes] = set()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if {"site-packages", "dist-packages"} & set(path.parts) or not path.is_file():
            continue
        content = path.read_bytes().replace(SEPARATOR, b"").strip()
        if not content or content in seen:
            continue
        seen.add(content)
        held_out = zlib.crc32(name.encode()) % VALIDATION_SHARE == 0
        parts[held_out].append(content + b"\n" + SEPARATOR)
        names[held_out].append(name)
    training, validation = (
        torch.frombuffer(bytearray(b"".join(parts[held_out]) or SEPARATOR), dtype=torch.uint8)
        for held_out in (False, True)
    )
    return Corpus(training, validation, tuple(names[False]), tuple(names[True]))


def take(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Windows of the text `[len(starts), length]`, as int64."""
    return text[starts[:, None] + torch.arange(length, device=text.device)].long()


def training_starts(corpus: Corpus, steps: int, batch: int, context: int, seed: int) -> Tensor:
    """Where the windows of every step begin, `[steps, batch]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(corpus.training) - context, (steps, batch), generator=generator)


def validation_starts(corpus: Corpus, windows: int, context: int) -> Tensor:
    """Evenly spaced windows that do not overlap: as many as asked for, or as the text has."""
    windows = min(windows, (len(corpus.validation) - 1) // context)
    return torch.arange(windows) * ((len(corpus.validation) - 1) // max(windows, 1))


# The model


def rotary_table(tokens: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary position embeddings, `[tokens, 1, D/2]`."""
    frequencies = ROPE_BASE ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angles = torch.arange(tokens, device=device)[:, None, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(tensor: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """The `rope` hook: `[B,N,heads,D]` rotated in fp32, and back in its own dtype, which autocast chose."""
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


def close_compressed(_projection: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
    """Forward hook of a gate projection: the compressed branch weighs sigmoid(-inf) = 0 and still scores blocks."""
    per_head: Tensor = logits.unflatten(-1, (-1, len(BRANCHES)))
    compressed = torch.arange(len(BRANCHES), device=logits.device) == BRANCHES.index("compressed")
    return per_head.masked_fill(compressed, -math.inf).flatten(-2)


def variant_config(variant: str, config: NSAConfig) -> NSAConfig:
    """`config` without the selected or the window branch, where the variant has none."""
    if "selected" not in VARIANTS[variant]:
        config = replace(config, num_selected_blocks=0, num_init_blocks=0, num_local_blocks=0)
    return config if "window" in VARIANTS[variant] else replace(config, window_size=0)


def make_attention(
    variant: str, width: int, heads: int, kv_heads: int, *, config: NSAConfig, dense: Dense, backend: str | None
) -> NSAttention:
    if variant == "dense":
        return DenseAttention(width, heads, kv_heads, dense)
    config = variant_config(variant, config)
    attention = NSAttention(width, heads, kv_heads, config=config, gate="x", rope=rotate, backend=backend)
    if "compressed" not in VARIANTS[variant] and attention.gate_proj is not None:
        attention.gate_proj.register_forward_hook(close_compressed)
    return attention


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

    def forward(self, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden), table)
        out: Tensor = hidden + self.feed_forward(hidden)
        return out


class NgramEmbedding(nn.Module):
    """Sum of embeddings of a byte and of the few before it, so that a position says more than one letter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(NGRAM))

    def forward(self, tokens: Tensor) -> Tensor:
        before = pad(tokens, [NGRAM - 1, 0], value=SEPARATOR[0])
        shifted = (before[:, NGRAM - 1 - back : before.shape[1] - back] for back in range(NGRAM))
        return torch.stack([table(some) for table, some in zip(self.tables, shifted, strict=True)]).sum(0)


class ByteModel(nn.Module):
    """Logits of the next byte, `[B,N,256]`, for bytes `[B,N]`."""

    def __init__(self, layers: int, width: int, attention: Callable[[], NSAttention], *, checkpointing: bool) -> None:
        super().__init__()
        self.embed = NgramEmbedding(width)
        self.blocks = nn.ModuleList(Block(attention(), width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        table = rotary_table(tokens.shape[1], self.head_dim, tokens.device)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, table, use_reentrant=False)
            else:
                hidden = block(hidden, table)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    @property
    def head_dim(self) -> int:
        dim: int = self.blocks[0].attention.head_dim  # type: ignore[union-attr, assignment]
        return dim

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Values that depend on the seed and a parameter's own name: what variants share starts equal."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            deep = name.endswith(("o_proj.weight", "down.weight"))
            scale = 1 / math.sqrt(parameter.shape[-1] * (2 * len(self.blocks) if deep else 1))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def make_model(variant: str, args: argparse.Namespace) -> ByteModel:
    """Without values of its own choice: `ByteModel.initialise` comes after."""

    def attention() -> NSAttention:
        return make_attention(
            variant,
            args.width,
            args.heads,
            args.kv_heads,
            config=args.config,
            dense=args.dense,
            backend=args.backends[variant],
        )

    return ByteModel(args.layers, args.width, attention, checkpointing=args.checkpointing)


def count_parameters(variant: str, args: argparse.Namespace) -> int:
    with torch.device("meta"):  # sizes, no values
        return sum(parameter.numel() for parameter in make_model(variant, args).parameters())


# Training


@dataclass(frozen=True)
class Row:
    """A point of a loss curve, in nats per byte. train_loss: mean since the row before; None before the first step."""

    variant: str
    step: int
    tokens: int
    train_loss: float | None
    val_loss: float


@dataclass(frozen=True)
class Summary:
    """What a variant came to. `relative_to_dense`: final loss over dense attention's, where both did the same steps."""

    variant: str
    steps: int
    final_val_loss: float
    bits_per_byte: float
    relative_to_dense: float | None
    lookahead: float | None
    """Loss that cutting off the bytes behind the predicted one adds, where selection is per tile; else None."""
    lookahead_error: float | None
    """Its standard error over the sampled bytes."""
    tokens_per_s: float | None
    peak_gib: float | None


class Trainer:
    """One variant on one device: its model, its optimiser, and the windows it is judged by."""

    def __init__(self, variant: str, args: argparse.Namespace, corpus: Corpus) -> None:
        self.variant, self.args, self.device = variant, args, torch.device(args.device)
        self.training = corpus.training.to(self.device)
        self.starts = training_starts(corpus, args.steps, args.batch, args.context, args.seed).to(self.device)
        held_out = validation_starts(corpus, args.eval_windows, args.context).to(self.device)
        self.validation = take(corpus.validation.to(self.device), held_out, args.context + 1)
        self.model = make_model(variant, args)
        self.model.initialise(args.seed)
        self.model.to(self.device)
        if args.compile:  # the attention between them is not one graph
            for block in self.model.blocks:
                block.feed_forward.compile()  # type: ignore[union-attr]
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=self.device.type == "cuda")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.learning_rate)

    def learning_rate(self, step: int) -> float:
        """Share of the peak: a linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
        warmup = max(1, self.args.steps // 10)
        done = (step - warmup) / max(1, self.args.steps - warmup)
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))
        return float((step + 1) / warmup if step < warmup else cosine)

    def losses(self, windows: Tensor) -> Tensor:
        """Nats of each byte but the first, `[B, length - 1]`."""
        dtype = DTYPES[self.args.dtype]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            logits = self.model(windows[:, :-1])
        flat = cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
        return flat.view(len(windows), -1)

    def step(self, step: int) -> float:
        """One update; the loss before it. Reading the loss waits for the device, so a step's time is its own.

        Raises:
            FloatingPointError: when the loss is not finite.
        """
        loss = self.losses(take(self.training, self.starts[step], self.args.context + 1)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"{self.variant}: the loss is {value} at step {step}")
        return value

    @torch.no_grad()
    def evaluate(self) -> float:
        losses = torch.cat([self.losses(part) for part in self.validation.split(self.args.batch)])
        return float(losses.mean())

    @torch.no_grad()
    def lookahead(self, cuts: list[int]) -> tuple[float, float]:
        """Nats that predictions lose when the text is cut off behind each of these positions: mean, standard error."""
        added = []
        for part in self.validation.split(self.args.batch):
            whole = self.losses(part)
            added += [self.losses(part[:, : cut + 2])[:, cut] - whole[:, cut] for cut in cuts]
        samples = torch.cat(added).double()
        return samples.mean().item(), (samples.std() / math.sqrt(len(samples))).item()

    def looks_ahead(self) -> bool:
        return "selected" in VARIANTS[self.variant] and not self.args.config.token_mode

    def run(self, show: Callable[[int, float, float | None], None]) -> tuple[list[Row], Summary]:
        """Train and evaluate; `show(step, loss, tokens per second)` after each step."""
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
        final = rows[-1]
        added = error = None
        if self.looks_ahead():
            generator = torch.Generator().manual_seed(args.seed)
            added, error = self.lookahead(torch.randperm(args.context, generator=generator)[: args.cuts].tolist())
        bits = final.val_loss / math.log(2)
        return rows, Summary(self.variant, final.step, final.val_loss, bits, None, added, error, speed, peak_gib)


def relate(summaries: list[Summary]) -> list[Summary]:
    """The summaries with each final loss related to that of dense attention."""
    dense = next((s for s in summaries if s.variant == "dense"), None)
    if dense is None:
        return summaries
    return [
        replace(s, relative_to_dense=s.final_val_loss / dense.final_val_loss if s.steps == dense.steps else None)
        for s in summaries
    ]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    corpus = load_corpus(Path(sysconfig.get_path("stdlib")))
    shortest = min(len(corpus.training), len(corpus.validation))
    if shortest < args.context + 1:
        raise SystemExit(f"--context must be less than the {shortest:,} bytes of text here, got {args.context:,}")
    try:
        notes = resolve(args)
    except (TypeError, ValueError, dispatch.BackendError) as refusal:
        raise SystemExit(str(refusal)) from refusal

    content = facts(args, corpus)
    console.print(
        f"[bold]A byte-level language model[/bold] of {max(content['model']['parameters'].values()) / 1e6:.1f} M "
        f"parameters ({args.layers} layers, width {args.width}, {args.heads} heads over {args.kv_heads}), context "
        f"{args.context:,}, {args.steps} steps of {args.batch * args.context:,} bytes, {args.dtype}, dense attention "
        f"by {args.dense.name}, on {content['device']}",
        soft_wrap=True,
    )
    for note in notes:
        console.print(note, style="yellow", markup=False)
    rows: list[Row] = []
    summaries: list[Summary] = []
    out = Path(args.out)
    columns = ("{task.description}", "loss {task.fields[loss]}", "{task.fields[speed]} bytes/s")
    name, loss_column, speed_column = (TextColumn(column) for column in columns)
    bar = (BarColumn(), MofNCompleteColumn(), loss_column, speed_column, TimeRemainingColumn())
    with Progress(name, *bar, console=console, transient=True) as progress:
        for variant in args.variants:
            task = progress.add_task(variant, total=args.steps, loss="", speed="")

            def show(step: int, loss: float, speed: float | None, task: Any = task) -> None:
                shown = "" if speed is None else f"{speed:,.0f}"
                progress.update(task, completed=step, loss=f"{loss:.3f}", speed=shown)

            gc.collect()  # the variant before
            try:
                own, summary = Trainer(variant, args, corpus).run(show)
            except FloatingPointError as failure:
                raise SystemExit(f"{failure}: a smaller --lr may help") from failure
            rows += own
            summaries = relate([*summaries, summary])
            content |= {
                "rows": [asdict(row) for row in rows],
                "summary": [asdict(summary) for summary in summaries],
                "verdict": verdict(summaries),
            }
            write_json(out.with_suffix(".json"), content)
            plot(rows, out.with_suffix(".png"), content["device"])
    print_summary(summaries, out)
    return 0


def resolve(args: argparse.Namespace) -> list[str]:
    """Set `args.dense` and `args.backends`, by variant; say where that is the reference for want of a kernel.

    Raises:
        ValueError, dispatch.BackendError: for a backend asked for by name that cannot run a variant.
    """
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    args.dense = choose_dense(device, dtype) if args.flash else SDPA
    args.backends = dict.fromkeys(args.variants)
    notes: dict[str, None] = {}
    sizes = Sizes(args.batch, args.context, args.heads, args.kv_heads, args.width // args.heads)
    for variant in args.variants:
        if variant == "dense":
            continue
        call = nsa_facts(sizes, variant_config(variant, args.config), device, dtype, backward=True)
        args.backends[variant], note = choose_backend(call, args.backend)
        if note:
            notes[note] = None
    return list(notes)


def facts(args: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """What the results file says about the run beside its results."""
    training = ("steps", "batch", "lr", "dtype", "seed", "minutes", "eval_windows", "checkpointing", "compile")
    model = {name: getattr(args, name) for name in ("layers", "width", "heads", "kv_heads", "context")}
    parameters = {variant: count_parameters(variant, args) for variant in args.variants}
    return {
        **environment(torch.device(args.device)),
        "command": command_line(),
        "model": {**model, "parameters": parameters},
        "training": {name: getattr(args, name) for name in training},
        "data": corpus.facts(),
        "variants": {variant: describe(variant, args) for variant in args.variants},
    }


def describe(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    if variant == "dense":
        return {"attention": args.dense.name}
    config = asdict(variant_config(variant, args.config))
    return {"attention": "NSA", "branches": VARIANTS[variant], "backend": args.backends[variant], "config": config}


# The command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", type=_variants, default=list(VARIANTS), metavar="NAME,...", help="default: all of them")
    add("--device", choices=device_types(), default=device_types()[0], help="default: %(default)s")
    add("--backend", help="of NSA, as in nsa; default: the first that can run")
    add(
        "--flash", action="store_true", help="dense attention by FlashAttention-4 where it is installed, not by PyTorch"
    )
    add("--out", default=str(LOCAL_RESULTS / "train"), help="results, without suffix; default: %(default)s")
    group = parser.add_argument_group("model")
    for name, meaning in (
        ("layers", "transformer blocks"),
        ("width", "of the residual stream"),
        ("heads", "query heads"),
        ("kv-heads", "key/value heads"),
        ("context", "bytes per sequence, such as 8192 or 8K"),
    ):
        group.add_argument(f"--{name}", type=positive, help=_help(meaning, name))
    group = parser.add_argument_group("options of NSA (see NSAConfig)")
    for name, meaning in (
        ("block-size", "compress_block_size and select_block_size"),
        ("k", "num_selected_blocks"),
        ("w", "window_size"),
        ("q-tile", "q_tile_size"),
    ):
        group.add_argument(f"--{name}", type=positive, help=_help(meaning, name))
    group.add_argument("--init-blocks", type=int, default=1, help="num_init_blocks; default: %(default)s")
    group.add_argument("--local-blocks", type=int, default=1, help="num_local_blocks; default: %(default)s")
    group = parser.add_argument_group("training")
    for name, meaning in (
        ("steps", "updates of each variant"),
        ("batch", "sequences per step"),
        ("eval-every", "steps between two evaluations"),
        ("eval-windows", "validation sequences, the same each time"),
        ("cuts", "places per validation sequence at which the lookahead is measured"),
    ):
        group.add_argument(f"--{name}", type=positive, help=_help(meaning, name))
    group.add_argument("--minutes", type=float, help="stop a variant after so much training; default: never")
    group.add_argument("--lr", type=float, help="peak learning rate; default: 1e-3 (CPU: 4e-3)")
    group.add_argument("--dtype", choices=("bf16", "fp32"), help="of autocast; default: bf16 (CPU: fp32)")
    group.add_argument("--seed", type=int, default=0, help="of weights and batches; default: %(default)s")
    group.add_argument("--checkpointing", action="store_true", help="keep block inputs only, and recompute in backward")
    group.add_argument("--compile", action="store_true", help="torch.compile the feed-forward layers")
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    for name, value in DEFAULTS["cpu" if on_cpu else "cuda"].items():
        setattr(args, name, getattr(args, name) or value)
    args.lr = (4e-3 if on_cpu else 1e-3) if args.lr is None else args.lr
    args.dtype = args.dtype or ("fp32" if on_cpu else "bf16")
    check(parser, args)
    return args


def _help(meaning: str, name: str) -> str:
    key = name.replace("-", "_")
    return f"{meaning}; default: {DEFAULTS['cuda'][key]} (CPU: {DEFAULTS['cpu'][key]})"


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set `args.config`, or end with what is wrong with the arguments."""
    if args.width % args.heads or args.width // args.heads % 2:
        parser.error(f"--width must be a multiple of 2 * --heads, got {args.width} and {args.heads}")
    if args.heads % args.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads, got {args.heads} and {args.kv_heads}")
    if args.k * args.block_size >= args.context:
        parser.error(
            f"--context must hold more than --k blocks of --block-size, or nothing is left to select: "
            f"got {args.context}, {args.k} and {args.block_size}"
        )
    if args.cuts > args.context:
        parser.error(f"--cuts must be at most --context, got {args.cuts} and {args.context}")
    for name in ("lr", "minutes"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            parser.error(f"--{name} must be greater than 0, got {value}")
    try:
        args.config = NSAConfig.seed(
            compress_block_size=args.block_size,
            num_selected_blocks=args.k,
            window_size=args.w,
            q_tile_size=args.q_tile,
            num_init_blocks=args.init_blocks,
            num_local_blocks=args.local_blocks,
        )
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def _variants(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(f"must be among {', '.join(VARIANTS)}, got {name!r}")
    return names


# What is shown


def verdict(summaries: list[Summary]) -> str:
    """What the losses say about NSA, with what speaks against it."""
    by_name = {summary.variant: summary for summary in summaries}
    nsa, dense, window = (by_name.get(name) for name in ("nsa", "dense", "window"))
    if nsa is None:
        return "NSA itself was not trained, so there is nothing to conclude about it."
    sentences = []
    for other, name in ((dense, "dense attention"), (window, "the window-only control")):
        if other is None:
            continue
        if other.steps != nsa.steps:
            sentences.append(f"NSA and {name} did {nsa.steps} and {other.steps} steps, so they are not compared.")
            continue
        share = nsa.final_val_loss / other.final_val_loss - 1
        place = f"{abs(share):.1%} {'below' if share < 0 else 'above'}"
        if other is dense:
            answer = "within" if abs(share) <= TOLERANCE else "better than" if share < 0 else "not within"
            sentences.append(f"NSA's final validation loss is {place} that of {name}: {answer} {TOLERANCE:.0%}.")
        else:
            answer = "better" if share < 0 else "not better"
            sentences.append(f"It is {place} that of {name}: {answer}.")
    if nsa.lookahead is not None and nsa.lookahead_error is not None:
        sentences.append(
            f"Cutting off the bytes behind the predicted one, which selection per tile looks at, changes NSA's loss by "
            f"{nsa.lookahead / nsa.final_val_loss:+.1%} ± {nsa.lookahead_error / nsa.final_val_loss:.1%}."
        )
    return " ".join([*sentences, "One seed each: small differences may be noise."])


def print_summary(summaries: list[Summary], out: Path) -> None:
    table = Table(title="after the last step; loss in nats per byte", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("variant")
    for heading in ("val loss", "bits/byte", "vs dense", "lookahead", "bytes/s", "peak GiB", "steps"):
        table.add_column(heading, justify="right")
    for s in summaries:
        distance = "" if s.relative_to_dense is None else f"{s.relative_to_dense - 1:+.1%}"
        added = "" if s.lookahead is None else f"{s.lookahead:+.4f} ± {s.lookahead_error:.4f}"
        speed = "?" if s.tokens_per_s is None else f"{s.tokens_per_s:,.0f}"
        memory = "?" if s.peak_gib is None else f"{s.peak_gib:.2f}"
        losses = (f"{s.final_val_loss:.4f}", f"{s.bits_per_byte:.4f}")
        table.add_row(s.variant, *losses, distance, added, speed, memory, str(s.steps))
    Console(width=max(console.width, TABLE_WIDTH)).print(table)
    console.print(f"What this says: {verdict(summaries)}")
    shown = [relative(out.with_suffix(suffix)) for suffix in (".png", ".json")]
    console.print(f"Plot: {shown[0]}   everything: {shown[1]}", soft_wrap=True)


def plot(rows: list[Row], path: Path, device: str) -> None:
    """Validation loss by bytes seen; beside it, if dense attention is there, the distance from it at each step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    curves = {name: [row for row in rows if row.variant == name] for name in dict.fromkeys(row.variant for row in rows)}
    dense = {row.step: row.val_loss for row in curves.get("dense", [])}
    panels = 2 if dense else 1
    figure, panel = plt.subplots(1, panels, figsize=(6 * panels, 5), layout="constrained", squeeze=False)
    for name, curve in sorted(curves.items(), key=lambda item: item[1][-1].val_loss, reverse=True):
        drawn: dict[str, Any] = {
            "color": "black" if name == "dense" else f"C{list(VARIANTS).index(name) - 1}",
            "linestyle": "--" if name.startswith("no-") else "-",
            "linewidth": 2 if name in ("dense", "nsa") else 1.4,
        }
        final = f"{name}  {curve[-1].val_loss:.3f}"
        panel[0, 0].plot([row.tokens / 1e6 for row in curve], [row.val_loss for row in curve], label=final, **drawn)
        shared = [row for row in curve if row.step in dense]
        if shared:
            distances = [100 * (row.val_loss / dense[row.step] - 1) for row in shared]
            panel[0, 1].plot([row.tokens / 1e6 for row in shared], distances, **drawn)
    # The fall from the start would flatten what the variants differ in.
    finals = [curve[-1].val_loss for curve in curves.values()]
    early = [curve[min(2, len(curve) - 1)].val_loss for curve in curves.values()]
    panel[0, 0].set_ylim(min(finals) * 0.97, max(early) * 1.03)
    panel[0, 0].set(title="validation loss", ylabel="nats per byte")
    panel[0, 0].legend(title="variant, final loss")
    if dense:
        panel[0, 1].axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color="black", alpha=0.06)
        panel[0, 1].set(title=f"against dense attention (band: within {TOLERANCE:.0%})", ylabel="%, above 0 is worse")
    for axes in panel[0]:
        axes.set_xlabel("million bytes seen")
        axes.grid(alpha=0.3)
    figure.suptitle(f"Language models on the sources of the Python standard library, {device}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())

"""A long run of training steps with NSA, to see what only shows with time.

A tiny model whose layers select per tile and per token in turn learns a random walk; every step has another size:
sequences of another length, or packed documents of other lengths (empty ones too). First, steps that change no weight
meet every kind of size, which compiles all kernels. From then on every --every seconds are recorded: loss, tokens a
second, memory of the device and of this process, kernels compiled since. A run passes where all losses and gradients
were finite, nothing was compiled, and memory was no larger in its second half than in its first (the allocator's and
the process's own: by 1/16, since both keep pieces). Where the environment says nothing of PyTorch's allocator, it gets
expandable segments: without them it keeps, for ever other sizes, ever more pieces that fit none.

The results go to OUT.json (schema: docs/results_files.md) at every record.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import sub, truediv
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__" and os.environ.keys().isdisjoint(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # read where torch is imported

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.bars import Bar
from bench.common import above_zero, add_device, make_parser, parse_args, positive, with_ending
from bench.report import LOCAL_RESULTS, environment, relative, write_json
from bench.results_file import Row, replaced_results
from bench.show import console, say, show_bars
from bench.timing import resident
from nsa import NSAConfig, NSAttention

MIB = 2**20
VOCABULARY = 64
STRIDES = 3  # The walk goes on by 1 to so many, so no loss is far below log(STRIDES)
MANY_DOCUMENTS = 300
"""More than those for which kernels look bounds up themselves (cute_kernels.fa4.kernels.FEW_DOCUMENTS)."""
FEWEST_RECORDS = 4  # Least number of records in a run whose halves are compared
KEPT = 1 + 1 / 16  # Largest ratio of an allocator's memory in the second half to the first


@dataclass(frozen=True)
class Sizes:
    width: int
    heads: int
    kv_heads: int
    pairs: int  # Pairs of layers: one selects per tile, one per token
    tokens: int  # Most of one step
    tile: NSAConfig
    token: NSAConfig


GPU_TILE = NSAConfig.per_tile(num_selected_blocks=8, window_size=256)
GPU_TOKEN = NSAConfig.paper(num_selected_blocks=8, window_size=256)
CPU_TILE = NSAConfig.per_tile(compress_block_size=8, num_selected_blocks=3, window_size=12, q_tile_size=16)
CPU_TOKEN = NSAConfig.paper(
    compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4, window_size=12
)
SIZES = {
    "cuda": Sizes(width=256, heads=4, kv_heads=2, pairs=2, tokens=16384, tile=GPU_TILE, token=GPU_TOKEN),
    "cpu": Sizes(width=16, heads=2, kv_heads=1, pairs=1, tokens=28, tile=CPU_TILE, token=CPU_TOKEN),
}
"""By device. Head dim 64 on a GPU."""


class Model(nn.Module):
    """Logits of the next symbol of `[B,N]`, or of `[T]` with the bounds of documents."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        configs = (sizes.tile, sizes.token) * sizes.pairs
        heads = sizes.width, sizes.heads, sizes.kv_heads
        self.embed = nn.Embedding(VOCABULARY, sizes.width)
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.width) for _ in configs)
        self.layers = nn.ModuleList(NSAttention(*heads, config=config) for config in configs)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, symbols: Tensor, bounds: Tensor | None) -> Tensor:
        hidden = self.embed(symbols)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = hidden + layer(norm(hidden), cu_seqlens=bounds)
        logits: Tensor = self.head(hidden)
        return logits


# What a step works on


@dataclass(frozen=True)
class Work:
    """Sizes of a step: `batch` sequences of `lengths[0]`, or, with `batch=None`, packed documents and `tail` rows."""

    lengths: tuple[int, ...]
    batch: int | None = None
    tail: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths) * (self.batch or 1) + self.tail


def every_kind(sizes: Sizes) -> Iterator[Work]:
    """The largest first.

    Kernels are chosen by sizes below some, or up to one tile, which are round numbers: of tokens, and of a layer's
    compressed entries.
    """
    most = sizes.tokens
    powers = [1 << power for power in range(most.bit_length())]
    round_numbers = {min(most, mantissa * power) for mantissa in (4, 5, 6, 7) for power in powers}
    lengths = {1, 2, 3, *round_numbers, *(n + 1 for n in round_numbers)}
    for config in (sizes.tile, sizes.token):
        entries = {*powers, *(n + 1 for n in powers)}
        lengths |= {config.compress_block_size + (n - 1) * config.stride for n in entries}
    lengths = {n for n in lengths if n <= most}
    for length in sorted(lengths, reverse=True):
        yield Work((length,), batch=1)
        yield Work((length,))
        if 2 * length <= most:
            yield Work((length,), batch=2)
            yield Work((length, 0, length), tail=min(3, most - 2 * length))
    yield Work(tuple(i % 7 for i in range(min(most // 7, 2 * MANY_DOCUMENTS))))


def draw(seed: int, step: int, most: int) -> Work:
    """Sequences and packs in turn; all sizes log-uniform."""
    generator = random.Random(f"{seed} {step}")

    def length(longest: int) -> int:
        return round(math.exp(generator.uniform(0, math.log(longest))))

    if step % 2 == 0:
        tokens = length(most)
        return Work((tokens,), batch=min(length(8), most // tokens))
    tokens, longest = length(most), length(most)
    lengths: list[int] = []
    while (rest := tokens - sum(lengths)) > 0 and len(lengths) < 2 * MANY_DOCUMENTS:
        lengths.append(generator.choice([0, min(rest, length(longest))]))
    return Work(tuple(lengths), tail=min(generator.randrange(4), most - sum(lengths)))


def symbols_of(work: Work, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
    """A random walk, its next symbols, and the bounds of documents."""
    rows = 1 if work.batch is None else work.batch
    strides = torch.randint(1, STRIDES + 1, (rows, work.tokens // rows + 1), generator=generator)
    walk = strides.cumsum(1) % VOCABULARY
    if work.batch is not None:
        return walk[:, :-1], walk[:, 1:], None
    return walk[0, :-1], walk[0, 1:], torch.tensor([0, *accumulate(work.lengths)], dtype=torch.int32)


# Training


class Trainer:
    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed, self.step = device, seed, 0
        self.sizes = SIZES[device.type]
        torch.manual_seed(seed)
        self.model = Model(self.sizes).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def gradients(self, work: Work, number: int) -> Tensor:
        """Loss and norm of all gradients `[2]`, which are left in the parameters. `number` seeds the symbols."""
        generator = torch.Generator().manual_seed(self.seed + number)
        symbols, following, bounds = symbols_of(work, generator)
        symbols, following = symbols.to(self.device), following.to(self.device)
        bounds = None if bounds is None else bounds.to(self.device)
        autocast = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with autocast:
            logits = self.model(symbols, bounds)
        loss = cross_entropy(logits.float().flatten(0, -2), following.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return torch.stack([loss.detach(), norm.detach()])

    def train(self) -> tuple[Work, Tensor]:
        """One step: what it worked on, and its loss and norm."""
        work = draw(self.seed, self.step, self.sizes.tokens)
        result = self.gradients(work, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return work, result


# The record


def num_compiled(device: torch.device) -> int | None:
    """Number of kernels that this process has waited for: compiled, or found on disk; None on a CPU."""
    if device.type == "cpu":
        return None
    from cute_kernels.runtime import jit

    return jit.num_compiled()


def expandable_segments(device: torch.device) -> bool | None:
    """True if all memory that PyTorch's allocator holds on the device is in such segments; None on a CPU."""
    if device.type == "cpu":
        return None
    return all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


class Watch:
    """The record of a run.

    `late` are steps that compiled kernels although the first steps had every kind of size; `records` have loss and
    tokens per second since the record before, whose time, steps and tokens are `since`, and memory between steps.
    `sums` are the sum of losses that are finite, and the number of steps whose result was not, since then.
    """

    def __init__(self, device: torch.device, warm_up_s: float) -> None:
        self.device, self.warm_up_s = device, warm_up_s
        self.warm_up_compiled = self.compiled = num_compiled(device)
        self.expandable_segments = expandable_segments(device)
        self.begin = time.perf_counter()
        self.steps = self.tokens = self.not_finite = 0
        self.late: list[Row] = []
        self.records: list[Row] = []
        self.since = (self.begin, 0, 0)
        self.sums = torch.zeros(2, device=device)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def saw(self, work: Work, result: Tensor) -> None:
        """Note a step; nothing here waits for the device."""
        finite = result.isfinite().all()
        self.sums += torch.stack([result[0].where(finite, 0), (~finite).float()])
        compiled = num_compiled(self.device)
        if compiled is not None and self.compiled is not None and compiled > self.compiled:
            self.late.append({"step": self.steps, "work": asdict(work), "kernels": compiled - self.compiled})
        self.compiled = compiled
        self.steps += 1
        self.tokens += work.tokens

    def record(self) -> None:
        """Add a record, unless there was no step since the last."""
        if self.steps == self.since[1]:
            return
        losses, not_finite = self.sums.tolist()
        self.sums.zero_()
        self.not_finite += int(not_finite)
        now, (before, steps, tokens) = time.perf_counter(), self.since
        record: Row = {"step": self.steps, "seconds": round(now - self.begin, 1)}
        record |= {"loss": round(losses / max(1, self.steps - steps - not_finite), 4)}
        record |= {"tokens_per_s": round((self.tokens - tokens) / (now - before)), **self.memory()}
        new = None if self.warm_up_compiled is None else (self.compiled or 0) - self.warm_up_compiled
        self.records.append({**record, "compiled": new})
        self.since = (now, self.steps, self.tokens)

    def memory(self) -> dict[str, float | None]:
        """MiB in use on the device, held by its allocator, and of this process; None if they cannot be known."""
        own = round(resident("VmRSS") / MIB, 1) if sys.platform.startswith("linux") else None
        held: tuple[float | None, float | None] = None, None
        if self.device.type != "cpu":
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() / MIB, torch.cuda.memory_reserved() / MIB
        return {"allocated_mib": held[0], "reserved_mib": held[1], "resident_mib": own}

    def run(self) -> Row:
        """Everything so far; minutes without the first steps, which compile."""
        run: Row = {"steps": self.steps, "tokens": self.tokens, "not_finite": self.not_finite}
        run |= {"minutes": round(self.seconds / 60, 2), "expandable_segments": self.expandable_segments}
        run |= {"warm_up_s": round(self.warm_up_s, 1), "warm_up_compiled": self.warm_up_compiled}
        return {**run, "late": self.late, "records": self.records}


def bars(run: Row) -> list[Bar]:
    """Bars of a run; memory is that of the second half of its records against the first."""
    records = run["records"]
    halves = "second half of a run against its first"

    def memory(name: str, compare: Callable[[float, float], float]) -> float | None:
        values = [record[name] for record in records]
        if len(values) < FEWEST_RECORDS or None in values:
            return None
        half = len(values) // 2
        return compare(max(values[half:]), max(values[:half]))

    in_use, kept, own = (
        memory(name, compare)
        for name, compare in (("allocated_mib", sub), ("reserved_mib", truediv), ("resident_mib", truediv))
    )
    return [
        Bar("steps with a loss or gradient that is not finite", run["not_finite"], 0, False),
        Bar("kernels compiled, or found on disk, after the first steps", records[-1]["compiled"], 0, False),
        Bar(f"device memory in use, {halves}", in_use, 1, False, " MiB more"),
        Bar(f"device memory kept by the allocator, {halves}", kept, KEPT, False, "x"),
        Bar(f"memory of the process, {halves}", own, KEPT, False, "x"),
    ]


def main(argv: list[str] | None = None) -> int:
    begin = time.perf_counter()
    args = parse(argv)
    device, out = torch.device(args.device), Path(args.out)
    facts = environment(device)
    with replaced_results(out):
        trainer, start = Trainer(device, args.seed), time.perf_counter()
        with console.status("First steps, of every kind of size ..."):
            for work in every_kind(trainer.sizes):
                trainer.gradients(work, 0)
            trainer.optimizer.zero_grad(set_to_none=True)
        watch = Watch(device, time.perf_counter() - start)

        def save() -> list[Bar]:
            watch.record()
            run = watch.run()
            found = bars(run)
            totals = {name: run[name] for name in ("minutes", "steps", "tokens")}
            shared = {**facts, "command": args.command, "seed": args.seed, "sizes": asdict(trainer.sizes), **totals}
            content = {**shared, "bars": [bar.as_json() for bar in found], "runs": [run]}
            write_json(with_ending(out, ".json"), content)
            return found

        train(trainer, watch, save, begin + 60 * args.minutes, args.steps, args.every)
        found = save()
    text = "{steps:,} steps, {tokens:,} tokens in {minutes:g} minutes, after {warm_up_s:g} s of first steps"
    say(text.format(**watch.run()))
    show_bars(found)
    say(f"Everything: {relative(with_ending(out, '.json'))}")
    return int(any(bar.verdict == "FAIL" for bar in found))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.allow_abbrev = False
    add_device(parser, *SIZES)
    add = parser.add_argument
    add("--minutes", type=above_zero, default=30.0, help="of this run, compiling included; default: %(default)g")
    add("--steps", type=positive, help="end this run after so many steps, if that is earlier")
    add("--every", type=above_zero, default=10.0, metavar="SECONDS", help="between records; default: %(default)g")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--out", metavar="FILE", help="results, without suffix; default: bench/results/local/soak-<device>")
    args = parse_args(parser, argv)
    args.out = args.out or str(LOCAL_RESULTS / f"soak-{args.device}")
    return args


def train(
    trainer: Trainer, watch: Watch, save: Callable[[], Any], until: float, most_steps: int | None, every: float
) -> None:
    """Train for at least one step. Args: until: by time.perf_counter()."""
    with console.status("") as status:
        now = 0.0
        while not watch.steps or (now < until and watch.steps != most_steps):
            watch.saw(*trainer.train())
            now = time.perf_counter()
            if now - watch.since[0] >= every:
                save()
                loss, seconds = watch.records[-1]["loss"], f"{watch.seconds:,.0f} of {until - watch.begin:,.0f} s"
                status.update(f"{seconds}, step {watch.steps:,}, loss {loss:.3f}")


if __name__ == "__main__":
    sys.exit(main())

"""Train byte-level models to look up values by keys far outside the window, and close NSA's selected branch.

A sequence is a haystack of needles, each a key and its value, between filler digits; then four windows of filler; then
a quiz that repeats some of the keys, each with its value as the answer:

    3141hfalBNMA59265358gkbcOAEC...  0141592653...  gkbcOAEC hfalBNMA
    needles in filler                filler         quiz

Only the answers count for the loss, and an answer is right if all its bytes are the likeliest. Needle and question are
farther apart than windows reach, and each compressed block contains several needles, so an answer needs attention to
single distant tokens: dense attention, or the selected branch. To show this, the trained NSA is also evaluated with
that branch closed (`nsa-closed`), and trained without it (`no-selected`) and with the window alone (`window`).

Models learn to look up late if the context is long, so it grows during training. Writes OUT.json (schema:
docs/results_files.md) and OUT.png after each variant.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.show import saved_figure
from examples.shared import byte_models as common
from examples.shared import nsa_variants

CHOSEN = ["dense", "nsa", "no-selected", "window"]
CLOSED = "nsa-closed"  # The trained `nsa` with its selected branch closed

LETTERS = 16
KEYS, VALUES, FILLER = ord("a"), ord("A"), ord("0")  # First letter of keys, of values, and the first of ten digits
CODE = 4  # Number of letters of a key, and of a value
NEEDLE = 2 * CODE
FAR = 4  # Number of windows of filler between the last needle and the quiz
SHORTER = (8, 4, 2, 1)
"""Factors by which the context is shortened in the stages of training, which have equally many steps."""
ROPE_BASE = 1e6  # Base of rotary embeddings; a large one keeps distant keys similar to near ones

SIZES = {
    "steps": (600, 6000),
    "batch": (16, 16),
    "context": (256, 4096),
    "layers": (2, 2),
    "width": (64, 256),
    "heads": (2, 4),
    "kv_heads": (1, 1),
    "block_size": (16, 64),
    "k": (6, 16),
    "w": (8, 64),
    "q_tile": (1, 1),
    "eval_every": (50, 100),
    "eval_windows": (32, 64),
    "needles": (12, 64),
    "questions": (8, 32),
}
"""Defaults on CPUs and GPUs: a few minutes for NSA on two CPU cores, less for the others; four minutes each on an
H200."""
DEFAULTS = {"paper": SIZES, "per_tile": {**SIZES, "q_tile": (16, 128)}}


@dataclass(frozen=True)
class Task:
    """Layout of a window of context + 1 bytes: slots for needles from the start, the quiz at the end."""

    context: int
    window: int
    needles: int
    questions: int

    @property
    def quiz(self) -> int:
        """First byte of the quiz."""
        return self.context + 1 - self.questions * NEEDLE

    @property
    def slots(self) -> int:
        """Number of slots for needles; unused slots are filler."""
        return (self.quiz - FAR * self.window) // NEEDLE

    @cached_property
    def answers(self) -> Tensor:
        """Positions of the answers' bytes in the window, `[questions, CODE]`."""
        return self.quiz + torch.arange(self.questions)[:, None] * NEEDLE + CODE + torch.arange(CODE)

    def problem(self) -> str | None:
        if self.questions > self.needles:
            return f"--questions must be at most --needles, got {self.questions} and {self.needles}"
        if self.needles > min(self.slots, LETTERS ** (CODE - 1)):
            return (
                f"--context {self.context} has {max(self.slots, 0)} slots for --needles before {FAR} windows of --w "
                f"{self.window} and {self.questions} --questions, got {self.needles}"
            )
        return None

    def shorter(self, factor: int) -> Task:
        """The same task with context, needles and questions divided by a factor."""
        task = replace(self, context=self.context // factor, questions=max(1, self.questions // factor))
        return replace(task, needles=min(self.needles // factor, task.slots))

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw windows `[count, context + 1]`, and distances from needle to question in bytes `[count, questions]`.

        Both are on the generator's device.
        """
        device = generator.device
        needles = torch.cat([_codes(count, self.needles, first, generator) for first in (KEYS, VALUES)], dim=-1)
        windows = FILLER + torch.randint(10, (count, self.context + 1), generator=generator, device=device)
        slots = _permutations(count, self.slots, generator)[:, : self.needles]
        haystack = windows[:, : self.slots * NEEDLE].view(count, self.slots, NEEDLE)
        haystack.scatter_(1, slots[..., None].expand(-1, -1, NEEDLE), needles)
        windows[:, self.quiz :] = needles[:, : self.questions].flatten(1)
        questions = self.quiz + torch.arange(self.questions, device=device) * NEEDLE
        return windows, questions - slots[:, : self.questions] * NEEDLE


def _permutations(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Random permutations of 0 to length - 1, `[count, length]`."""
    return torch.rand(count, length, generator=generator, device=generator.device).argsort(-1)


def _codes(count: int, codes: int, first: int, generator: torch.Generator) -> Tensor:
    """Random strings `[count, codes, CODE]` of letters from `first` on.

    The last CODE - 1 letters are unique in a row, so that the embedding of a key's last bytes identifies it.
    """
    device = generator.device
    ends = _permutations(count, LETTERS ** (CODE - 1), generator)[:, :codes, None]
    ends = ends // LETTERS ** torch.arange(CODE - 2, -1, -1, device=device) % LETTERS
    starts = torch.randint(LETTERS, (count, codes, 1), generator=generator, device=device)
    return first + torch.cat([starts, ends], dim=-1)


class Trainer(common.ByteTrainer):
    """Trainer of a variant with a loss on the answers only."""

    def __init__(self, variant: str, args: argparse.Namespace) -> None:
        self.task: Task = args.task
        held_out = torch.Generator(args.device).manual_seed(args.seed)
        windows, self.distances = self.task.draw(args.eval_windows, held_out)
        self.generator = torch.Generator(args.device).manual_seed(args.seed + 1)
        super().__init__(variant, nsa_variants.make_model(variant, args, rope_base=ROPE_BASE), args, windows)

    def batch(self, step: int) -> Tensor:
        """Return the next windows: equally many bytes at every length, and the same windows for each variant."""
        factors = [factor for factor in SHORTER if self.task.shorter(factor).problem() is None]
        factor = factors[min(step * len(factors) // self.args.steps, len(factors) - 1)]
        return self.task.shorter(factor).draw(factor * self.args.batch, self.generator)[0]

    def answers(self, windows: Tensor) -> Tensor:
        """Positions of the answers' bytes in windows of any of the lengths, `[questions * CODE]`."""
        factor = self.task.context // (windows.shape[1] - 1)
        return self.task.shorter(factor).answers.flatten().to(self.device)

    def losses(self, windows: Tensor) -> Tensor:
        """Cross entropy of the answers' bytes in nats."""
        return super().losses(windows)[:, self.answers(windows) - 1]

    @torch.no_grad()
    def right(self) -> Tensor:
        """Mask of validation questions that are answered with the right value, `[W, questions]`."""
        positions = self.answers(self.validation)
        parts = self.validation.split(self.args.batch)
        right = [self.logits(part)[:, positions - 1].argmax(-1) == part[:, positions] for part in parts]
        return torch.cat(right).unflatten(1, (-1, CODE)).all(-1).cpu()

    def judge(self, name: str) -> tuple[float, list[common.Row]]:
        """Share of right answers, overall and by distance.

        A row has the questions whose needles are `nearest` to below `farthest`, twice as many, windows before them.
        """
        right = self.right().double()
        windows = self.distances.cpu() / self.task.window
        nearest = FAR * 2 ** (torch.frexp(windows / FAR).exponent - 1)
        ranges: list[common.Row] = []
        for bound in nearest.unique().tolist():
            inside = nearest == bound
            found = {"questions": int(inside.sum()), "accuracy": right[inside].mean().item()}
            ranges.append({"variant": name, "nearest": bound, "farthest": 2 * bound, **found})
        return right.mean().item(), ranges

    def run(self) -> common.Results:
        """Train and evaluate; for NSA, add a summary of the same model with its selected branch closed."""
        results = self.train()
        (summary,) = results["summary"]
        summary["accuracy"], results["accuracy"] = self.judge(self.variant)
        if self.variant == "nsa":
            with nsa_variants.ablated(self.model, "selected"):
                loss, (accuracy, more) = self.evaluate(), self.judge(CLOSED)
            closed = {"variant": CLOSED, "final_val_loss": loss, "bits_per_byte": loss / math.log(2)}
            unmeasured = dict.fromkeys(("tokens_per_s", "peak_gib"))
            results["summary"].append({**summary, **closed, **unmeasured, "accuracy": accuracy})
            results["accuracy"] += more
        return results


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    task = {**asdict(args.task), "far": FAR, "shorter": SHORTER, "rope_base": ROPE_BASE}
    facts = nsa_variants.facts(args, task, f"{args.needles} needles, ")

    common.record_variants(
        args,
        facts,
        train=lambda variant: Trainer(variant, args).run(),
        conclude=lambda results: {"verdict": verdict(results["summary"])},
        draw=plot,
        columns={"answers right": lambda summary: f"{summary['accuracy']:.1%}"},
    )
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = common.new_parser(__doc__, SIZES, out="needle")
    common.add_variants(parser, nsa_variants.VARIANTS, CHOSEN)
    nsa_variants.add_nsa_options(parser, "paper")
    args = parser.parse_args(argv)
    common.resolve_options(parser, args, DEFAULTS[args.preset])
    args.config = nsa_variants.make_config(parser, args)
    args.task = Task(args.context, args.w, args.needles, args.questions)
    if problem := args.task.problem():
        parser.error(problem)
    if args.layers >= FAR:
        parser.error(f"--layers must be below {FAR}, or windows upon windows reach the needles, got {args.layers}")
    return args


def verdict(summaries: list[common.Row]) -> str:
    words = {CLOSED: "the same NSA with its selected branch closed", "no-selected": "NSA trained without that branch"}
    shares = [f"{words.get(x['variant'], x['variant'])} {x['accuracy']:.1%}" for x in summaries]
    return f"Answers right: {', '.join(shares)}. One seed each."


def plot(results: common.Results, path: Path, device: str) -> None:
    ranges = results["accuracy"]
    with saved_figure(path, 1, 1, (7, 4.5)) as (figure, ((axes,),)):
        for name in dict.fromkeys(row["variant"] for row in ranges):
            own = [row for row in ranges if row["variant"] == name]
            middles = [math.sqrt(row["nearest"] * row["farthest"]) for row in own]
            axes.plot(middles, [100 * row["accuracy"] for row in own], "o--" if name == CLOSED else "o-", label=name)
        ticks = sorted({row[bound] for row in ranges for bound in ("nearest", "farthest")})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set(xlabel="distance of the needle in windows", ylabel="answers right, %", ylim=(-3, 103))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.suptitle(f"Looking up values by keys, {device}")


if __name__ == "__main__":
    sys.exit(main())

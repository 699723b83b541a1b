"""Tables of the documentation: specifications, and the renderer that fills them from results files and docstrings.

In README.md and docs/ a table stands between `<!-- table: NAME -->` and `<!-- end -->`. This script renders all of
them again; with --check it changes nothing and exits with 1 if a page differs. Needs no torch.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]
Rows = Iterable[Row]


@cache
def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(*names: str) -> list[Row]:
    """Rows of files; of NSA by several backends, those of the first one."""
    found = []
    for rows in (load(name)["rows"] for name in names):
        found += [row for row in rows if row.get("op") != "nsa" or row["backend"] == rows[0]["backend"]]
    return found


# Formats


def ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def tokens(n: int) -> str:
    """A number such as 1M, 8K or 500."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if n % size == 0:
            return f"{n // size}{unit}"
    return str(n)


def reached(bars: Sequence[Row]) -> str:
    """One sentence about bars of a results file."""
    missed = [bar["bar"] for bar in bars if bar["verdict"] != "pass"]
    but = f"; missed: {', '.join(missed)}" if missed else ""
    return f"{len(bars) - len(missed)} of {len(bars)} bars are reached{but}."


def signed(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")


FORMATS: dict[str, Callable[[Any], str]] = {
    "ms": ms,
    "tokens": tokens,
    "percent": lambda share: f"{100 * share:.0f} %",
    "permille": lambda share: f"{100 * share:.1f} %",
    "change": lambda difference: signed(f"{difference:+.3f}"),
    "percent change": lambda ratio: signed(f"{100 * (ratio - 1):+.1f} %"),
    "us": lambda value: f"{1000 * value:.1f}",
    "whole us": lambda value: f"{1000 * value:,.0f}",
    "count": lambda values: f"{len(values)}",
    "words": lambda name: name.replace("_", " "),
    "dense": lambda row: f"{'~' if row['dense_extrapolated'] else ''}{ms(row['dense_ms'])}",
    "stage": lambda row: fill("{ms:ms}" + " ({share:percent})" * ((row["share"] or 0) >= 0.005), row),
    "reached": reached,
    "links": lambda links: "\n".join(
        fill("{collective}: alpha {alpha_us:.0f} us, beta {beta_gbs:.0f} GB/s.<br>", link) for link in links
    ),
}
"""Formats of cells besides Python's own. "dense" and "stage" format a row; ~ marks a time extrapolated by N^2."""


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        return FORMATS[format_spec](value) if format_spec in FORMATS else format(value, format_spec)


def fill(template: str, row: Mapping[str, Any]) -> str:
    """A template of `str.format` with the fields of a row; None is empty."""
    return _Formatter().vformat(template, (), row)


# The renderer


@dataclass(frozen=True)
class Table:
    """A table in Markdown, and the text around it. Without rows it is left out.

    Args:
        head, line: cells of the heading, and templates of a row's cells, separated by " | ".
        files: results files that are cited beneath the table.
        rows: default: those of `files`.
        above, notes, below: templates of lines before the table, after it and after the citations, with `facts`.
        facts: default: the content of the first of `files`.
    """

    head: str
    line: str
    files: tuple[str, ...] = ()
    rows: Callable[[], Rows] | None = None
    above: str = ""
    notes: str = ""
    below: str = ""
    facts: Callable[[], Row] | None = None

    def render(self, page: Path) -> Iterator[str]:
        rows = list(rows_of(*self.files) if self.rows is None else self.rows())
        if not rows:
            return
        facts = self.facts() if self.facts else load(self.files[0]) if self.files else {}
        head = fill(self.head, facts).split(" | ")
        lines = [head, ["---"] * len(head), *([fill(cell, row) for cell in self.line.split(" | ")] for row in rows)]
        table = "\n".join(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |") for cells in lines)
        cited = "<br>\n".join(source(page, name) for name in self.files)
        yield from filter(
            None, (fill(self.above, facts), table, fill(self.notes, facts), cited, fill(self.below, facts))
        )


def source(page: Path, name: str) -> str:
    """Where figures come from: file, commit, device and command."""
    content = load(name)
    command = content.get("command") or content["rows"][0]["command"]
    link = f"[{name}.json]({os.path.relpath(RESULTS / name, page.parent)}.json)"
    commit, _, changes = content["commit"].partition("+")
    state = f"commit `{commit[:7]}`{' with changes' if changes else ''}"
    return f"{link}, {state}, {content['device']}: `{command}`"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(page: Path, text: str) -> str:
    """Text of a page with its tables rendered again. Raises SystemExit for a table that does not exist."""

    def replace(match: re.Match[str]) -> str:
        start, name, _, end = match.groups()
        if name not in TABLES:
            raise SystemExit(f"{page.relative_to(ROOT)} asks for the table {name!r}; there are {', '.join(TABLES)}")
        tables = TABLES[name]
        every = tables if isinstance(tables, tuple) else (tables,)
        paragraphs = [paragraph for table in every for paragraph in table.render(page)]
        return "\n".join([start, "\n\n".join(paragraphs), "", end])

    return MARKED.sub(replace, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page differs")
    args = parser.parse_args(argv)
    status = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        wanted = rendered(page, text)
        if wanted == text:
            continue
        print(f"{page.relative_to(ROOT)}: {'differs from bench/results' if args.check else 'written'}")
        status |= args.check
        if not args.check:
            page.write_text(wanted, encoding="utf-8")
    return int(status)


# Rows


def pivot(rows: Rows, keys: str, group: str) -> list[Row]:
    """A row for each value of `keys`; the rows that have it become its fields, named by the template `group`.

    If it has no row of some name, that field is a row of None.
    """
    named = [(fill(group, row), row) for row in rows]
    absent = {name: dict.fromkeys(named[0][1]) for name, _ in named}
    found: dict[tuple[Any, ...], Row] = {}
    for name, row in named:
        key = {field: row[field] for field in keys.split()}
        found.setdefault(tuple(key.values()), {**absent, **key})[name] = row
    return list(found.values())


E2E_BARS: dict[str, dict[str, dict[str, str]]] = {
    "e2e-h200": {
        "graph": {"8K": "0.32", "32K": "1.3", "128K": "4.2", "512K": "26", "1M": "80"},
        "eager": {"8K": "0.5"},
        "graph16": {"512K": "20", "1M": "42", "3M": "160"},
    },
    "e2e-h200-backward": {
        "eager": {"32K": "4.8", "128K": "18 [3]", "512K": "120", "1M": "330 [24]"},
        "eager16": {"512K": "95", "1M": "200"},
    },
}
"""Upper bounds of ms [and GiB] by mode, with `num_cmp` if it is given, and N. Set before the kernels were written."""


def by_length(name: str) -> Iterator[Row]:
    """Rows of an end-to-end file by N: fields "graph", "eager", "graph16" for `num_cmp=16`, and their bars."""
    bars = E2E_BARS.get(name, {})
    for row in sorted(pivot(rows_of(name), "n", "{mode}{num_cmp}"), key=lambda row: row["n"]):
        for c in ("", "16"):
            wanted = (bars.get(f"{mode}{c}", {}).get(tokens(row["n"])) for mode in ("graph", "eager"))
            row[f"bar{c}"] = " / ".join(filter(None, wanted))
        yield row


def e2e_bars(name: str) -> Row:
    rows = {tokens(row["n"]): row for row in by_length(name)}
    bars = []
    for group, wanted in E2E_BARS[name].items():
        for n, bar in wanted.items():
            pairs = zip(("ms_p50", "peak_gib"), re.findall(r"[\d.]+", bar), strict=False)
            passes = all(rows[n][group][field] <= float(most) for field, most in pairs)
            bars.append({"bar": f"{n} {group}", "verdict": "pass" if passes else "FAIL"})
    return {"bars": bars}


def recompute_rows() -> Iterator[Row]:
    kept = {row["n"]: row["eager16"] for row in by_length("e2e-h200-backward")}
    return (row | {"kept": kept[row["n"]]} for row in by_length("e2e-h200-recompute"))


def block_size_rows() -> list[Row]:
    rows = [row for row in rows_of("e2e-h200-l32", "e2e-h200", "e2e-h200-l128") if row["mode"] == "graph"]
    lengths = {row["n"] for row in rows_of("e2e-h200-l32")}
    return pivot((row for row in rows if row["n"] in lengths), "n", "{l}, {num_cmp}")


def case_rows() -> Iterator[Row]:
    for row in pivot(rows_of("e2e-h200-h32", "e2e-h200-sink"), "inputs n num_cmp h h_kv", "{mode}"):
        if row["num_cmp"] is None:
            yield row | {"sink": ", attention sink" * (row["inputs"] == "sink")}


WHY = {"oom": "out of memory", "timeout": "stopped by its time limit"}
LONGEST = ("probe-h200-nsa", "probe-h200-nsa-backward", "probe-h200-dense")


def longest_rows() -> Iterator[Row]:
    for content in map(load, LONGEST):
        settings, bracket = content["settings"], content["bracket"]
        yield {
            **bracket,
            "op": "dense FA4" if settings["op"] == "dense" else "NSA, c=16",
            "passes": "forward" + " + backward" * settings["backward"],
            "how": ", `recompute=True`" * settings.get("recompute", False),
            "seconds": next(trial["seconds"] for trial in content["trials"] if trial["n"] == bracket["fits"]),
            "end": "none" if bracket["fails"] is None else f"{bracket['fails']:,}: {WHY[bracket['why']]}",
        }


def varlen_rows() -> list[Row]:
    passes = (("fwd", "varlen-h200"), ("both", "varlen-h200-backward"))
    return pivot((row | {"pass": name} for name, file in passes for row in rows_of(file)), "name", "{pass}")


def varlen_facts() -> Row:
    lengths = load("varlen-h200")["lengths"]
    return {"lengths": lengths, "least": min(lengths), "most": max(lengths), "all": sum(lengths)}


FORWARD_STAGES = {
    "compress": ("compress k, v", "bytes: k and v read once"),
    "tile means": ("tile means of q", "bytes: q read once"),
    "score": ("score and select", "list insertions, then tensor cores"),
    "score, cmp": ("select compressed blocks", "the same"),
    "lists": ("block lists", "launches"),
    "compressed": ("compressed attention", "tensor cores"),
    "selected": ("selected attention", "tensor cores, 64-wide tiles"),
    "window": ("window attention", "tensor cores, masks"),
    "gate": ("gate", "bytes: q and three outputs read, one written"),
    "all": ("**forward**", ""),
}
BACKWARD_STAGES = {
    "gate gradients": ("gate gradients", "bytes, and a reduction in registers"),
    "selected, lists": ("transposed block lists", "launches, then bytes"),
    "compressed": ("compressed", "tensor cores"),
    "selected, split": ("selected, atomic-free", "rows read again for every block"),
    "split, dq": ("its dq alone", "tensor cores"),
    "split, dk dv": ("its dk and dv alone", "HBM"),
    "selected, FA4": ("selected by FlashAttention-4 with lists", "fp32 reduction of dq"),
    "window": ("window", "tensor cores, masks"),
    "query sums": ("sums of dq", "bytes"),
    "key sums": ("sums of dk and dv", "bytes"),
    "backward": ("**backward**", ""),
    "forward, saving": ("forward, outputs kept", ""),
    "all": ("**both**", ""),
}
"""Label and limit of each stage, in the order of the tables."""


def stages(name: str, labels: Mapping[str, tuple[str, str]]) -> Table:
    def rows() -> Iterator[Row]:
        found = {(row["stage"], row["num_cmp"]): row for row in pivot(rows_of(name), "stage num_cmp", "{n:tokens}")}
        for (stage, (label, limit)), c in product(labels.items(), (None, 16)):
            if (stage, c) in found and (c is None or stage in ("compressed", "all", "score, cmp", "backward")):
                label += ", c=16" * (c is not None and stage != "score, cmp")
                yield found[stage, c] | {"label": label, "limit": limit}

    head, line = "stage | 8K | 32K | 128K | 512K | 1M | bound by", "{label} | {8K:stage} | {32K:stage} | {128K:stage}"
    return Table(head, f"{line} | {{512K:stage}} | {{1M:stage}} | {{limit}}", (name,), rows)


SFNSA = {8: (2.66, 8.78), 32: (13.7, 45.5), 64: (36.8, 119), 128: (111, 352)}
"""Milliseconds of SFNSA, forward and forward + backward, by N in K; measured once, when the bars were set."""


def paper_rows() -> Iterator[Row]:
    bars = {bar["bar"]: re.sub(r"[^\d.]", "", bar["wanted"]) for bar in load("paper-h200")["bars"]}
    for row in pivot(rows_of("paper-h200"), "n pass", "{mode}"):
        backward = row["pass"] != "fwd"
        bar, sfnsa = bars.get(fill("{n:tokens} {pass}", row)), SFNSA[row["n"] >> 10][backward]
        yield row | {"first": None if backward else row["n"], "bar": bar, "sfnsa": sfnsa}


def paper_facts() -> Row:
    both: Row
    (both,) = (row["queued"] for row in paper_rows() if (row["n"], row["pass"]) == (64 << 10, "fwd+bwd"))
    bars = load("paper-h200")["bars"]
    stretch = [bar | {"bar": bar["bar"].replace(", stretch", "")} for bar in bars if "stretch" in bar["bar"]]
    return both | {"bars": [bar for bar in bars if "stretch" not in bar["bar"]], "stretch": stretch}


CHOICES = {
    "random": "random",
    "local": "local, weight 1 / distance",
    "text": "from a text's embeddings",
    "file": "by a trained model",
}
TILE_GROUP = 64
"""Query heads per key/value head from which the selected branch runs query-outer (attend/query_outer.py)."""


def selected_rows() -> Iterator[Row]:
    """Stages of the selected branch alone; "own" is the forward that runs by default."""
    for row in pivot(rows_of("token-selected-h200"), "n h h_kv choice", "{stage}"):
        has_fla = None not in (row["forward"]["fla_ms"], row["both"]["fla_ms"])
        fla = "{forward[fla_ms]:ms} / {both[fla_ms]:ms}" if has_fla else "takes no 4 heads a group"
        own = row["tiles" if row["h"] // row["h_kv"] >= TILE_GROUP else "forward"]["ms"]
        yield row | {"blocks": CHOICES[row["choice"]], "fla": fill(fla, row), "own": own}


def neighborhood_rows() -> Iterator[Row]:
    for row in rows_of("neighborhood-h200"):
        if row["default"]:
            shape = fill("{b},{h},{s},{d},{k},{dilation}", row).removesuffix(",1")
            yield row | {"shape": shape, "first": shape if row["pass"] == "fwd" else None}


def decode_rows() -> Iterator[Row]:
    for row in pivot(rows_of("decode-h200"), "op preset n b n_q h h_kv", "{mode}"):
        if row["op"] == "decode":
            yield row | {"per": {"paper": "token", "per_tile": "tile"}[row["preset"]]}


def triton_rows() -> Iterator[Row]:
    """NSA of the paper by Triton and `cute`, fla, and dense attention of FlashAttention-4 and PyTorch."""
    sdpa = {
        (name, row["n"], row["pass"]): row["dense_ms"]
        for name in ("flash", "cudnn")
        for row in load(f"triton-{name}-h200")["rows"]
    }
    queued = [row for row in load("triton-h200")["rows"] if row["mode"] == "queued"]
    for row in pivot(queued, "n pass", "{backend}"):
        case = row["n"], row["pass"]
        yield row | {name: sdpa.get((name, *case)) for name in ("flash", "cudnn")}


CARDS = "A100", "L40S", "RTX 4090", "RTX 5090"


def predicted_rows() -> Iterator[Row]:
    """Times on other cards at the share of the floor that code for sm_80 reaches on an H200."""
    from bench.inputs import Sizes  # which import torch
    from bench.roofline import PEAKS, dense_floor_ms, nsa_floor_ms
    from nsa import NSAConfig

    for row in load("triton-sm80-code-h200")["rows"]:
        sizes, backward = Sizes(1, row["n"], row["h"], row["h_kv"], row["d"]), row["pass"] != "fwd"
        nsa = {card: nsa_floor_ms(sizes, NSAConfig.paper(), PEAKS[card], backward=backward) for card in CARDS}
        dense = {card: dense_floor_ms(sizes, PEAKS[card], backward=backward) for card in CARDS}
        yield row | {card: f"{ms(nsa[card] / row['share_of_floor'])} / {ms(dense[card])}" for card in CARDS}


STEP_MODELS = {"nsa": "NSA", "dense": "dense", "dense_unmasked": "dense without a mask"}


def step_rows() -> list[Row]:
    """Steps of `generate` by case; fields such as "nsa, graph"."""
    rows = [row | {"case": f"{row['b']}{', padded' * row['padded']}"} for row in rows_of("generate-h200")]
    return pivot(rows, "n case", "{model}, {mode}")


def steps() -> Table:
    head, line = "tokens | batch", "{n:tokens} | {case}"
    for mode, (model, name) in product(("graph", "compiled", "eager"), STEP_MODELS.items()):
        head, line = f"{head} | {name}, {mode}", f"{line} | {{{model}, {mode}[ms_p50]:ms}}"
    return Table(head, line, ("generate-h200",), step_rows, below="{bars:reached}")


BLOCK_SPARSE = {
    "block_sparse": "attention",
    "top_blocks": "choice of blocks",
    "indexer_kl": "loss of an indexer",
    "m3_layer": "layer of MiniMax-M3",
}


def block_sparse_rows() -> Iterator[Row]:
    problem = {"n": 64 << 10, "h": 64, "h_kv": 4, "choice": "random"}
    (branch,) = (row for row in selected_rows() if problem.items() <= row.items())
    for row in rows_of("block-sparse-h200"):
        same = (row["op"], row["block"], row["n"]) == ("block_sparse", 64, 64 << 10)
        selected = branch["forward" if row["pass"] == "fwd" else "both"]["ms"] if same else None
        blocks = f", blocks of {row['block']}" * (row["op"] == "block_sparse")
        yield row | {"what": BLOCK_SPARSE[row["op"]], "blocks": blocks, "selected": selected}


RESIDUAL_PEERS = ("liger", "compile", "eager")


def residual_rows() -> Iterator[Row]:
    for row in rows_of("attnres-h200"):
        shape = f"{row['t']}, {row['d']}{', list' * (row['inputs'] == 'list')}"
        yield row | {"first": shape if row["pass"] == "fwd" else None}


def residual_bars() -> Iterator[Row]:
    """Bars of the same kind and bound as one row."""
    groups: dict[tuple[str, str], list[str]] = {}
    for bar in load("attnres-h200")["bars"]:
        problem, _, what = bar["bar"].partition(": ")
        shown = f"{problem}: {what}" if "memory" in what else f"{problem.split()[-1]}: {what}"
        groups.setdefault((shown, bar["wanted"]), []).append(bar["reached"])
    for (what, wanted), figures in groups.items():
        figures.sort(key=lambda figure: float(re.sub(r"[^\d.]", "", figure)))
        span = " to ".join(dict.fromkeys((figures[0], figures[-1])))
        yield {"what": what, "problems": figures, "wanted": wanted, "span": span}


def residual_facts() -> Row:
    rows = rows_of("attnres-h200")
    least = min(min(row[f"{peer}_wall_ms"] for peer in RESIDUAL_PEERS) / row["wall_ms"] for row in rows)
    return {**load("attnres-h200"), "lowest": min(rows, key=lambda row: row["share_of_floor"]), "least": least}


def step_races() -> Iterator[Row]:
    """A row for each mode of a step, with the milliseconds of each model in that mode."""
    for row, mode in product(step_rows(), ("graph", "eager", "compiled")):
        yield row | {"mode": mode} | {model: row[f"{model}, {mode}"]["ms_p50"] for model in STEP_MODELS}


def races() -> Iterator[tuple[str, Rows, str, dict[str, str]]]:
    """Templates of cases, their rows, the field of our milliseconds, and fields of peers' by name."""
    tile = rows_of("e2e-h200", "e2e-h200-l32", "e2e-h200-l128", "e2e-h200-h32", "e2e-h200-backward")
    case = "NSA per tile, l={l}, {h} heads over {h_kv}, {n:tokens}, {pass}, {mode}"
    yield case, (row for row in tile if row["num_cmp"] is None), "ms_p50", {"dense FA4": "dense_ms"}
    case = "NSA per token, {h} heads over {h_kv}, {n:tokens}, {pass}, {mode}"
    yield case, rows_of("paper-h200"), "ms_p50", {"dense FA4": "dense_ms", "fla": "fla_ms"}
    case = "selected branch alone, {h} heads over {h_kv}, {n:tokens}, {choice}, "
    yield f"{case}fwd", (row | {"fla": row["forward"]["fla_ms"]} for row in selected_rows()), "own", {"fla": "fla"}
    yield f"{case}fwd+bwd", (row["both"] for row in selected_rows()), "ms", {"fla": "fla_ms"}
    case = "block-sparse {what}, blocks of {block}, {n:tokens}, {pass}"
    yield case, block_sparse_rows(), "ms_p50", {"dense FA4": "dense_ms", "SDPA": "mask_ms"}
    case = "decoding per {per}, {n_q} a step, {h} heads over {h_kv}, {n:tokens}, batch {b}"
    yield case, (row["graph"] | row for row in decode_rows()), "ms_p50", {"SDPA": "dense_ms", "fla": "fla_ms"}
    case = "a step of generate, {n:tokens}, batch {case}, {mode}"
    yield case, step_races(), "nsa", {name: model for model, name in STEP_MODELS.items() if model != "nsa"}
    case = "neighborhood attention, {shape}, {pass}"
    yield case, neighborhood_rows(), "ms_p50", {"FA4": "fa4_ms", "flex": "flex_ms", "Liger": "liger_ms"}
    case = "attention residual, T={t}, D={d}, {pass}"
    yield case, rows_of("attnres-h200"), "ms_p50", {peer: f"{peer}_ms" for peer in RESIDUAL_PEERS}
    case += ", from Python"
    yield case, rows_of("attnres-h200"), "wall_ms", {peer: f"{peer}_wall_ms" for peer in RESIDUAL_PEERS}


def losses() -> Iterator[Row]:
    """Measured cases in which a peer takes less time than a call by default."""
    for case, rows, own, peers in races():
        for row in rows:
            times = [(name, row[field]) for name, field in peers.items() if None not in (row[field], row[own])]
            if faster := [f"{name} {ms(took)}" for name, took in times if took < row[own]]:
                yield {"case": fill(case, row), "own": row[own], "faster": ", ".join(faster)}


def speed_rows() -> Iterator[Row]:
    """One row of several files each."""
    tile = "NSA per tile, 8 heads over 2, {n:tokens}", "dense FA4 {row:dense}"
    token = "NSA per token (paper), 64 over 4, 64K", "fla {fla_ms:ms}, dense FA4 {dense_ms:ms}"
    near = "neighborhood attention, [4, 8K, 32, 128], k=9", "FA4 window {fa4_ms:ms}, flex {flex_ms:ms}"
    mixed = "attention residual, 8 blocks of [8K, 4096]", "Liger {liger_ms:ms}, eager {eager_ms:ms}"
    for (op, beside), rows, problem in (
        (tile, rows_of("e2e-h200"), {"n": 8 << 10, "num_cmp": None, "mode": "graph"}),
        (tile, rows_of("e2e-h200-backward"), {"n": 8 << 10, "num_cmp": None, "mode": "eager"}),
        (tile, rows_of("e2e-h200"), {"n": 128 << 10, "num_cmp": None, "mode": "eager"}),
        (tile, rows_of("e2e-h200-backward"), {"n": 128 << 10, "num_cmp": None, "mode": "eager"}),
        (tile, rows_of("e2e-h200"), {"n": 1 << 20, "num_cmp": None, "mode": "eager"}),
        (tile, rows_of("e2e-h200-backward"), {"n": 1 << 20, "num_cmp": None, "mode": "eager"}),
        (token, rows_of("paper-h200"), {"n": 64 << 10, "mode": "queued", "pass": "fwd"}),
        (token, rows_of("paper-h200"), {"n": 64 << 10, "mode": "queued", "pass": "fwd+bwd"}),
        (near, neighborhood_rows(), {"shape": "4,32,8192,128,9", "pass": "fwd+bwd"}),
        (mixed, rows_of("attnres-h200"), {"t": 8192, "d": 4096, "inputs": "stacked", "pass": "fwd+bwd"}),
    ):
        (row,) = (row for row in rows if problem.items() <= row.items())
        passes = row["pass"].replace("+", " + ") + ", graph" * (row.get("mode") == "graph" and row["op"] == "nsa")
        yield row | {"title": fill(op, row), "passes": passes, "beside": fill(beside, {**row, "row": row})}


def training(name: str) -> Table:
    def rows() -> Iterator[Row]:
        for row in load(name)["summary"]:
            records = [record for record in rows_of(name) if record["variant"] == row["variant"]]
            against = None if row["variant"] == "dense" else row["relative_to_dense"]
            yield row | {"best": min(records, key=lambda record: record["val_loss"]), "against": against}

    line = "`{variant}` | {final_val_loss:.4f} | {against:percent change} | {best[val_loss]:.4f} (step {best[step]})"
    return Table("variant | final validation loss | against dense | lowest", line, (name,), rows, notes="{verdict}")


def conversion_rows() -> Iterator[Row]:
    content = load("convert-llama-cpu")
    before, after = content["dense_loss"], content["dense_trained_loss"]
    dense = {"start": "(dense)", "converted_loss": before, "trained_loss": after}
    yield dense | dict.fromkeys(("shares", "jump", "left"))
    for row in content["rows"]:
        shares = ", ".join(f"{gate:.2f}" for gate in row["gates"])
        yield row | {"shares": shares, "jump": row["converted_loss"] - before, "left": row["trained_loss"] - after}


def share_rows(name: str) -> Iterator[Row]:
    """Shares of context parallelism: times of the undivided call, and of the slowest rank by mode."""
    for share in sorted(load(name)["shares"], key=lambda one: (one["preset"] == "paper", one["pass"], one["ranks"])):
        same = [row for row in rows_of(name) if (row["preset"], row["pass"]) == (share["preset"], share["pass"])]
        (undivided,) = (row for row in same if row["ranks"] == 1)
        own = [row for row in same if row["ranks"] == share["ranks"]]
        slowest = {mode: max(row["ms"] for row in own if row["mode"] == mode) for mode in {row["mode"] for row in own}}
        case = fill("{preset:words}, {h}/{h_kv}, {n:tokens}", undivided)
        yield share | slowest | {"undivided": undivided["ms"], "case": case}


def context_parallel(name: str) -> Table:
    """Ranks that call together."""
    return Table(
        " | pass | one GPU, ms | together | keys there already | messages alone | not hidden | speed-up"
        " | peak GiB (bound)",
        "{case} | {pass} | {undivided:ms} | {together:ms} | {alone:ms} | {messages_ms:ms} | {not_hidden_ms:ms}"
        " | {speedup:.2f}x | {peak_gib:.1f} ({bound_gib:.1f})",
        (name,),
        partial(share_rows, name),
        notes="{links:links}",
        below="{bars:reached}",
    )


def blackwell_rows() -> Iterator[Row]:
    """Executed cases by form."""
    by_form: dict[str, list[Row]] = {}
    for row in load("blackwell-executed")["cases"]:
        by_form.setdefault(row["form"], []).append(row)
    for rows in by_form.values():
        names = ("dtype", "group", "rows", "schedule")
        listed = {name: ", ".join(map(str, sorted({row[name] for row in rows}))) for name in names}
        sizes = sorted({(row["d"], row["d_v"]) for row in rows})
        dims = ", ".join(f"{d}" if d == d_v else f"{d}/{d_v}" for d, d_v in sizes)
        dtypes = listed["dtype"].replace("bfloat", "bf").replace("float", "fp")
        yield max(rows, key=lambda row: row["error"] / row["budget"]) | listed | {"dims": dims, "dtypes": dtypes}


def kernel_rows() -> Iterator[Row]:
    counts = Counter(kernel for row in load("blackwell-executed")["cases"] for kernel in set(row["kernels"]))
    for kernel, cases in sorted(counts.items()):
        of = "FlashAttention-4" if kernel.startswith("FlashAttention") else "here"
        yield {"kernel": kernel, "of": of, "cases": cases}


def deletion_rows() -> Iterator[Row]:
    """Instructions left out one at a time, by kernel, and the checks that noticed it."""
    deletions = load("blackwell-executed")["deletions"]
    for kernel in dict.fromkeys(row["kernel"] for row in deletions):
        every = [row for row in deletions if row["kernel"] == kernel]
        executed = [row for row in every if row["executed"]]
        matter = [row for row in executed if not row["reason"]]
        found = Counter(row["by"].partition(":")[0] for row in matter if row["found"])
        counts = {"executed": len(executed), "nothing": len(executed) - len(matter), "found": found.total()}
        shares = {name: found.total() / len(of) if of else None for name, of in (("all", executed), ("some", matter))}
        by = ", ".join(f"{n} by {what}" for what, n in found.items())
        yield {"kernel": kernel, "every": every, "by": by, **counts, **shares}


def harmless_rows() -> Iterator[Row]:
    reasons = Counter(row["reason"] for row in load("blackwell-executed")["deletions"] if row["executed"])
    return ({"why": why, "count": count} for why, count in reasons.most_common() if why)


def missed_rows() -> Iterator[Row]:
    deletions = load("blackwell-executed")["deletions"]
    return (row for row in deletions if row["executed"] and not row["found"] and not row["reason"])


MAPPED = "nsa", "dispatch", "cute_kernels", "ascend_kernels", "bench", "examples", "tools", "tests/support", "tests/ptx"


def module_rows(folder: str) -> Iterator[Row]:
    """Every module but tests, a folder by its `__init__.py`, with the first sentence of its docstring."""
    paths = (path for path in (ROOT / folder).rglob("*.py") if not path.name.startswith("test_"))
    for path in sorted(paths, key=lambda path: (path.parent, path.name != "__init__.py", path)):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(docstring.partition("\n\n")[0].split())
        sentence = re.split(r"(?<=[.!?]) (?=[A-Z])", first)[0].removesuffix(".")
        name = path.relative_to(ROOT).as_posix().removesuffix("__init__.py")
        if sentence:
            yield {"name": name, "holds": sentence.replace("|", "\\|")}


# Specifications

TABLES: dict[str, Table | tuple[Table, ...]] = {
    "speed": Table("op | pass | ms | beside it, ms", "{title} | {passes} | {ms_p50:ms} | {beside}", rows=speed_rows),
    "nsa-forward": Table(
        "N | dense FA4 | NSA, graph / eager | bar | NSA, c=16, graph / eager | bar | GiB",
        "{n:tokens} | {graph:dense} | {graph[ms_p50]:ms} / {eager[ms_p50]:ms} | {bar}"
        " | {graph16[ms_p50]:ms} / {eager16[ms_p50]:ms} | {bar16} | {graph[peak_gib]:.2f}",
        ("e2e-h200",),
        partial(by_length, "e2e-h200"),
        notes="{bars:reached}",
        facts=partial(e2e_bars, "e2e-h200"),
    ),
    "nsa-backward": Table(
        "N | dense FA4 | NSA [GiB] | bar | NSA, c=16 [GiB] | bar",
        "{n:tokens} | {eager:dense} | {eager[ms_p50]:ms} [{eager[peak_gib]:.2f}] | {bar}"
        " | {eager16[ms_p50]:ms} [{eager16[peak_gib]:.2f}] | {bar16}",
        ("e2e-h200-backward",),
        partial(by_length, "e2e-h200-backward"),
        notes="{bars:reached}",
        facts=partial(e2e_bars, "e2e-h200-backward"),
    ),
    "nsa-recompute": Table(
        "N, c=16 | outputs kept, ms [GiB] | `recompute=True`, ms [GiB]",
        "{n:tokens} | {kept[ms_p50]:ms} [{kept[peak_gib]:.2f}] | {eager16[ms_p50]:ms} [{eager16[peak_gib]:.2f}]",
        ("e2e-h200-recompute",),
        recompute_rows,
    ),
    "nsa-block-sizes": Table(
        "N | l=32, l'=64 | c=16 | l=l'=64 | c=16 | l=l'=128 | c=16",
        "{n:tokens} | {32, [ms_p50]:ms} | {32, 16[ms_p50]:ms} | {64, [ms_p50]:ms} | {64, 16[ms_p50]:ms}"
        " | {128, [ms_p50]:ms} | {128, 16[ms_p50]:ms}",
        ("e2e-h200-l32", "e2e-h200", "e2e-h200-l128"),
        block_size_rows,
    ),
    "nsa-cases": Table(
        "case | N | dense FA4 | NSA, graph | eager",
        "{h} heads over {h_kv}{sink} | {n:tokens} | {graph:dense} | {graph[ms_p50]:ms} | {eager[ms_p50]:ms}",
        ("e2e-h200-h32", "e2e-h200-sink"),
        case_rows,
    ),
    "nsa-long": Table(
        "N | NSA, c=16, ms | of the roofline | GiB beside inputs | dense FA4, ms",
        "{n:tokens} | {graph16[ms_p50]:ms} | {graph16[share_of_floor]:percent} | {graph16[peak_gib]:.1f}"
        " | {graph16:dense}",
        ("e2e-h200-long",),
        partial(by_length, "e2e-h200-long"),
    ),
    "nsa-longest": Table(
        "op | pass | longest N | s, with compilation | next N tried",
        "{op} | {passes}{how} | {fits:,} | {seconds:.1f} | {end}",
        LONGEST,
        longest_rows,
    ),
    "varlen": Table(
        " | forward, ms | GiB beside inputs | forward + backward, ms | GiB in all",
        "{name} | {fwd[ms_p50]:ms} | {fwd[peak_gib]:.1f} | {both[ms_p50]:ms} | {both[peak_gib]:.1f}",
        ("varlen-h200", "varlen-h200-backward"),
        varlen_rows,
        above="{lengths:count} documents of {least:,} to {most:,} tokens, {all:,} in all:",
        facts=varlen_facts,
    ),
    "stages": stages("stages-h200", FORWARD_STAGES),
    "stages-backward": stages("stages-h200-backward", BACKWARD_STAGES),
    "paper": Table(
        "N | pass | NSA | idle GPU | graph | bar | dense FA4 | fla | SFNSA | of the roofline | GiB",
        "{first:tokens} | {pass} | {queued[ms_p50]:ms} | {eager[ms_p50]:ms} | {graph[ms_p50]:ms} | {bar}"
        " | {queued[dense_ms]:ms} | {queued[fla_ms]:ms} | {sfnsa:g} | {queued[share_of_floor]:percent}"
        " | {queued[peak_gib]:.1f}",
        ("paper-h200",),
        paper_rows,
        notes="{bars:reached}\nStretch bars: {stretch:reached}\n"
        "Memory of forward + backward at 64K: {peak_gib:.1f} GiB (SFNSA 12.7, fla {fla_gib:.1f}).",
        facts=paper_facts,
    ),
    "triton": Table(
        "N | pass | Triton | GiB | `cute` | fla | dense: FA4 | cuDNN | FA2",
        "{n:tokens} | {pass} | {triton[ms_p50]:ms} | {triton[peak_gib]:.2f} | {cute[ms_p50]:ms} | {cute[fla_ms]:ms}"
        " | {cute[dense_ms]:ms} | {cudnn:ms} | {flash:ms}",
        ("triton-h200", "triton-cudnn-h200", "triton-flash-h200"),
        triton_rows,
    ),
    "triton-predicted": Table(
        f"N | pass | H200, code for sm_80 | {' | '.join(CARDS)}",
        f"{{n:tokens}} | {{pass}} | {{ms_p50:ms}} | {' | '.join(f'{{{card}}}' for card in CARDS)}",
        ("triton-sm80-code-h200",),
        predicted_rows,
    ),
    "token-selected": Table(
        "N | heads | blocks chosen | KV-outer fwd | query-outer fwd | KV-outer fwd+bwd | fla fwd / fwd+bwd",
        "{n:tokens} | {h} over {h_kv} | {blocks} | {forward[ms]:ms} | {tiles[ms]:ms} | {both[ms]:ms} | {fla}",
        ("token-selected-h200",),
        selected_rows,
    ),
    "neighborhood": Table(
        "B,H,S,D,k[,dilation] | pass | ours | of the floor | FA4 window | flex_attention | Liger",
        "{first} | {pass} | {ms_p50:ms} | {share_of_floor:percent} | {fa4_ms:ms} | {flex_ms:ms} | {liger_ms:ms}",
        ("neighborhood-h200",),
        neighborhood_rows,
    ),
    "decoding": Table(
        "mode | tokens | batch | graph, us | eager | floor | dense SDPA | fla",
        "{per} | {n:tokens} | {b} | {graph[ms_p50]:us} | {eager[ms_p50]:us} | {graph[floor_ms]:us}"
        " | {graph[dense_ms]:whole us} | {graph[fla_ms]:whole us}",
        ("decode-h200",),
        lambda: (row for row in decode_rows() if (row["h"], row["n_q"]) == (64, 1)),
        below="{bars:reached}",
    ),
    "generating": steps(),
    "block-sparse": Table(
        " | tokens | pass | ours | of the floor | dense FA4 | SDPA, mask of pairs | PyTorch, all pairs"
        " | selected branch",
        "{what}{blocks} | {n:tokens} | {pass} | {ms_p50:ms} | {share_of_floor:percent} | {dense_ms:ms}"
        " | {mask_ms:ms} | {pairs_ms:ms} | {selected:ms}",
        ("block-sparse-h200",),
        block_sparse_rows,
        below="{bars:reached}",
    ),
    "indexer": Table(
        "tokens | ms | of the floor | GiB | eager PyTorch",
        "{n:tokens} | {ms_p50:ms} | {share_of_floor:percent} | {peak_gib:.2f} | {pairs_ms:ms}",
        ("indexer-h200",),
    ),
    "residual": Table(
        "T, D | pass | ms | of the floor | Liger | torch.compile | eager | from Python | MiB | least",
        "{first} | {pass} | {ms_p50:ms} | {share_of_floor:percent} | {liger_ms:ms} | {compile_ms:ms}"
        " | {eager_ms:ms} | {wall_ms:ms} | {peak_mib:,.1f} | {floor_mib:,.0f}",
        ("attnres-h200",),
        residual_rows,
    ),
    "residual-bars": Table(
        "bar | problems | wanted | reached",
        "{what} | {problems:count} | {wanted} | {span}",
        rows=residual_bars,
        above="{bars:reached}",
        notes="The lowest share of the floor is {lowest[share_of_floor]:permille}: {lowest[pass]} at T = {lowest[t]},"
        " D = {lowest[d]}.\n"
        "From Python the fastest peer takes at least {least:.2f} times as long in each of the {rows:count} rows.",
        facts=residual_facts,
    ),
    "losses": Table("case | ours, ms | faster, ms", "{case} | {own:ms} | {faster}", rows=losses),
    "demo": Table(
        "N | dense, ms | NSA, ms | speed-up | 20th to 80th percentile",
        "{n:,} | {dense_ms:ms} | {ms_p50:ms} | {speedup:.2f}x | {speedup_p20:.2f}x to {speedup_p80:.2f}x",
        ("e2e-cpu",),
        notes="{verdict}",
    ),
    "train": training("train-h100"),
    "train-paper": training("train-paper-h100"),
    "needle": Table(
        "variant | answers right | loss of the answers",
        "`{variant}` | {accuracy:permille} | {final_val_loss:.3f}",
        ("needle-h200",),
        lambda: load("needle-h200")["summary"],
        notes="{verdict}",
    ),
    "train-residual": Table(
        "variant | final validation loss | bits per byte",
        "`{variant}` | {final_val_loss:.3f} | {bits_per_byte:.3f}",
        ("train-residual-cpu",),
        lambda: load("train-residual-cpu")["summary"],
        notes="{verdict}",
    ),
    "convert-llama": Table(
        "start | gates | validation loss | jump | {training[more]} steps later | against dense",
        "{start} | {shares} | {converted_loss:.3f} | {jump:change} | {trained_loss:.3f} | {left:change}",
        ("convert-llama-cpu",),
        conversion_rows,
    ),
    "context-parallel": context_parallel("context-parallel-nccl-h100"),
    "context-parallel-4": context_parallel("context-parallel-nccl4-h200"),
    "context-shares": Table(
        " | pass | ranks | undivided, ms | slowest rank, ms | over the mean | all over undivided",
        "{case} | {pass} | {ranks} | {undivided:ms} | {alone:ms} | {slowest_over_mean:.3f} | {sum_over_single:.3f}",
        ("context-parallel-h100",),
        partial(share_rows, "context-parallel-h100"),
        below="{bars:reached}",
    ),
    "soak": Table(
        "bar | wanted | reached | ",
        "{bar} | {wanted} | {reached} | {verdict}",
        ("soak-h200",),
        lambda: load("soak-h200")["bars"],
        above="{minutes:g} minutes in {runs:count} runs, {steps:,} steps, {tokens:,} tokens:",
    ),
    "blackwell": Table(
        "form | D, D/D_v | dtype | G | rows | schedule | nearest to its budget",
        "{form} | {dims} | {dtypes} | {group} | {rows} | {schedule} | {error:.1e} of {budget:.1e} ({result})",
        ("blackwell-executed",),
        blackwell_rows,
    ),
    "blackwell-kernels": Table("kernel | of | cases", "`{kernel}` | {of} | {cases}", rows=kernel_rows),
    "blackwell-deletions": (
        Table(
            "kernel | instructions that order | executed | change nothing | found | of the executed"
            " | of those that matter | by",
            "{kernel} | {every:count} | {executed} | {nothing} | {found} | {all:percent} | {some:percent} | {by}",
            rows=deletion_rows,
        ),
        Table("why it changes nothing | deletions", "{why} | {count}", rows=harmless_rows),
        Table("not found | in", "`{instruction:.90}` | {kernel}", rows=missed_rows),
    ),
    "files": tuple(
        Table("file | holds", "`{name}` | {holds}", rows=partial(module_rows, folder), above=f"### {folder}")
        for folder in MAPPED
    ),
}

if __name__ == "__main__":
    sys.exit(main())

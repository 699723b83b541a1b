"""Tables of the documentation, rendered from what they show: results files, and the modules' docstrings.

In README.md and docs/ a table stands between `<!-- table: NAME -->` and `<!-- end -->`. This script renders all
of them anew; with --check it changes nothing and exits with 1 if a page differs. Needs no torch.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

MINUS = "\N{MINUS SIGN}"

Row = dict[str, Any]
Lines = Iterable[str]

FORWARD_BARS: dict[tuple[int, int | None], dict[str, float]] = {
    (8 << 10, None): {"graph": 0.32, "eager": 0.50},
    (32 << 10, None): {"graph": 1.3},
    (128 << 10, None): {"graph": 4.2},
    (512 << 10, None): {"graph": 26},
    (1 << 20, None): {"graph": 80},
    (512 << 10, 16): {"graph": 20},
    (1 << 20, 16): {"graph": 42},
    (3 << 20, 16): {"graph": 160},
}
"""Milliseconds wanted of the forward, by N and `num_cmp`; set before the kernels were written."""

BACKWARD_BARS: dict[tuple[int, int | None], tuple[float, float | None]] = {
    (32 << 10, None): (4.8, None),
    (128 << 10, None): (18, 3.0),
    (512 << 10, None): (120, None),
    (1 << 20, None): (330, 24),
    (512 << 10, 16): (95, None),
    (1 << 20, 16): (200, None),
}
"""Milliseconds, and GiB, wanted of forward + backward."""

SFNSA = {8: (2.66, 8.78), 32: (13.7, 45.5), 64: (36.8, 119), 128: (111, 352)}
"""Milliseconds of SFNSA, forward and forward + backward, by N in K; measured once, when the bars were set."""

TILE_GROUP = 64
"""Query heads per key/value head from which the selected branch runs query-outer (attend/query_outer.py)."""

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


@cache
def load(name: str) -> Any:
    """The results file of that name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def ms(value: float | None) -> str:
    """Three significant digits; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def tokens(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 and n % (1 << 20) == 0 else f"{n >> 10}K"


def dense_ms(row: Row) -> str:
    """~ marks a time extrapolated by N^2."""
    return f"{'~' if row['dense_extrapolated'] else ''}{ms(row['dense_ms'])}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |") for cells in lines]


def source(page: Path, *names: str) -> list[str]:
    """Where the figures come from: file, commit, device and command of each."""
    lines = [""]
    for name in names:
        content = load(name)
        command = content.get("command") or content["rows"][0]["command"]
        link = f"[{name}.json]({os.path.relpath(RESULTS / name, page.parent)}.json)"
        commit, _, changes = content["commit"].partition("+")
        state = f"commit `{commit[:7]}`{' with changes' if changes else ''}"
        lines.append(f"{link}, {state}, {content['device']}: `{command}`<br>")
    lines[-1] = lines[-1].removesuffix("<br>")
    return lines


def conclusion(page: Path, name: str) -> Lines:
    """What a run says of itself, and where its figures come from."""
    yield ""
    yield load(name)["verdict"]
    yield from source(page, name)


def by_mode(rows: Iterable[Row]) -> dict[tuple[int, int | None], dict[str, Row]]:
    """Rows of an end-to-end file: by N and `num_cmp`, then by mode."""
    found: dict[tuple[int, int | None], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["n"], row["num_cmp"]), {})[row["mode"]] = row
    return found


# NSA, selection per tile


def nsa_forward(page: Path) -> Lines:
    rows = by_mode(load("e2e-h200")["rows"])

    def pair(n: int, num_cmp: int | None) -> str:
        return " / ".join(ms(rows[n, num_cmp][mode]["ms_p50"]) for mode in ("graph", "eager"))

    def bar(n: int, num_cmp: int | None) -> str:
        return " / ".join(f"{wanted:g}" for wanted in FORWARD_BARS.get((n, num_cmp), {}).values())

    lengths = sorted({n for n, _ in rows})
    cells = [
        [
            tokens(n),
            dense_ms(rows[n, None]["graph"]),
            pair(n, None),
            bar(n, None),
            pair(n, 16),
            bar(n, 16),
            f"{rows[n, None]['graph']['peak_gib']:.2f}",
        ]
        for n in lengths
    ]
    head = ["N", "dense FA4", "NSA, graph / eager", "bar", "NSA, c=16, graph / eager", "bar", "GiB"]
    yield from table(head, cells)
    yield ""
    yield verdict(
        (f"{tokens(n)} {'' if c is None else 'c=16 '}{mode}", rows[n, c][mode]["ms_p50"] <= wanted)
        for (n, c), modes in FORWARD_BARS.items()
        for mode, wanted in modes.items()
    )
    yield from source(page, "e2e-h200")


def verdict(bars: Iterable[tuple[str, bool]]) -> str:
    """One sentence about bars, by name and whether they are reached."""
    bars = list(bars)
    missed = [name for name, reached in bars if not reached]
    but = f"; missed: {', '.join(missed)}" if missed else ""
    return f"{len(bars) - len(missed)} of {len(bars)} bars are reached{but}."


def verdict_of(content: Row) -> str:
    """About the bars that a file holds."""
    return verdict((bar["bar"], bar["verdict"] == "pass") for bar in content["bars"])


def nsa_backward(page: Path) -> Lines:
    rows = by_mode(load("e2e-h200-backward")["rows"])

    def cell(n: int, num_cmp: int | None) -> str:
        row = rows[n, num_cmp]["eager"]
        return f"{ms(row['ms_p50'])} [{row['peak_gib']:.2f}]"

    def bar(n: int, num_cmp: int | None) -> str:
        wanted, gib = BACKWARD_BARS.get((n, num_cmp), (None, None))
        return "" if wanted is None else f"{wanted:g}{'' if gib is None else f' [{gib:g}]'}"

    lengths = sorted({n for n, _ in rows})
    cells = [
        [tokens(n), dense_ms(rows[n, None]["eager"]), cell(n, None), bar(n, None), cell(n, 16), bar(n, 16)]
        for n in lengths
    ]
    yield from table(["N", "dense FA4", "NSA [GiB]", "bar", "NSA, c=16 [GiB]", "bar"], cells)
    yield ""

    def reached(n: int, num_cmp: int | None, wanted: float, gib: float | None) -> bool:
        row = rows[n, num_cmp]["eager"]
        return bool(row["ms_p50"] <= wanted and (gib is None or row["peak_gib"] <= gib))

    yield verdict(
        (f"{tokens(n)}{'' if c is None else ' c=16'}", reached(n, c, *wanted))
        for (n, c), wanted in BACKWARD_BARS.items()
    )
    yield from source(page, "e2e-h200-backward")


def nsa_recompute(page: Path) -> Lines:
    kept = by_mode(load("e2e-h200-backward")["rows"])
    again = by_mode(load("e2e-h200-recompute")["rows"])
    cells = []
    for (n, num_cmp), modes in again.items():
        pair = kept[n, num_cmp]["eager"], modes["eager"]
        cells.append([tokens(n), *(f"{ms(row['ms_p50'])} [{row['peak_gib']:.2f}]" for row in pair)])
    yield from table(["N, c=16", "outputs kept, ms [GiB]", "`recompute=True`, ms [GiB]"], cells)
    yield from source(page, "e2e-h200-recompute")


def nsa_block_sizes(page: Path) -> Lines:
    names = ("e2e-h200-l32", "e2e-h200", "e2e-h200-l128")
    files = [by_mode(load(name)["rows"]) for name in names]
    lengths = sorted({n for n, _ in files[0]})
    cells = [
        [tokens(n), *(ms(rows[n, num_cmp]["graph"]["ms_p50"]) for rows in files for num_cmp in (None, 16))]
        for n in lengths
    ]
    head = ["N", "l=32, l'=64", "c=16", "l=l'=64", "c=16", "l=l'=128", "c=16"]
    yield from table(head, cells)
    yield from source(page, *names)


def nsa_cases(page: Path) -> Lines:
    names = ("e2e-h200-h32", "e2e-h200-sink")
    cells = []
    for name in names:
        for (n, num_cmp), modes in by_mode(load(name)["rows"]).items():
            if num_cmp is None:
                row = modes["graph"]
                case = f"{row['h']} heads over {row['h_kv']}" + (", attention sink" if row["inputs"] == "sink" else "")
                cells.append([case, tokens(n), dense_ms(row), ms(row["ms_p50"]), ms(modes["eager"]["ms_p50"])])
    yield from table(["case", "N", "dense FA4", "NSA, graph", "eager"], cells)
    yield from source(page, *names)


def nsa_long(page: Path) -> Lines:
    rows = by_mode(load("e2e-h200-long")["rows"])
    cells = [
        [
            tokens(n),
            ms(modes["graph"]["ms_p50"]),
            percent(modes["graph"]["share_of_floor"]),
            f"{modes['graph']['peak_gib']:.1f}",
            dense_ms(modes["graph"]),
        ]
        for (n, _), modes in rows.items()
    ]
    yield from table(["N", "NSA, c=16, ms", "of the roofline", "GiB beside inputs", "dense FA4, ms"], cells)
    yield from source(page, "e2e-h200-long")


def nsa_longest(page: Path) -> Lines:
    names = ("probe-h200-nsa", "probe-h200-nsa-backward", "probe-h200-dense")
    cells = []
    for name in names:
        content = load(name)
        settings, bracket = content["settings"], content["bracket"]
        op = "dense FA4" if settings["op"] == "dense" else "NSA, c=16"
        passes = ("forward + backward" if settings["backward"] else "forward") + (
            ", `recompute=True`" if settings.get("recompute") else ""
        )
        (seconds,) = (trial["seconds"] for trial in content["trials"] if trial["n"] == bracket["fits"])
        why = {"oom": "out of memory", "timeout": "stopped by its time limit"}[bracket["why"]]
        cells.append([op, passes, f"{bracket['fits']:,}", f"{seconds:.1f}", f"{bracket['fails']:,}: {why}"])
    yield from table(["op", "pass", "longest N", "s, with compilation", "next N tried"], cells)
    yield from source(page, *names)


def varlen(page: Path) -> Lines:
    names = ("varlen-h200", "varlen-h200-backward")
    first, second = ({row["name"]: row for row in load(name)["rows"]} for name in names)
    lengths = load(names[0])["lengths"]
    yield f"{len(lengths)} documents of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} in all:"
    yield ""
    cells = [
        [
            name,
            *(cell for rows in (first, second) for cell in (ms(rows[name]["ms_p50"]), f"{rows[name]['peak_gib']:.1f}")),
        ]
        for name in first
    ]
    yield from table(["", "forward, ms", "GiB beside inputs", "forward + backward, ms", "GiB in all"], cells)
    yield from source(page, *names)


def stages(name: str, labels: dict[str, tuple[str, str]]) -> Callable[[Path], Lines]:
    def render(page: Path) -> Lines:
        rows = {(row["stage"], row["num_cmp"], row["n"]): row for row in load(name)["rows"]}
        lengths = sorted({n for _, _, n in rows})

        def cell(stage: str, num_cmp: int | None, n: int) -> str:
            row = rows.get((stage, num_cmp, n))
            if row is None:
                return ""
            share = f" ({percent(row['share'])})" if row["share"] and row["share"] >= 0.005 else ""
            return f"{row['ms']:#.3g}".rstrip(".") + share

        cells = []
        for stage, (label, limit) in labels.items():
            for num_cmp in (None, 16):
                changes = num_cmp is None or stage in ("compressed", "all", "score, cmp", "backward")
                if changes and any((stage, num_cmp, n) in rows for n in lengths):
                    shown = label if num_cmp is None or stage == "score, cmp" else f"{label}, c=16"
                    cells.append([shown, *(cell(stage, num_cmp, n) for n in lengths), limit])
        yield from table(["stage", *map(tokens, lengths), "bound by"], cells)
        yield from source(page, name)

    return render


# NSA, selection per token


def paper(page: Path) -> Lines:
    content = load("paper-h200")
    modes = {(row["n"], row["pass"], row["mode"]): row for row in content["rows"]}
    wanted = {
        bar["bar"]: re.sub(r"[^\d.]", "", bar["wanted"]) for bar in content["bars"] if bar["wanted"].endswith(" ms")
    }
    cells = []
    for (n, of, mode), row in modes.items():
        if mode != "queued":
            continue
        others = (modes.get((n, of, other)) for other in ("eager", "graph"))
        cells.append(
            [
                tokens(n) if of == "fwd" else "",
                of,
                ms(row["ms_p50"]),
                *(ms(other and other["ms_p50"]) for other in others),
                wanted.get(f"{tokens(n)} {of}", ""),
                ms(row["dense_ms"]),
                ms(row["fla_ms"]),
                f"{SFNSA[n >> 10][of != 'fwd']:g}",
                percent(row["share_of_floor"]),
                f"{row['peak_gib']:.1f}",
            ]
        )
    head = ["N", "pass", "NSA", "idle GPU", "graph", "bar", "dense FA4", "fla", "SFNSA", "of the roofline", "GiB"]
    yield from table(head, cells)
    yield ""
    bars = [(bar["bar"], bar["verdict"] == "pass") for bar in content["bars"]]
    yield verdict(bar for bar in bars if "stretch" not in bar[0])
    yield "Stretch bars: " + verdict(bar for bar in bars if "stretch" in bar[0]).replace(", stretch", "")
    both = modes[64 << 10, "fwd+bwd", "queued"]
    yield f"Memory of forward + backward at 64K: {both['peak_gib']:.1f} GiB (SFNSA 12.7, fla {both['fla_gib']:.1f})."
    yield from source(page, "paper-h200")


def token_selected(page: Path) -> Lines:
    content = load("token-selected-h200")
    rows = {(row["n"], row["h"], row["h_kv"], row["choice"], row["stage"]): row for row in content["rows"]}
    names = {
        "random": "random",
        "local": "local, weight 1 / distance",
        "text": "from a text's embeddings",
        "file": "by a trained model",
    }
    cells = []
    for n, h, h_kv, choice in dict.fromkeys(key[:4] for key in rows):
        stages = {stage: row for (*key, stage), row in rows.items() if key == [n, h, h_kv, choice]}
        fla = stages["forward"]["fla_ms"], stages["both"]["fla_ms"]
        cells.append(
            [
                tokens(n),
                f"{h} over {h_kv}",
                names[choice],
                ms(stages["forward"]["ms"]),
                ms(stages["tiles"]["ms"]),
                ms(stages["both"]["ms"]),
                "takes no 4 heads a group" if None in fla else " / ".join(map(ms, fla)),
            ]
        )
    head = ["N", "heads", "blocks chosen", "KV-outer fwd", "query-outer fwd", "KV-outer fwd+bwd", "fla fwd / fwd+bwd"]
    yield from table(head, cells)
    yield from source(page, "token-selected-h200")


# Neighborhood attention and attention residual


def shape_of(row: Row) -> str:
    return ",".join(str(row[name]) for name in ("b", "h", "s", "d", "k", "dilation")).removesuffix(",1")


def neighborhood(page: Path) -> Lines:
    cells = []
    for row in load("neighborhood-h200")["rows"]:
        if row["default"]:
            peers = [ms(row[f"{peer}_ms"]) for peer in ("fa4", "flex", "liger")]
            shape = shape_of(row) if row["pass"] == "fwd" else ""
            cells.append([shape, row["pass"], ms(row["ms_p50"]), percent(row["share_of_floor"]), *peers])
    head = ["B,H,S,D,k[,dilation]", "pass", "ours", "of the floor", "FA4 window", "flex_attention", "Liger"]
    yield from table(head, cells)
    yield from source(page, "neighborhood-h200")


def decoding(page: Path) -> Lines:
    """Steps of one token of 64 heads over 4."""
    content = load("decode-h200")
    by_case: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in content["rows"]:
        if (row["op"], row["h"], row["n_q"]) == ("decode", 64, 1):
            by_case.setdefault((row["preset"], row["n"], row["b"]), {})[row["mode"]] = row
    cells = []
    for (preset, n, batch), modes in by_case.items():
        graph, eager = modes["graph"], modes["eager"]
        times = (1000 * row for row in (graph["ms_p50"], eager["ms_p50"], graph["floor_ms"]))
        peers = (f"{1000 * graph[peer]:,.0f}" for peer in ("dense_ms", "fla_ms"))
        mode = {"paper": "token", "per_tile": "tile"}[preset]
        cells.append([mode, tokens(n), f"{batch}", *(f"{us:.1f}" for us in times), *peers])
    yield from table(["mode", "tokens", "batch", "graph, us", "eager", "floor", "dense SDPA", "fla"], cells)
    yield from source(page, "decode-h200")
    yield ""
    yield verdict_of(content)


STEP_MODELS = {"nsa": "NSA", "dense": "dense", "dense_unmasked": "dense without a mask"}


def generating_steps() -> dict[tuple[int, int, bool], dict[tuple[str, str], float]]:
    """Milliseconds by N, batch and whether it is padded, then by mode and model."""
    by_case: dict[tuple[int, int, bool], dict[tuple[str, str], float]] = {}
    for row in load("generate-h200")["rows"]:
        case = row["n"], row["b"], row.get("padded", False)
        by_case.setdefault(case, {})[row["mode"], row["model"]] = row["ms_p50"]
    return by_case


def generating(page: Path) -> Lines:
    steps = generating_steps()
    columns = [
        column
        for column in product(("graph", "compiled", "eager"), STEP_MODELS)
        if any(column in step for step in steps.values())
    ]
    cells = [
        [tokens(n), f"{batch}{', padded' if padded else ''}", *(ms(step.get(column)) for column in columns)]
        for (n, batch, padded), step in steps.items()
    ]
    yield from table(["tokens", "batch", *(f"{STEP_MODELS[model]}, {mode}" for mode, model in columns)], cells)
    yield from source(page, "generate-h200")
    yield ""
    yield verdict_of(load("generate-h200"))


BLOCK_SPARSE = {"block_sparse": "attention", "top_blocks": "choice of blocks", "m3_layer": "layer of MiniMax-M3"}


def block_sparse(page: Path) -> Lines:
    content = load("block-sparse-h200")
    branch = {
        ("fwd+bwd" if row["stage"] == "both" else "fwd"): row["ms"]
        for row in load("token-selected-h200")["rows"]
        if (row["n"], row["h"], row["h_kv"], row["choice"]) == (64 << 10, 64, 4, "random")
        and row["stage"] in ("forward", "both")
    }
    cells = []
    for row in content["rows"]:
        what = BLOCK_SPARSE[row["op"]] + (f", blocks of {row['block']}" if row["op"] == "block_sparse" else "")
        peers = (ms(row[f"{peer}_ms"]) for peer in ("dense", "mask", "pairs"))
        same = (row["op"], row["block"], row["n"]) == ("block_sparse", 64, 64 << 10)
        selected = ms(branch[row["pass"]]) if same else ""
        share = percent(row["share_of_floor"])
        cells.append([what, tokens(row["n"]), row["pass"], ms(row["ms_p50"]), share, *peers, selected])
    head = ["", "tokens", "pass", "ours", "of the floor", "dense FA4", "SDPA, mask of pairs", "PyTorch, all pairs"]
    yield from table([*head, "selected branch"], cells)
    yield from source(page, "block-sparse-h200")
    yield ""
    yield verdict_of(content)


def residual(page: Path) -> Lines:
    cells = []
    for row in load("attnres-h200")["rows"]:
        problem = f"{row['t']}, {row['d']}{', list' if row['inputs'] == 'list' else ''}"
        cells.append(
            [
                problem if row["pass"] == "fwd" else "",
                row["pass"],
                ms(row["ms_p50"]),
                percent(row["share_of_floor"]),
                *(ms(row[f"{peer}_ms"]) for peer in ("liger", "compile", "eager")),
                ms(row["wall_ms"]),
                f"{row['peak_mib']:,.1f}",
                f"{row['floor_mib']:,.0f}",
            ]
        )
    head = ["T, D", "pass", "ms", "of the floor", "Liger", "torch.compile", "eager", "from Python", "MiB", "least"]
    yield from table(head, cells)
    yield from source(page, "attnres-h200")


def residual_bars(page: Path) -> Lines:
    content = load("attnres-h200")
    yield verdict_of(content)
    yield ""
    groups: dict[tuple[str, str], list[str]] = {}
    for bar in content["bars"]:
        problem, _, what = bar["bar"].partition(": ")
        way = problem.split()[-1]
        shown = f"{problem.removesuffix(way)}{way}: {what}" if "memory" in what else f"{way}: {what}"
        groups.setdefault((shown, bar["wanted"]), []).append(bar["reached"])
    yield from table(
        ["bar", "problems", "wanted", "reached"],
        ([what, str(len(found)), wanted, span(found)] for (what, wanted), found in groups.items()),
    )
    rows = content["rows"]
    lowest = min(rows, key=lambda row: row["share_of_floor"])
    short = min(min(row[f"{peer}_wall_ms"] for peer in ("liger", "compile", "eager")) / row["wall_ms"] for row in rows)
    yield ""
    where = f"{lowest['pass']} at T = {lowest['t']}, D = {lowest['d']}"
    yield f"The lowest share of the floor is {100 * lowest['share_of_floor']:.1f} %: {where}."
    yield f"From Python the fastest peer takes at least {short:.2f} times as long in each of the {len(rows)} rows."


def span(reached: Sequence[str]) -> str:
    """The least and the largest of figures with one unit."""
    figures = sorted(reached, key=lambda text: float(re.sub(r"[^\d.]", "", text)))
    return figures[0] if len(set(figures)) == 1 else f"{figures[0]} to {figures[-1]}"


# Where peers are faster


def losses(page: Path) -> Lines:
    """Every measured case in which a peer takes less time than what a call gets by default."""
    cells = []

    def hold(what: str, own: float, peers: dict[str, float | None]) -> None:
        faster = {name: took for name, took in peers.items() if took is not None and took < own}
        if faster:
            cells.append([what, ms(own), ", ".join(f"{name} {ms(took)}" for name, took in faster.items())])

    for name in ("e2e-h200", "e2e-h200-l32", "e2e-h200-l128", "e2e-h200-h32", "e2e-h200-backward"):
        for row in load(name)["rows"]:
            if row["num_cmp"] is None:
                case = f"l={row['l']}, {row['h']} heads over {row['h_kv']}, {tokens(row['n'])}"
                hold(
                    f"NSA per tile, {case}, {row['pass']}, {row['mode']}", row["ms_p50"], {"dense FA4": row["dense_ms"]}
                )
    for row in load("paper-h200")["rows"]:
        case = f"NSA per token, {row['h']} heads over {row['h_kv']}, {tokens(row['n'])}, {row['pass']}, {row['mode']}"
        hold(case, row["ms_p50"], {"dense FA4": row["dense_ms"], "fla": row["fla_ms"]})
    for row in load("token-selected-h200")["rows"]:
        outer = "tiles" if row["h"] // row["h_kv"] >= TILE_GROUP else "forward"
        if row["stage"] in (outer, "both"):
            fla = {
                other["stage"]: other["fla_ms"]
                for other in load("token-selected-h200")["rows"]
                if all(other[key] == row[key] for key in ("n", "h", "h_kv", "choice"))
            }["both" if row["stage"] == "both" else "forward"]
            case = f"{row['h']} heads over {row['h_kv']}, {tokens(row['n'])}, {row['choice']}"
            what = "fwd+bwd" if row["stage"] == "both" else "fwd"
            hold(f"selected branch alone, {case}, {what}", row["ms"], {"fla": fla})
    for row in load("block-sparse-h200")["rows"]:
        case = f"{BLOCK_SPARSE[row['op']]}, blocks of {row['block']}, {tokens(row['n'])}, {row['pass']}"
        hold(f"block-sparse {case}", row["ms_p50"], {"dense FA4": row["dense_ms"], "SDPA": row["mask_ms"]})
    for row in load("decode-h200")["rows"]:
        if row["mode"] == "graph":  # as peers' steps are
            mode = "tile" if row["preset"] == "per_tile" else "token"
            case = f"{row['h']} heads over {row['h_kv']}, {tokens(row['n'])}, batch {row['b']}"
            what = f"decoding per {mode}, {row['n_q']} a step, {case}"
            hold(what, row["ms_p50"], {"SDPA": row.get("dense_ms"), "fla": row.get("fla_ms")})
    for (n, batch, padded), step in generating_steps().items():
        for mode in sorted({mode for mode, model in step if model == "nsa"}, reverse=True):
            case = f"a step of generate, {tokens(n)}, batch {batch}{', padded' if padded else ''}, {mode}"
            hold(
                case,
                step[mode, "nsa"],
                {STEP_MODELS[peer]: step.get((mode, peer)) for peer in STEP_MODELS if peer != "nsa"},
            )
    for row in load("neighborhood-h200")["rows"]:
        if row["default"]:
            peers = {name: row[f"{key}_ms"] for key, name in (("fa4", "FA4"), ("flex", "flex"), ("liger", "Liger"))}
            hold(f"neighborhood attention, {shape_of(row)}, {row['pass']}", row["ms_p50"], peers)
    for row in load("attnres-h200")["rows"]:
        for clock in ("", "_wall"):
            peers = {name: row[f"{name}{clock}_ms"] for name in ("liger", "compile", "eager")}
            own = row["wall_ms" if clock else "ms_p50"]
            hold(
                f"attention residual, T={row['t']}, D={row['d']}, {row['pass']}{', from Python' if clock else ''}",
                own,
                peers,
            )
    yield from table(["case", "ours, ms", "faster, ms"], cells)


# CPU demo, training, long runs


def demo(page: Path) -> Lines:
    content = load("e2e-cpu")
    cells = [
        [
            f"{row['n']:,}",
            ms(row["dense_ms"]),
            ms(row["ms_p50"]),
            f"{row['speedup']:.2f}x",
            f"{row['speedup_p20']:.2f}x to {row['speedup_p80']:.2f}x",
        ]
        for row in content["rows"]
    ]
    yield from table(["N", "dense, ms", "NSA, ms", "speed-up", "20th to 80th percentile"], cells)
    yield from conclusion(page, "e2e-cpu")


def training(name: str) -> Callable[[Path], Lines]:
    def render(page: Path) -> Lines:
        content = load(name)
        best: dict[str, Row] = {}
        for row in content["rows"]:
            if row["val_loss"] < best.setdefault(row["variant"], row)["val_loss"]:
                best[row["variant"]] = row
        cells = []
        for row in content["summary"]:
            relative, lowest = row["relative_to_dense"], best[row["variant"]]
            cells.append(
                [
                    f"`{row['variant']}`",
                    f"{row['final_val_loss']:.4f}",
                    "" if row["variant"] == "dense" else f"{100 * (relative - 1):+.1f} %".replace("-", MINUS),
                    f"{lowest['val_loss']:.4f} (step {lowest['step']})",
                ]
            )
        yield from table(["variant", "final validation loss", "against dense", "lowest"], cells)
        yield from conclusion(page, name)

    return render


def needle(page: Path) -> Lines:
    content = load("needle-h200")
    cells = [
        [f"`{row['variant']}`", f"{100 * row['accuracy']:.1f} %", f"{row['final_val_loss']:.3f}"]
        for row in content["summary"]
    ]
    yield from table(["variant", "answers right", "loss of the answers"], cells)
    yield from conclusion(page, "needle-h200")


def residual_training(page: Path) -> Lines:
    content = load("train-residual-cpu")
    cells = [
        [f"`{row['variant']}`", f"{row['final_val_loss']:.3f}", f"{row['bits_per_byte']:.3f}"]
        for row in content["summary"]
    ]
    yield from table(["variant", "final validation loss", "bits per byte"], cells)
    yield from conclusion(page, "train-residual-cpu")


def conversion(page: Path) -> Lines:
    content = load("convert-llama-cpu")
    training, before, after = content["training"], content["dense_loss"], content["dense_trained_loss"]
    cells = [["(dense)", "", f"{before:.3f}", "", f"{after:.3f}", ""]]
    for row in content["rows"]:
        jump, left = row["converted_loss"] - before, row["trained_loss"] - after
        gates = ", ".join(f"{gate:.2f}" for gate in row["gates"])
        losses = (f"{row['converted_loss']:.3f}", f"{jump:+.3f}", f"{row['trained_loss']:.3f}", f"{left:+.3f}")
        cells.append([row["start"], gates, *(text.replace("-", MINUS) for text in losses)])
    later = f"{training['more']} steps later"
    yield from table(["start", "gates", "validation loss", "jump", later, "against dense"], cells)
    yield from source(page, "convert-llama-cpu")


def context_parallel(name: str) -> Callable[[Path], Lines]:
    """Ranks that call together."""

    def lines(page: Path) -> Lines:
        content = load(name)
        times = {
            (row["preset"], row["ranks"], row["mode"], row["pass"], row["rank"]): row["ms"] for row in content["rows"]
        }
        cells = []
        for share in content["shares"]:
            preset, ranks, direction = share["preset"], share["ranks"], share["pass"]
            sizes = next(f"{row['h']}/{row['h_kv']}" for row in content["rows"] if row["preset"] == preset)
            together, alone = (
                max(times[preset, ranks, mode, direction, rank] for rank in range(ranks))
                for mode in ("together", "alone")
            )
            figures = (
                times[preset, 1, "alone", direction, 0],
                together,
                alone,
                share["messages_ms"],
                share["not_hidden_ms"],
            )
            memory = f"{share['peak_gib']:.1f} ({share['bound_gib']:.1f})"
            case = f"{preset.replace('_', ' ')}, {sizes}, {tokens(share['n'])}"
            cells.append([case, direction, *map(ms, figures), f"{share['speedup']:.2f}x", memory])
        times_ms = ("one GPU, ms", "together", "keys there already", "messages alone", "not hidden")
        yield from table(["", "pass", *times_ms, "speed-up", "peak GiB (bound)"], cells)
        yield ""
        for link in content["links"]:
            yield f"{link['collective']}: alpha {link['alpha_us']:.0f} us, beta {link['beta_gbs']:.0f} GB/s.<br>"
        yield from source(page, name)
        yield ""
        yield verdict_of(content)

    return lines


def context_shares(page: Path) -> Lines:
    content = load("context-parallel-h100")
    times: dict[tuple[Any, ...], list[float]] = {}
    for row in content["rows"]:
        times.setdefault((row["preset"], row["ranks"], row["pass"]), []).append(row["ms"])
    cells = []
    for share in sorted(content["shares"], key=lambda s: (s["preset"] == "paper", s["pass"], s["ranks"])):
        preset, ranks, direction = share["preset"], share["ranks"], share["pass"]
        sizes = next(f"{row['h']}/{row['h_kv']}" for row in content["rows"] if row["preset"] == preset)
        name = f"{preset.replace('_', ' ')}, {sizes}, {tokens(share['n'])}"
        (undivided,), own = times[preset, 1, direction], times[preset, ranks, direction]
        ratios = (f"{share[ratio]:.3f}" for ratio in ("slowest_over_mean", "sum_over_single"))
        cells.append([name, direction, str(ranks), ms(undivided), ms(max(own)), *ratios])
    heads = ("", "pass", "ranks", "undivided, ms", "slowest rank, ms", "over the mean", "all over undivided")
    yield from table(list(heads), cells)
    yield from source(page, "context-parallel-h100")
    yield ""
    yield verdict_of(content)


def soak(page: Path) -> Lines:
    content = load("soak-h200")
    runs = f"{content['minutes']:g} minutes in {len(content['runs'])} runs"
    yield f"{runs}, {content['steps']:,} steps, {content['tokens']:,} tokens:"
    yield ""
    cells = ([bar["bar"], bar["wanted"], bar["reached"], bar["verdict"]] for bar in content["bars"])
    yield from table(["bar", "wanted", "reached", ""], cells)
    yield from source(page, "soak-h200")


# Blackwell


def blackwell(page: Path) -> Lines:
    """What was executed, by form."""
    by_form: dict[str, list[Row]] = {}
    for row in load("blackwell-executed")["cases"]:
        by_form.setdefault(row["form"], []).append(row)
    cells = []
    for form, rows in by_form.items():
        sizes = sorted({(row["d"], row["d_v"]) for row in rows})
        types = sorted({{"bfloat16": "bf16", "float16": "fp16"}[row["dtype"]] for row in rows})
        worst = max(rows, key=lambda row: row["error"] / row["budget"])
        counts = (", ".join(map(str, sorted({row[name] for row in rows}))) for name in ("group", "rows"))
        dims = ", ".join(str(d) if d == d_v else f"{d}/{d_v}" for d, d_v in sizes)
        error = f"{worst['error']:.1e} of {worst['budget']:.1e}"
        schedules = ", ".join(sorted({row["schedule"] for row in rows}))
        cells.append([form, dims, ", ".join(types), *counts, schedules, f"{error} ({worst['result']})"])
    yield from table(["form", "D, D/D_v", "dtype", "G", "rows", "schedule", "nearest to its budget"], cells)
    yield from source(page, "blackwell-executed")


def blackwell_kernels(page: Path) -> Lines:
    """In how many cases each kernel ran."""
    cases = load("blackwell-executed")["cases"]
    kernels = sorted({kernel for row in cases for kernel in row["kernels"]})
    yield from table(
        ["kernel", "of", "cases"],
        (
            [
                f"`{kernel}`",
                "FlashAttention-4" if kernel.startswith("FlashAttention") else "here",
                str(sum(kernel in row["kernels"] for row in cases)),
            ]
            for kernel in kernels
        ),
    )


def blackwell_deletions(page: Path) -> Lines:
    """Instructions left out one at a time, and what noticed it."""
    deletions = load("blackwell-executed")["deletions"]
    cells = []
    for kernel in dict.fromkeys(row["kernel"] for row in deletions):
        rows = [row for row in deletions if row["kernel"] == kernel and row["executed"]]
        matter = [row for row in rows if not row["reason"]]
        found = [row for row in matter if row["found"]]
        by = ", ".join(
            f"{sum(row['by'].partition(':')[0] == what for row in found)} by {what}"
            for what in dict.fromkeys(row["by"].partition(":")[0] for row in found)
        )
        every = sum(row["kernel"] == kernel for row in deletions)
        shares = [f"{100 * len(found) / len(of):.0f} %" if of else "" for of in (rows, matter)]
        cells.append([kernel, *map(str, (every, len(rows), len(rows) - len(matter), len(found))), *shares, by])
    head = ["kernel", "instructions that order", "executed", "change nothing", "found"]
    head += ["of the executed", "of those that matter", "by"]
    yield from table(head, cells)
    yield ""
    reasons = Counter(row["reason"] for row in deletions if row["executed"] and row["reason"])
    yield from table(["why it changes nothing", "deletions"], ([why, str(n)] for why, n in reasons.most_common()))
    if missed := [row for row in deletions if row["executed"] and not row["found"] and not row["reason"]]:
        yield ""
        yield from table(["not found", "in"], ([f"`{row['instruction'][:90]}`", row["kernel"]] for row in missed))


# README


def speed(page: Path) -> Lines:
    forward, both = by_mode(load("e2e-h200")["rows"]), by_mode(load("e2e-h200-backward")["rows"])
    token = {(row["n"], row["pass"]): row for row in load("paper-h200")["rows"] if row["mode"] == "queued"}
    near = {(shape_of(row), row["pass"]): row for row in load("neighborhood-h200")["rows"] if row["default"]}
    mixed = {(row["t"], row["d"], row["inputs"], row["pass"]): row for row in load("attnres-h200")["rows"]}
    cells = []
    for n, of, rows, mode in (
        (8 << 10, "fwd, graph", forward, "graph"),
        (8 << 10, "fwd + bwd", both, "eager"),
        (128 << 10, "fwd", forward, "eager"),
        (128 << 10, "fwd + bwd", both, "eager"),
        (1 << 20, "fwd", forward, "eager"),
        (1 << 20, "fwd + bwd", both, "eager"),
    ):
        row = rows[n, None][mode]
        cells.append(
            [f"NSA per tile, 8 heads over 2, {tokens(n)}", of, ms(row["ms_p50"]), f"dense FA4 {dense_ms(row)}"]
        )
    for of in ("fwd", "fwd+bwd"):
        row = token[64 << 10, of]
        shown = f"fla {ms(row['fla_ms'])}, dense FA4 {ms(row['dense_ms'])}"
        cells.append(["NSA per token (paper), 64 over 4, 64K", of.replace("+", " + "), ms(row["ms_p50"]), shown])
    row = near["4,32,8192,128,9", "fwd+bwd"]
    shown = f"FA4 window {ms(row['fa4_ms'])}, flex {ms(row['flex_ms'])}"
    cells.append(["neighborhood attention, [4, 8K, 32, 128], k=9", "fwd + bwd", ms(row["ms_p50"]), shown])
    row = mixed[8192, 4096, "stacked", "fwd+bwd"]
    shown = f"Liger {ms(row['liger_ms'])}, eager {ms(row['eager_ms'])}"
    cells.append(["attention residual, 8 blocks of [8K, 4096]", "fwd + bwd", ms(row["ms_p50"]), shown])
    yield from table(["op", "pass", "ms", "beside it, ms"], cells)


# File map

MAPPED = (
    "nsa",
    "dispatch",
    "cute_kernels",
    "ascend_kernels",
    "bench",
    "examples",
    "tools",
    "tests/support",
)


def files(page: Path) -> Lines:
    """Every module of MAPPED, a folder by its `__init__.py`, with the first sentence of its docstring."""
    for folder in MAPPED:
        paths = sorted((ROOT / folder).rglob("*.py"), key=lambda path: (path.parent, path.name != "__init__.py", path))
        cells = []
        for path in paths:
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            first = " ".join(docstring.partition("\n\n")[0].split())
            sentence = re.split(r"(?<=[.!?]) (?=[A-Z])", first)[0].removesuffix(".")
            shown = path.parent if path.name == "__init__.py" else path
            name = f"{shown.relative_to(ROOT).as_posix()}{'/' if shown != path else ''}"
            if sentence:
                cells.append([f"`{name}`", sentence.replace("|", "\\|")])
        yield f"### {folder}"
        yield ""
        yield from table(["file", "holds"], cells)
        yield ""


TABLES: dict[str, Callable[[Path], Lines]] = {
    "speed": speed,
    "nsa-forward": nsa_forward,
    "nsa-backward": nsa_backward,
    "nsa-recompute": nsa_recompute,
    "nsa-block-sizes": nsa_block_sizes,
    "nsa-cases": nsa_cases,
    "nsa-long": nsa_long,
    "nsa-longest": nsa_longest,
    "varlen": varlen,
    "stages": stages("stages-h200", FORWARD_STAGES),
    "stages-backward": stages("stages-h200-backward", BACKWARD_STAGES),
    "paper": paper,
    "token-selected": token_selected,
    "neighborhood": neighborhood,
    "decoding": decoding,
    "generating": generating,
    "block-sparse": block_sparse,
    "residual": residual,
    "residual-bars": residual_bars,
    "losses": losses,
    "demo": demo,
    "train": training("train-h100"),
    "train-paper": training("train-paper-h100"),
    "needle": needle,
    "train-residual": residual_training,
    "convert-llama": conversion,
    "context-parallel": context_parallel("context-parallel-nccl-h100"),
    "context-parallel-4": context_parallel("context-parallel-nccl4-h200"),
    "context-shares": context_shares,
    "soak": soak,
    "blackwell": blackwell,
    "blackwell-kernels": blackwell_kernels,
    "blackwell-deletions": blackwell_deletions,
    "files": files,
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(page: Path, text: str) -> str:
    """A page's text with its tables made anew.

    Raises:
        SystemExit: for a table that does not exist.
    """

    def replace(match: re.Match[str]) -> str:
        start, name, _, end = match.groups()
        if name not in TABLES:
            raise SystemExit(f"{page.relative_to(ROOT)} asks for the table {name!r}; there are {', '.join(TABLES)}")
        return start + "\n".join(["", *TABLES[name](page), "", end])

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


if __name__ == "__main__":
    sys.exit(main())

"""A layer's step of decoding over paged keys, beside dense decoding and fla's, checked against fp64 first.

Each case is an `nsa_with_cache` of N_q new tokens for a batch of sequences that have N, pages shuffled. It is timed as
one of eight layers in a CUDA graph, as its peers are, and eagerly from an idle GPU. Layers have keys of their own, or
the next one would find them in L2. The layers' common part of a step (pages, lengths) is outside. Sampled rows are held
against fp64 before anything is timed: where one is above its budget, nothing is reported and the status is 1. A prompt
is appended in chunks, too, beside one call of `nsa_forward` on all of it: rows of op "prefill".

Dense decoding is PyTorch's SDPA with grouped heads over contiguous keys: of N_q tokens each sees all keys. fla's is
parallel_nsa of the last tokens over all keys, which it pools again, without its window, which is flash-attn's.

Writes OUT.json after every case (schema: docs/results_files.md). The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dispatch
from bench import common, oracles
from bench.bars import Bar, figure, ratio
from bench.common import DTYPES, PRESETS, head_counts, positive
from bench.oracles import Error
from bench.report import LOCAL_RESULTS, environment
from bench.results_file import Measurement, Row, hold, run
from bench.roofline import choose_peaks
from bench.timing import BUSY_CYCLES, Timing, capture, measure
from dispatch.device import first_line
from nsa import NSACache, NSAConfig, PageTable, nsa_forward, nsa_with_cache
from nsa.reference import score, select

SIZES = "8K:1,16,64,128 64K:1,16,64,128 1M:1,8"
PAGE_SIZE = 64
LAYERS = 8  # Calls in a CUDA graph that is timed
COLD_BYTES = 200 << 20
"""Least number of bytes that these calls read together, with enough copies of the keys: four times an H200's L2."""
CHECKED = 8  # Rows of a case that are held against fp64: a token with the heads of a group
NEAR_TIE = 1e-4  # Relative distance of two scores from which on kernels may choose another block (decode/choose.py)
HOST_ROUNDS, HOST_CALLS = 5, 20

MS_BARS = {(64 << 10, 1): 0.025, (64 << 10, 16): 0.085, (64 << 10, 64): 0.290, (1 << 20, 1): 0.065, (1 << 20, 8): 0.400}
"""By N and batch: 64 heads over 4, the paper's preset, one new token, as a graph."""
HOST_US_BAR = 150
FLA_BAR = 10  # Times that fla's step takes at 64K
PREFILL_BAR = 1.15  # Times of the whole call that its chunks may take
LINE = "{op} {preset} {h}/{h_kv} N={n} B={b} N_q={n_q} {mode:<6} {ms_p50:ms} ms  {share_of_floor:percent} of the floor"
LINE += "  host {host_us:.0f} us  dense {dense_ms:ms} ms  fla {fla_ms:ms} ms"


class Case(NamedTuple):
    """Fields of a row."""

    preset: str
    h: int
    h_kv: int
    n: int
    b: int
    n_q: int

    @property
    def name(self) -> str:
        return "{preset} {h}/{h_kv} N={n} B={b} N_q={n_q}".format(**self._asdict())

    def shapes(self, dim: int) -> list[tuple[int, int]]:
        """Shapes of a token's q, k, v and gates."""
        return [(self.h, dim), (self.h_kv, dim), (self.h_kv, dim), (self.h, 3)]


class Step(NamedTuple):
    """A case's tensors: one call of a layer, again and again."""

    case: Case
    config: NSAConfig
    cache: NSACache
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor
    backend: str

    def call(self) -> Tensor:
        """Each call writes the same tokens again, and in tile mode the sums of their queries, as a step's end does."""
        step = self.cache.table.open
        if step is None:
            raise RuntimeError("no step of the table is open")
        step.done.clear()
        out = nsa_with_cache(self.q, self.k, self.v, self.cache, gates=self.gates, backend=self.backend)
        while step.commits:
            step.commits.pop()()
        return out

    def copy(self) -> Step:
        """The step of another layer, with the same page table and pages of its own."""
        return self._replace(cache=copy.deepcopy(self.cache, {id(self.cache.table): self.cache.table}))

    def means(self, row: int, query: int, heads: slice) -> Tensor:
        """Queries that select a token's blocks `[heads,D]`: its own, or in tile mode the means of its tile so far."""
        tile, cached = self.config.q_tile_size, self.case.n - self.case.n_q
        token = cached + query
        first = token // tile * tile
        total = self.q[row, max(0, first - cached) : query + 1, heads].double().sum(0)
        if self.cache.tile_sums is not None and first < cached:
            total += self.cache.tile_sums[row, (cached - 1) % tile, heads].double()
        return total / (token - first + 1)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    facts = environment(device)
    peaks = choose_peaks(facts["device"], None, args.peak_tbs)
    tbs = args.peak_tbs or (None if peaks is None else peaks.tbs)
    parts: list[Measurement] = [(case.name, partial(measure_case, case, args, device, tbs)) for case in args.cases]
    for n, chunk in chain(*args.prefill):
        parts.append((f"prefill N={n} in chunks of {chunk}", partial(time_prefill, args, device, n, chunk)))
    with torch.no_grad():
        return run(args, {**facts, "floor_tbs": tbs}, lambda _: parts, LINE, bars=find_bars)


def parse(argv: list[str] | None) -> argparse.Namespace:
    shared = "dim", "dtype", "backend", "no-peers", "seconds", "peak-tbs", "bars", "out"
    parser = common.make_parser(__doc__, *shared, dim=128, dtype="bf16", out=str(LOCAL_RESULTS / "decode"))
    common.add_device(parser, "cuda", "cpu")
    add = parser.add_argument
    add("--presets", nargs="+", type=common.preset_name, choices=list(PRESETS), default=["paper", "per_tile"])
    add("--heads", nargs="+", type=head_counts, default=[(64, 4), (32, 8)], help="query/key heads; default: 64/4 32/8")
    add("--sizes", nargs="+", type=lengths, default=[*map(lengths, SIZES.split())], help=f"N:batches; default: {SIZES}")
    add("--queries", nargs="+", type=positive, default=[1, 4], help="N_q; default: 1 4")
    add("--prefill", nargs="*", type=lengths, default=[lengths("1M:8K")], help="N:tokens of a chunk; default: 1M:8K")
    args = common.parse_args(parser, argv)
    common.resolve_backend(parser, args, "nsa_with_cache")
    args.cases = [
        Case(preset, h, h_kv, n, b, n_q)
        for preset, (h, h_kv), (n, b), n_q in product(args.presets, args.heads, chain(*args.sizes), args.queries)
        if n_q <= n
    ]
    return args


def lengths(text: str) -> list[tuple[int, int]]:
    """Argument type: tokens, each with one of some other numbers."""
    try:
        n, others = text.split(":")
        return [(positive(n), positive(other)) for other in others.split(",")]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"must be numbers such as 64K:8 or 64K:1,8, got {text!r}") from error


# Making and checking


def make_table(case: Case, filled: int, generator: torch.Generator) -> PageTable:
    """Shuffled pages, `filled` tokens of each sequence in use."""
    device, columns = generator.device, -(-case.n // PAGE_SIZE)
    pages = torch.randperm(case.b * columns, generator=generator, device=device).to(torch.int32)
    seqlens = torch.full((case.b,), filled, dtype=torch.int32, device=device)
    return PageTable(pages.view(case.b, columns), seqlens, page_size=PAGE_SIZE, num_pages=len(pages))


def make_step(case: Case, args: argparse.Namespace, device: torch.device) -> Step:
    """Pages are filled with noise, entries with noise of a mean's deviation. Raises what a step raises."""
    config, dtype = PRESETS[case.preset](), DTYPES[args.dtype]
    generator = torch.Generator(device).manual_seed(0)
    table = make_table(case, case.n - case.n_q, generator)
    cache = NSACache(config, table, heads=case.h, heads_kv=case.h_kv, dim=args.dim, dtype=dtype)
    for name, memory in cache.pages.items():
        memory.normal_(0, config.compress_block_size**-0.5 if name.endswith("_cmp") else 1, generator=generator)
    if cache.tile_sums is not None:
        cache.tile_sums.normal_(generator=generator)
    q, k, v, gates = (
        torch.randn((case.b, case.n_q, *shape), generator=generator, device=device).to(dtype)
        for shape in case.shapes(args.dim)
    )
    step = Step(case, config, cache, q, k, v, gates, args.backend)
    with table.step(case.n_q):
        step.call()
    return step


def check(step: Step) -> Error:
    """The largest error of sampled rows against fp64.

    Its budget is a rounding and twice the error of plain attention whose probabilities and results are rounded to the
    dtype. Rows whose selection is a near tie are left out; at least one is none.
    """
    case, config = step.case, step.config
    out, got, exact, rough = step.call(), [], [], []
    group = case.h // case.h_kv
    together = group if config.shares_heads else 1  # heads that select together
    picked = torch.randperm(case.b * case.h_kv, generator=torch.Generator().manual_seed(1))[:CHECKED].tolist()
    for at in picked:
        row, kv_head = divmod(at, case.h_kv)
        first_head = kv_head * group + at % (group // together) * together
        heads, keys = slice(first_head, first_head + together), gather(step, row, kv_head)
        for query in {0, case.n_q - 1}:
            token = case.n - case.n_q + query
            blocks = chosen(step.means(row, query, heads), keys[2], token, config)
            if blocks is None:
                continue
            gates = step.gates[row, query, heads].double()
            arguments = step.q[row, query, heads], keys, blocks, token, gates, config
            got.append(out[row, query, heads])
            exact.append(plain(*arguments, torch.float64))
            rough.append(plain(*arguments, out.dtype).to(out.dtype))
    if not got:
        raise RuntimeError(f"{case.name}: the selection of every sampled row is a near tie")
    result, oracle, naive = torch.stack(got).double(), torch.stack(exact), torch.stack(rough).double()
    budget = 2 * (naive - oracle).abs().max() + torch.finfo(out.dtype).eps * oracle.abs().max()
    return Error("", oracles.deviation(result, oracle), float(budget))


def gather(step: Step, row: int, kv_head: int) -> list[Tensor]:
    """Keys, values and entries of a sequence and key/value head, `[n,D]`."""
    case, cache, device = step.case, step.cache, step.q.device
    tokens = cache.table.rows(torch.arange(case.n, device=device).expand(case.b, -1))[row]
    entries = cache.entry_rows(torch.arange(step.config.num_compressed(case.n), device=device).expand(case.b, -1))[row]
    rows = {"k": tokens, "v": tokens, "k_cmp": entries, "v_cmp": entries}
    return [cache.pages[name].flatten(0, 1)[at, kv_head] for name, at in rows.items()]


def chosen(q: Tensor, k_cmp: Tensor, token: int, config: NSAConfig) -> Tensor | None:
    """Blocks of a token by the reference in fp64, None if the last one is nearly tied. Args: `q`: of `Step.means`."""
    rows, count = torch.full((1, 1), token, device=q.device), config.num_selected_blocks
    scores, scored = score(q[None, :, None].double(), k_cmp[None, None].double(), rows, token + 1, config)

    def best(scores: Tensor, count: int) -> set[int]:
        some = select(scores, scored, rows, token + 1, 1, replace(config, num_selected_blocks=count))
        return {block for block in some.flatten().tolist() if block >= 0}

    blocks = best(scores, count)
    for last in blocks - best(scores, count - 1):
        begin, size = torch.arange(len(k_cmp), device=q.device) * config.stride, config.select_size
        inside = (begin < (last + 1) * size) & (begin + config.compress_block_size > last * size)
        if best(scores - NEAR_TIE * scores.abs() * inside, count) != blocks:
            return None
    return torch.tensor(sorted(blocks), device=q.device)


def plain(
    q: Tensor, keys: Sequence[Tensor], blocks: Tensor, token: int, gates: Tensor, config: NSAConfig, dtype: torch.dtype
) -> Tensor:
    """out of a token's group `[G,D_v]` in fp64, probabilities rounded to `dtype`."""
    k, v, k_cmp, v_cmp = keys
    size, visible = config.select_size, config.num_compressed(token + 1)
    selected = (blocks[:, None] * size + torch.arange(size, device=q.device)).flatten()
    selected = selected[selected <= token]
    window = slice(max(0, token + 1 - config.window_size), token + 1)
    branches = (k_cmp[:visible], v_cmp[:visible]), (k[selected], v[selected]), (k[window], v[window])
    out = torch.zeros(len(q), v.shape[1], dtype=torch.float64, device=q.device)
    for i, (some_keys, values) in enumerate(branches):
        if len(some_keys):
            logits = config.scale(q.shape[1]) * q.double() @ some_keys.double().T
            out += gates[:, i, None] * (torch.softmax(logits, -1).to(dtype).double() @ values.double())
    return out


# Timing


def measure_case(case: Case, args: argparse.Namespace, device: torch.device, tbs: float | None) -> Iterator[Row | str]:
    """A row for each mode."""
    try:
        step = make_step(case, args, device)
    except (dispatch.BackendError, torch.OutOfMemoryError) as refusal:
        yield f"{case.name} did not run: {first_line(refusal)}"
        return
    with step.cache.table.step(case.n_q):
        error = check(step)
        hold(case.name, error)
        least = floor_bytes(case, step.config, args.dim)
        timings = {"eager": measure(step.call, device, seconds=args.seconds)}
        if device.type == "cuda":
            copies = [step, *(step.copy() for _ in range(num_copies(least) - 1))]
            timings = {"graph": time_layers([one.call for one in copies], device, args.seconds), **timings}
            del copies
        beside = {"floor_ms": None if tbs is None else least / tbs / 1e9}
        dense_bytes = case.b * case.h_kv * case.n * 2 * args.dim * 2
        for name, make in () if args.no_peers else (("dense", dense_layer), ("fla", fla_layer)):
            try:
                beside[f"{name}_ms"] = time_peer(make(step), dense_bytes, device, args.seconds)
            except Exception as failure:  # whatever a peer raises is why it has no time
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # raises, from this error, where no kernel runs any more
                yield f"{name} did not run: {first_line(failure)} ({case.name})"
        host = {"eager": host_us(step.call, device)}
        for mode, timing in timings.items():
            yield make_row("decode", case, args, error, mode, timing, host_us=host.get(mode), **beside)


def make_row(
    op: str, case: Case, args: argparse.Namespace, error: Error, mode: str, timing: Timing, **more: float | None
) -> Row:
    """A row. Args: more: `host_us`, `floor_ms`, `dense_ms`, `fla_ms`, where there is one."""
    row: Row = {"op": op, **case._asdict(), "d": args.dim, "dtype": args.dtype, "backend": args.backend, "mode": mode}
    row |= {**timing.fields, **dict.fromkeys(("host_us", "floor_ms", "dense_ms", "fla_ms")), **more}
    row |= {"share_of_floor": ratio(row["floor_ms"], timing.ms_p50), "error": error.error}
    return {**row, "error_budget": error.budget, "command": args.command}


def time_peer(layer: Callable[[], Callable[[], Any]], num_bytes: int, device: torch.device, seconds: float) -> float:
    """Milliseconds of a peer's call, of which `layer` makes another layer's."""
    if device.type == "cpu":
        return measure(layer(), device, seconds=seconds).ms_p50
    calls = [layer() for _ in range(num_copies(num_bytes))]
    for call in calls:
        call()
    return time_layers(calls, device, seconds).ms_p50


def num_copies(num_bytes: int) -> int:
    """Number of copies of what a call reads, so that the calls of a graph find nothing of each other in L2."""
    return max(1, min(LAYERS, -(-COLD_BYTES // num_bytes)))


def time_layers(calls: Sequence[Callable[[], Any]], device: torch.device, seconds: float) -> Timing:
    """Time of one of LAYERS layers in a CUDA graph: one alone would mostly show how long a graph takes to start."""

    def layers() -> None:
        for i in range(LAYERS):
            calls[i % len(calls)]()

    graph = capture(layers, device)
    return measure(graph.replay, device, seconds=seconds, host=False).per(LAYERS)


def time_prefill(args: argparse.Namespace, device: torch.device, n: int, chunk: int) -> list[Row]:
    """A prompt of n tokens in chunks with a cache, and as one call without: two rows, with the largest difference."""
    h, h_kv = args.heads[0]
    case, dtype = Case("paper", h, h_kv, n, 1, chunk), DTYPES[args.dtype]
    config, generator = PRESETS[case.preset](), torch.Generator(device).manual_seed(0)
    table = make_table(case, 0, generator)
    cache = NSACache(config, table, heads_kv=case.h_kv, dim=args.dim, dtype=dtype)
    q, k, v, gates = (
        torch.randn((1, n, *shape), generator=generator, device=device, dtype=dtype) for shape in case.shapes(args.dim)
    )
    backend = args.backend
    parts = [slice(first, min(first + chunk, n)) for first in range(0, n, chunk)]

    def append(part: slice) -> Tensor:
        table.seqlens.fill_(part.start)
        return nsa_with_cache(q[:, part], k[:, part], v[:, part], cache, gates=gates[:, part], backend=backend)

    def whole() -> Tensor:
        return nsa_forward(q, k, v, gates=gates, config=config, backend=backend)

    expected = whole()
    largest = max(float((append(part) - expected[:, part]).abs().max()) for part in parts)
    error = Error("", largest, torch.finfo(dtype).eps * float(expected.abs().max()))
    hold(f"prefill N={n} in chunks of {chunk}", error)
    del expected
    ways: dict[str, Callable[[], Any]] = {"chunks": lambda: [append(part) for part in parts][-1], "whole": whole}
    return [
        make_row("prefill", case, args, error, mode, measure(call, device, seconds=args.seconds, host=False))
        for mode, call in ways.items()
    ]


def floor_bytes(case: Case, config: NSAConfig, dim: int) -> int:
    """Bytes of a step that no implementation can do without. Tile mode selects for each query head."""
    entries = config.num_compressed(case.n)
    blocks = config.num_selected_blocks * (1 if config.token_mode else case.h // case.h_kv)
    tokens = min(case.n, blocks * config.select_size) + min(case.n, config.window_size)
    return case.b * case.h_kv * (entries + tokens) * 2 * dim * 2


def host_us(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds that Python takes to start a call, least median of some rounds: other work never makes it less."""

    def one() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda._sleep(BUSY_CYCLES)
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    return min(statistics.median([one() for _ in range(HOST_CALLS)]) for _ in range(HOST_ROUNDS))


def dense_layer(step: Step) -> Callable[[], Callable[[], Tensor]]:
    """Makes calls of layers with keys of their own."""
    case, q = step.case, step.q.transpose(1, 2).contiguous()
    shape = case.b, case.h_kv, case.n, step.k.shape[-1]

    def call() -> Callable[[], Tensor]:
        k, v = (torch.randn(1, dtype=x.dtype, device=x.device).expand(shape).contiguous() for x in (step.k, step.v))
        return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def fla_layer(step: Step) -> Callable[[], Callable[[], Tensor]]:
    """Makes calls of layers with keys of their own; sequences are packed, as fla's lengths of queries and keys require.

    Layers share these lengths: fla finds what follows from them on the host, which no graph holds, and keeps it for the
    last few tensors of lengths that it saw.
    """
    if step.q.device.type != "cuda":
        raise RuntimeError(f"runs on CUDA devices, got {step.q.device.type}")
    from fla.ops.nsa.parallel import parallel_nsa

    case, config = step.case, step.config
    q = step.q.reshape(1, -1, *step.q.shape[2:])
    gates = step.gates.reshape(1, -1, case.h, 3).unbind(-1)
    sequences = torch.arange(case.b + 1, dtype=torch.int64, device=q.device)
    bounds = sequences * case.n_q, sequences * case.n
    options: dict[str, Any] = {"block_counts": config.num_selected_blocks, "block_size": config.select_size}

    def call() -> Callable[[], Tensor]:
        shapes = [(1, case.b * case.n, *x.shape[2:]) for x in (step.k, step.v)]
        k, v = (torch.randn(shape, dtype=q.dtype, device=q.device) for shape in shapes)
        return lambda: parallel_nsa(q, k, v, *gates, window_size=0, cu_seqlens=bounds, **options)

    return call


# What has to be reached, and what is shown


def find_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    sizes = {"op": "decode", "preset": "paper", "h": 64, "h_kv": 4, "d": 128, "n_q": 1, "dtype": "bf16"}
    for (n, batch), ms in MS_BARS.items():
        took = figure(rows, {**sizes, "n": n, "b": batch, "mode": "graph"}, "ms_p50")
        yield Bar(f"{n >> 10}K, batch {batch}, graph", took, ms, at_least=False, unit=" ms")
    one = {**sizes, "n": 64 << 10, "b": 1}
    host = figure(rows, {**one, "mode": "eager"}, "host_us")
    fla = figure(rows, {**one, "mode": "graph"}, "fla_ms", "ms_p50")
    prefill = {"op": "prefill", "n": 1 << 20, "n_q": 8 << 10}
    chunks, whole = (figure(rows, {**prefill, "mode": mode}, "ms_p50") for mode in ("chunks", "whole"))
    yield Bar("64K, batch 1, host", host, HOST_US_BAR, at_least=False, unit=" us")
    yield Bar("64K, batch 1, fla takes as long", fla, FLA_BAR, at_least=True, unit="x")
    times = ratio(chunks, whole)
    yield Bar("prefill, 1M in chunks of 8K", times, PREFILL_BAR, at_least=False, unit=" of the whole call")


if __name__ == "__main__":
    sys.exit(main())

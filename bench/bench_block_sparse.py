"""block_sparse_attention, top_blocks_by_max, indexer_kl_loss and a layer of MiniMax-M3, checked against fp64 first.

Sizes are MiniMax-M3's: 64 query heads over 4, D = 128, 16 blocks of 128 a token; an indexer of 4 heads of 128 over one
head of keys. Blocks are drawn at random, each token's own among them. Sampled rows, and the gradients that come from
them, are held against fp64 before anything is timed: where one is above its budget, nothing is reported and the status
is 1. Peers are dense attention, SDPA with a mask of all pairs, and scores of all pairs; of "indexer_kl" eager PyTorch;
of "m3_layer", which needs transformers, the same layer with transformers' sdpa and eager.

Writes OUT.json after every case (schema: docs/results_files.md). The same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench import common, oracles, selected_branch
from bench.bars import Bar, figure, ratio
from bench.common import DTYPES, choose_dense, positive
from bench.oracles import Error
from bench.passes import PEER_SLACK, release
from bench.report import LOCAL_RESULTS, environment
from bench.results_file import Row, hold, run
from bench.roofline import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, Peaks, Work, choose_peaks, mean_keys
from bench.selected_branch import checked_rows, draw_blocks, visible_keys
from bench.timing import measure
from dispatch.device import first_line
from nsa import block_sparse_attention, indexer_kl_loss, top_blocks_by_max

OPS = ("block_sparse", "top_blocks", "indexer_kl", "m3_layer")
PASSES = ("fwd", "fwd+bwd")
PASSES_OF = {"top_blocks": ("fwd",), "indexer_kl": ("fwd+bwd",)}
"""Passes of ops that do not have both."""
PEERS = ("dense", "mask", "pairs")
MOST_PAIRS = 1 << 30
"""Most pairs in a call of SDPA with a mask, whose kernels may count in 32 bits (pytorch/pytorch#162588, #145040)."""
SEQLENS = (8 << 10, 64 << 10, 128 << 10)
LAYER_SEQLENS = (8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10)
"""Lengths of "m3_layer": the longest that transformers' own paths can run are between those of the other ops."""

MS_BARS = {("block_sparse", "fwd"): 22.0, ("block_sparse", "fwd+bwd"): 65.0, ("top_blocks", "fwd"): 5.0}
"""At 64K tokens, blocks of 128, 16 a token."""
LINE = "{op} N={n} block={block} {pass:<8} {ms_p50:ms} ms  {share_of_floor:percent} of the floor  {peak_gib:.2f} GiB"
LINE += "".join(f"  {name} {{{name}_ms:ms}} ms" for name in PEERS)


class Case(NamedTuple):
    op: str
    n: int
    block: int
    direction: str

    def __str__(self) -> str:
        return f"{self.op} N={self.n} block={self.block} {self.direction}"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    facts = environment(device)
    peaks = choose_peaks(facts["device"], args.peak_tflops, args.peak_tbs)
    parts = [(str(case), partial(measure_case, case, args, device, peaks)) for case in args.cases]
    return run(args, facts, lambda _: parts, LINE, bars=find_bars)


def measure_case(
    case: Case, args: argparse.Namespace, device: torch.device, peaks: Peaks | None
) -> Iterator[Row | str]:
    release(device)
    try:
        problem = PROBLEMS[case.op](case, args, device)
    except ImportError as absent:
        yield f"{case} did not run: {absent}"
        return
    error, host = problem.check(), device.type == "cpu"
    hold(str(case), error)
    own = measure(problem.call, device, seconds=args.seconds, host=host)
    others: dict[str, float | None] = dict.fromkeys(PEERS)
    for name in () if args.no_peers else problem.peers:
        release(device)
        try:
            others[name] = measure(problem.peer(name), device, seconds=args.seconds, host=host).ms_p50
        except Exception as failure:  # whatever a peer raises is why it has no time
            yield f"{name} did not run: {first_line(failure)} ({case})"
    floor = None if peaks is None else problem.work().floor_ms(peaks.tbs, peaks.tflops)
    dense = None if others["dense"] is None else choose_dense(device, problem.dtype).name
    row = {"op": case.op, "block": case.block, "k": args.count, "pass": case.direction, "backend": problem.backend}
    row |= {"mode": "eager" if host else "queued", "dtype": args.dtype, "b": args.batch, "n": case.n}
    row |= {"h": args.heads, "h_kv": args.kv_heads, "d": args.dim, **own.fields, "peak_gib": own.peak_gib}
    row |= {"floor_ms": floor, "share_of_floor": ratio(floor, own.ms_p50), "dense": dense}
    row |= {f"{name}_ms": ms for name, ms in others.items()}
    yield {**row, "error": error.error, "error_budget": error.budget, "command": args.command}


def parse(argv: list[str] | None) -> argparse.Namespace:
    shared = (*common.SIZES, "backend", "no-peers", "seconds", "peak-tflops", "peak-tbs", "bars", "out")
    parser = common.make_parser(__doc__, *shared, out=str(LOCAL_RESULTS / "block-sparse"))
    common.add_device(parser, "cuda", "cpu")
    add = parser.add_argument
    add("--ops", nargs="+", choices=OPS, default=list(OPS), help="default: all")
    add("--seqlens", nargs="+", type=positive, help="N; default: 8K 64K 128K, m3_layer also 16K 32K (CPU: 512)")
    blocks = "tokens of a block; but for block_sparse the first alone; default: 128 64"
    add("--blocks", nargs="+", type=positive, default=[128, 64], help=blocks)
    add("--count", type=positive, default=16, help="k, blocks of a token; default: %(default)s")
    args = common.parse_args(parser, argv)
    common.resolve_backend(parser, args, "block_sparse_attention", "top_blocks_by_max")
    on_cpu = args.device == "cpu"
    if not on_cpu:
        args.heads, args.kv_heads = args.heads or 64, args.kv_heads or 4
    common.resolve_sizes(parser, args)
    usual = {op: (512,) if on_cpu else LAYER_SEQLENS if op == "m3_layer" else SEQLENS for op in OPS}
    args.cases = [
        Case(op, n, block, direction)
        for op, block in product(args.ops, args.blocks)
        for n, direction in product(args.seqlens or usual[op], PASSES)
        if op == "block_sparse" or (block == args.blocks[0] and direction in PASSES_OF.get(op, PASSES))
    ]
    return args


# What is timed and checked


class Problem:
    """Tensors of a case.

    Beside them `call`, `check` (the error that takes most of its budget), `peer` by its name, and `work`, the least
    that the call moves and computes.
    """

    def __init__(self, case: Case, args: argparse.Namespace, device: torch.device) -> None:
        self.case, self.args, self.device, self.dtype = case, args, device, DTYPES[args.dtype]
        self.generator = torch.Generator(device).manual_seed(0)
        self.backend, self.backward = args.backend, case.direction == "fwd+bwd"
        self.rows = checked_rows(case.n, device)

    def results(self, out: Tensor, leaves: Sequence[Tensor], do: Tensor) -> tuple[Tensor, ...]:
        """out, and the gradients of the leaves if they are timed."""
        return (out.detach(), *(torch.autograd.grad(out, leaves, do) if self.backward else ()))

    def normal(self, *features: int) -> Tensor:
        shape = self.args.batch, self.case.n, *features
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def attention_flops(self) -> float:
        args, products = self.args, FORWARD_PRODUCTS + BACKWARD_PRODUCTS * self.backward
        keys = mean_keys(self.case.n, args.count * self.case.block)
        return float(args.batch * self.case.n * keys * args.heads * 2 * args.dim * products)

    def selection_flops(self) -> float:
        args, n = self.args, self.case.n
        return float(args.batch * args.kv_heads * n * (n + 1) * args.dim)


class Attention(Problem):
    peers: tuple[str, ...] = ("dense", "mask")

    def __init__(self, case: Case, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(case, args, device)
        q, k, v, self.do = (self.normal(n, args.dim) for n in (args.heads, args.kv_heads, args.kv_heads, args.heads))
        self.leaves = q, k, v
        shape = args.batch, args.kv_heads, case.n
        self.blocks = draw_blocks(shape, case.block, args.count, self.generator, own_first)
        if case.block != args.blocks[0]:
            self.peers = ()  # what they take does not depend on it
        for x in self.leaves:
            x.requires_grad_(self.backward)

    def call(self) -> Any:
        return self.ours(self.do)

    def ours(self, do: Tensor) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"block_size": self.case.block, "backend": self.args.backend}
        return self.results(block_sparse_attention(*self.leaves, self.blocks, **options), self.leaves, do)

    def check(self, attend: Callable[[Tensor], tuple[Tensor, ...]] | None = None) -> Error:
        """Args: `attend`: default: ours."""
        given = self.leaves, self.do, self.blocks, self.case.block
        return oracles.worst(selected_branch.errors(attend or self.ours, *given))

    def peer(self, name: str) -> Callable[[], Any]:
        if name == "dense":
            attention = choose_dense(self.device, self.dtype).attention
            return lambda: self.results(attention(*self.leaves), self.leaves, self.do)
        masked = partial(self.masked, self.masks())
        found = self.check(masked)
        if not found.error <= PEER_SLACK * found.budget:
            raise RuntimeError(f"error {found.error:.2e} is above {PEER_SLACK} budgets of {found.budget:.2e}")
        return lambda: masked(self.do)

    def masked(self, masks: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        """SDPA of one key/value head's group after the other, so that memory holds what one of them saves."""
        group, (q, k, v) = self.args.heads // self.args.kv_heads, self.leaves
        found = []
        for head in range(self.args.kv_heads):
            some = slice(head * group, (head + 1) * group)
            leaves = q[:, :, some], k[:, :, head : head + 1], v[:, :, head : head + 1]
            found.append(self.results(masked_attention(*leaves, masks[:, head]), leaves, do[:, :, some]))
        return tuple(torch.cat(parts, 2) for parts in zip(*found, strict=True))

    def masks(self) -> Tensor:
        """bool `[B,H_kv,N,N]`."""
        masks = chosen_of(self.blocks, -(-self.case.n // self.case.block))
        masks = masks.repeat_interleave(self.case.block, 3)[..., : self.case.n]
        token = torch.arange(self.case.n, device=self.device)
        masks &= token <= token[:, None]
        return masks

    def work(self) -> Work:
        args, directions = self.args, 3 if self.backward else 1
        heads = 2 * args.heads + 2 * args.kv_heads  # q and out, k and v: read or written once in each direction
        moved = args.batch * self.case.n * args.dim * self.do.element_size() * heads * directions
        return Work(moved, self.attention_flops())


class Selection(Problem):
    """top_blocks_by_max, an indexer of as many heads as there are key/value heads, over one head of keys."""

    peers = ("pairs",)

    def __init__(self, case: Case, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(case, args, device)
        self.q, self.k = self.normal(args.kv_heads, args.dim), self.normal(1, args.dim)

    def call(self) -> Tensor:
        options = {"block_size": self.case.block, "k": self.args.count}
        return top_blocks_by_max(self.q, self.k, **options, backend=self.args.backend)

    def check(self) -> Error:
        """By how much a block that was left out beats one that was chosen, over what fp32 sums may hide."""
        rows, n, size = self.rows, self.case.n, self.case.block
        got = self.call()[0, :, rows].long()
        q, k = self.q[0, rows].double(), self.k[0, :, 0].double()
        scores = torch.einsum("mhd,nd->hmn", q, k)
        scores = block_maxima(scores, torch.arange(n, device=self.device) > rows[:, None], size)
        own = rows // size
        begun = (own + 1).clamp(max=self.args.count)
        if not bool(((got >= 0).sum(-1) == begun).all() and ((got == own[:, None]).sum(-1) == 1).all()):
            return Error("", float("nan"), 0.0)
        scores.scatter_(2, own[None, :, None].expand(len(scores), -1, 1), torch.inf)
        taken = chosen_of(got, scores.shape[2])
        short = scores.masked_fill(taken, -torch.inf).amax(-1) - scores.masked_fill(~taken, torch.inf).amin(-1)
        short = short.nan_to_num(nan=0.0).clamp(min=0.0)
        allowed = 2 * 2.0**-23 * (self.args.dim / 8 + 4) * q.norm(dim=-1).T * k.norm(dim=-1).max()
        worst = int((short / allowed).argmax())
        return Error("", float(short.flatten()[worst]), float(allowed.flatten()[worst]))

    def peer(self, name: str) -> Callable[[], Any]:
        """Scores of all pairs in memory, fp32."""
        n, size, count = self.case.n, self.case.block, min(self.args.count, -(-self.case.n // self.case.block))
        future = torch.ones((n, n), dtype=torch.bool, device=self.device).triu(1)

        def pairs() -> Tensor:
            scores = torch.einsum("bmhd,bnd->bhmn", self.q.float(), self.k[:, :, 0].float())
            return block_maxima(scores, future, size).topk(count, -1).indices

        return pairs

    def work(self) -> Work:
        args = self.args
        numbers = args.dim * (args.kv_heads + 1) * self.q.element_size() + args.kv_heads * args.count * 4
        return Work(args.batch * self.case.n * numbers, self.selection_flops())


class Loss(Problem):
    """indexer_kl_loss over given blocks, and its gradients; the attention itself is not computed."""

    peers = ("pairs",)

    def __init__(self, case: Case, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(case, args, device)
        self.q, self.k = self.normal(args.heads, args.dim), self.normal(args.kv_heads, args.dim)
        self.q_idx, self.k_idx = self.normal(args.kv_heads, args.dim), self.normal(1, args.dim)
        shape = args.batch, args.kv_heads, case.n
        self.blocks = draw_blocks(shape, case.block, args.count, self.generator, own_first)
        self.backend = "triton" if args.backend == "cute" else args.backend

    def of_last(self, rows: int, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
        """The loss of the last tokens, and gradients of q_idx and k_idx."""
        q_idx, k_idx, q, k = (x.to(dtype) for x in (self.q_idx[:, -rows:], self.k_idx, self.q[:, -rows:], self.k))
        leaves = q_idx.detach().requires_grad_(), k_idx.detach().requires_grad_()
        given = *leaves, q, k, self.blocks[:, :, -rows:]
        loss = indexer_kl_loss(*given, block_size=self.case.block, backend=backend)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    def call(self) -> Any:
        return self.of_last(self.case.n, self.dtype, self.backend)

    def check(self) -> Error:
        """Errors for the last tokens: a result may be off by an ulp, and by what fp32 sums of scores may hide."""
        rows = min(self.case.n, 256)
        got, exact = self.of_last(rows, self.dtype, self.backend), self.of_last(rows, torch.float64, "reference")
        budget = torch.finfo(self.dtype).eps + 2.0**-15
        found = zip(got, exact, strict=True)
        return oracles.worst(Error("", oracles.deviation(x, y), budget * float(y.abs().max())) for x, y in found)

    def peer(self, name: str) -> Callable[[], Any]:
        """Eager PyTorch, on gathered keys."""
        return lambda: self.of_last(self.case.n, self.dtype, "reference")

    def work(self) -> Work:
        """Scores of the attention and of the indexer, two products with the latter's gradients."""
        args, keys = self.args, mean_keys(self.case.n, self.args.count * self.case.block)
        products = args.heads + args.kv_heads * 3
        numbers = self.case.n * args.dim * (args.heads + 3 * args.kv_heads + 2)
        flops = args.batch * self.case.n * keys * 2 * args.dim * products
        return Work(args.batch * numbers * self.q.element_size(), flops)


class Layer(Problem):
    """A sparse attention layer of MiniMax-M3, hidden states 96 times as wide as there are heads."""

    peers = ("mask", "pairs")
    implementations: ClassVar[dict[str, str]] = {"mask": "sdpa", "pairs": "eager"}

    def __init__(self, case: Case, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(case, args, device)
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
        from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

        from nsa.integrations import minimax_m3

        minimax_m3.register()
        self.ours = minimax_m3.NAME
        self.config = MiniMaxM3VLTextConfig(
            num_hidden_layers=1,
            hidden_size=96 * args.heads,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            head_dim=args.dim,
            rotary_dim=args.dim // 2,
            index_n_heads=args.kv_heads,
            index_head_dim=args.dim,
            index_block_size=case.block,
            index_topk_blocks=args.count,
            layer_types=["minimax_m3_sparse"],
            rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        )
        torch.manual_seed(0)
        self.layer = modeling.MiniMaxM3VLAttention(self.config, 0).to(device, self.dtype)
        self.rotary = modeling.MiniMaxM3VLRotaryEmbedding(self.config).to(device)
        self.hidden, self.do = (self.normal(self.config.hidden_size) for _ in range(2))
        self.positions = torch.arange(case.n, device=device)[None]

    def run(self, implementation: str, hidden: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        """out, and the gradients of hidden states and parameters."""
        self.config._attn_implementation = implementation
        hidden, turns = hidden.detach().requires_grad_(self.backward), self.rotary(hidden, position_ids=self.positions)
        with torch.set_grad_enabled(self.backward):
            out = self.layer(hidden, turns, None, position_ids=self.positions)[0]
        return self.results(out, [hidden, *parameters(self.layer)], do)

    def call(self) -> Any:
        return self.run(self.ours, self.hidden, self.do)

    def check(self) -> Error:
        """Error of rows of the first sequence, and of the gradients of a do that is 0 elsewhere.

        They attend to the blocks that our indexer chooses in the layer's dtype, or near ties would decide; the choice
        itself is what "top_blocks" checks.
        """
        rows, hidden = self.rows, self.hidden[:1]
        do = torch.zeros_like(hidden)
        do[:, rows] = self.do[:1, rows]
        out, *gradients = self.run(self.ours, hidden, do)
        visible = visible_keys(self.chosen(hidden)[:, :, rows], rows, self.case.block, self.case.n)
        visible = visible.repeat_interleave(self.args.heads // self.args.kv_heads, 1)
        exact, rough = (self.of_rows(rows, visible, do[:, rows], dtype) for dtype in (torch.float64, self.dtype))
        results = zip([out[:, rows], *gradients], exact, rough, strict=True)
        return oracles.worst(oracles.compare("", *each, self.args.dim) for each in results)

    @torch.no_grad()
    def chosen(self, hidden: Tensor) -> Tensor:
        """Blocks `[1,H_kv,N,k]`."""
        self.config._attn_implementation = self.ours
        turns = self.rotary(hidden, position_ids=self.positions)
        states = self.layer.indexer(hidden, turns, None, self.positions)
        options = {"block_size": self.case.block, "k": self.args.count, "local": self.config.index_local_blocks}
        return top_blocks_by_max(*(x.transpose(1, 2) for x in states), **options)

    def of_rows(self, rows: Tensor, visible: Tensor, do: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Results of `run` for some rows, by transformers' projections, norms and rotary and the oracles' attention."""
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

        layer = copy.deepcopy(self.layer).to(dtype)
        hidden = self.hidden[:1].detach().to(dtype).requires_grad_(self.backward)
        cos, sin = self.rotary(hidden, position_ids=self.positions)

        def heads(project: Any, at: Any) -> Any:
            return project(hidden[:, at]).unflatten(-1, (-1, self.args.dim))

        def rotated(x: Tensor, at: Any) -> Any:
            return apply_rotary_pos_emb(x, x, cos[:, at], sin[:, at], unsqueeze_dim=2)[0]

        with torch.set_grad_enabled(self.backward):
            every = slice(None)
            q = rotated(layer.q_norm(heads(layer.q_proj, rows)), rows)
            k = rotated(layer.k_norm(heads(layer.k_proj, every)), every)
            q, k, v = (x.to(oracles.wide(dtype)) for x in (q, k, heads(layer.v_proj, every)))
            attended, _ = oracles.attention(q, k, v, visible, self.args.dim**-0.5, dtype)
            out = layer.o_proj(attended.to(dtype).flatten(2))
        return self.results(out, [hidden, *parameters(layer)], do.to(dtype))

    def peer(self, name: str) -> Callable[[], Any]:
        return lambda: self.run(self.implementations[name], self.hidden, self.do)

    def work(self) -> Work:
        """Projections, selection and attention."""
        args, n = self.args, self.case.n
        weights = sum(x.numel() for x in self.layer.parameters()) * 2 * args.batch * n * (3 if self.backward else 1)
        moved = 2 * args.batch * n * self.config.hidden_size * self.hidden.element_size()
        return Work(moved, self.attention_flops() + self.selection_flops() + weights)


PROBLEMS: dict[str, type[Attention | Selection | Loss | Layer]]
PROBLEMS = {"block_sparse": Attention, "top_blocks": Selection, "indexer_kl": Loss, "m3_layer": Layer}


def parameters(layer: Any) -> list[Tensor]:
    """Those that get gradients: the indexer gets none."""
    return [x for name, x in layer.named_parameters() if not name.startswith("indexer.")]


def chosen_of(blocks: Tensor, count: int) -> Tensor:
    """True for the listed ones of `count` blocks, bool `[...,count]`; -1 is none."""
    chosen = torch.zeros((*blocks.shape[:-1], count + 1), dtype=torch.bool, device=blocks.device)
    return chosen.scatter_(-1, torch.where(blocks < 0, count, blocks).long(), True)[..., :-1]


def block_maxima(scores: Tensor, future: Tensor, size: int) -> Tensor:
    """Largest score of each block of keys, future keys left out; overwrites `scores`."""
    scores.masked_fill_(future, -torch.inf)
    scores = torch.nn.functional.pad(scores, [0, -scores.shape[-1] % size], value=-torch.inf)
    best: Tensor = scores.unflatten(-1, (-1, size)).amax(-1)
    return best


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SDPA of the queries `[B,N,G,D]` of a key/value head `[B,N,1,D]` with a mask `[B,N,N]` that is causal, too.

    Queries come in parts of at most MOST_PAIRS pairs, with the keys up to their last one. The mask is broadcast to the
    group; keys are repeated for it, since not every fused kernel takes groups beside a mask.
    """
    n, group = q.shape[1:3]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    rows = max(1, MOST_PAIRS // n)
    parts = [
        scaled_dot_product_attention(
            q[:, :, first : first + rows],
            k[:, :, : first + rows],
            v[:, :, : first + rows],
            attn_mask=mask[:, None, first : first + rows, : first + rows],
        )
        for first in range(0, n, rows)
    ]
    return torch.cat(parts, 2).transpose(1, 2)


def own_first(noise: Tensor, own: Tensor, block: Tensor) -> Tensor:
    return noise.masked_fill(block == own, 2.0)


# What has to be reached


def find_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    sizes = {"b": 1, "n": 64 << 10, "h": 64, "h_kv": 4, "d": 128, "k": 16, "dtype": "bf16", "mode": "queued"}
    for (op, direction), ms in MS_BARS.items():
        reached = figure(rows, {**sizes, "op": op, "block": 128, "pass": direction}, "ms_p50")
        yield Bar(f"{op}, 64K, 16 blocks of 128, {direction}", reached, ms, at_least=False, unit=" ms")


if __name__ == "__main__":
    sys.exit(main())

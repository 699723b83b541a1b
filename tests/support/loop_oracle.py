"""The second oracle of NSA: one Python loop per sentence of the definition (docs/semantics.md), in fp64.

It shares no code with `nsa/` and is never optimised, so that agreement with `nsa.reference` means something. Steps
cited below are those of that page: compress, visibility, score, select, attend, gate. l, d, l', w, T, G as named there.
Block scores are exact fractions of the fp64 scores, so that rounding neither makes nor breaks a tie; inputs are finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Vector = list[float]


@dataclass(frozen=True)
class LoopResult:
    """What NSA gives for one document; all tensors fp64."""

    out: Tensor  # [N, H, D_v]
    o_cmp: Tensor  # [N, H, D_v]
    o_slc: Tensor  # [N, H, D_v]
    o_win: Tensor  # [N, H, D_v]
    lse_cmp: Tensor  # [H, N], -inf for rows without keys
    lse_slc: Tensor  # [H, N]
    lse_win: Tensor  # [H, N]
    k_cmp: Tensor  # [N_cmp, H_kv, D]
    v_cmp: Tensor  # [N_cmp, H_kv, D_v]
    gates: Tensor  # [N, H, 3]: compressed, selected, window
    indices: list[list[set[int]]]  # [H, or H_kv when shared][tile] -> chosen select blocks
    cmp_indices: list[list[set[int]]] | None  # [H][tile] -> chosen blocks of n_block_size compressed entries
    scores: list[list[dict[int, Fraction]]]  # like indices: scores of the eligible select blocks
    cmp_scores: list[list[dict[int, Fraction]]] | None  # like cmp_indices: scores of its blocks with scored entries


@dataclass(frozen=True)
class Rules:
    """The options for one document of `tokens` tokens, every None resolved."""

    tokens: int  # N
    compress_block: int  # l
    stride: int  # d
    select_block: int  # l'
    selected: int  # num_selected_blocks
    window: int  # w
    tile: int  # T
    shared: bool
    init_blocks: int
    local_blocks: int
    cmp_selected: int | None  # num_cmp_selected_blocks
    cmp_block: int  # n_block_size
    causal: bool
    scale: float

    @property
    def compressed_count(self) -> int:
        """N_cmp (step 1)."""
        return compressed_count(self.tokens, self.compress_block, self.stride)

    @property
    def select_count(self) -> int:
        """Number of select blocks, the ragged last one included (step 3)."""
        return math.ceil(self.tokens / self.select_block)

    @property
    def cmp_block_count(self) -> int:
        """Number of blocks of n_block_size compressed entries (step 5)."""
        return math.ceil(self.compressed_count / self.cmp_block)

    @property
    def tile_count(self) -> int:
        return math.ceil(self.tokens / self.tile)

    def first_token(self, tile: int) -> int:
        return tile * self.tile

    def last_token(self, tile: int) -> int:
        """e (step 3)."""
        return min((tile + 1) * self.tile, self.tokens) - 1

    def end_of_compressed(self, j: int) -> int:
        """The last token that compressed block j has read (step 2)."""
        return j * self.stride + self.compress_block - 1


def resolve(config: Any, tokens: int, head_dim: int) -> Rules:
    """Fill in the defaults of section 3 and refuse what it refuses."""
    compress_block = config.compress_block_size
    if config.num_init_blocks + config.num_local_blocks > config.num_selected_blocks:
        raise ValueError("num_init_blocks + num_local_blocks > num_selected_blocks")
    if config.num_cmp_selected_blocks is not None and config.q_tile_size == 1:
        raise ValueError("num_cmp_selected_blocks is for tile mode only (q_tile_size > 1)")
    return Rules(
        tokens=tokens,
        compress_block=compress_block,
        stride=compress_block if config.compress_stride is None else config.compress_stride,
        select_block=compress_block if config.select_block_size is None else config.select_block_size,
        selected=config.num_selected_blocks,
        window=config.window_size,
        tile=config.q_tile_size,
        shared=bool(config.share_heads_in_group) or config.q_tile_size == 1,
        init_blocks=config.num_init_blocks,
        local_blocks=config.num_local_blocks,
        cmp_selected=config.num_cmp_selected_blocks,
        cmp_block=config.n_block_size,
        causal=config.causal,
        scale=1.0 / math.sqrt(head_dim) if config.softmax_scale is None else config.softmax_scale,
    )


# Arithmetic.


def compressed_count(tokens: int, compress_block: int, stride: int) -> int:
    """N_cmp = max(0, floor((N - l) / d) + 1) (step 1)."""
    return max(0, (tokens - compress_block) // stride + 1)


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def mean(vectors: list[Vector]) -> Vector:
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def times_matrix(vector: Vector, matrix: list[Vector]) -> Vector:
    """vector @ matrix."""
    return [dot(vector, list(column)) for column in zip(*matrix, strict=True)]


def softmax(logits: dict[int, float]) -> dict[int, float]:
    top = max(logits.values(), default=0.0)
    weights = {j: math.exp(logit - top) for j, logit in logits.items()}
    total = sum(weights.values())
    return {j: weight / total for j, weight in weights.items()}


# Step 1, compress.


def compress(x: Tensor, rules: Rules, how: Any, weight: Tensor | None) -> list[list[Vector]]:
    """x [N, H_kv, D] -> [N_cmp][H_kv] vectors; a ragged tail is not compressed."""
    result = []
    for j in range(rules.compressed_count):
        first = j * rules.stride
        heads = []
        for h in range(x.shape[1]):
            block = x[first : first + rules.compress_block, h]  # [l, D]
            vector = how(block).detach().tolist() if callable(how) else mean(block.tolist())
            heads.append(vector if weight is None else times_matrix(vector, weight[h].tolist()))
        result.append(heads)
    return result


def compressors(compress_option: Any) -> tuple[Any, Any]:
    """The ways to compress K and V: None for the mean, else a callable."""
    if isinstance(compress_option, str):
        if compress_option != "mean":
            raise ValueError(f"compress must be 'mean', a callable or a pair of callables, got {compress_option!r}")
        return None, None
    if isinstance(compress_option, (tuple, list)):
        for_k, for_v = compress_option
        return for_k, for_v
    return compress_option, compress_option


# Step 2, visibility.


def visible_compressed(token: int, rules: Rules) -> list[int]:
    """Compressed blocks that a token may see; for a tile's last token e, the blocks that the tile scores."""
    return [j for j in range(rules.compressed_count) if not rules.causal or rules.end_of_compressed(j) <= token]


# Step 3, score.


def overlap(j: int, b: int, rules: Rules) -> int:
    """Tokens that compressed block j and select block b have in common."""
    first = max(j * rules.stride, b * rules.select_block)
    last = min(rules.end_of_compressed(j), (b + 1) * rules.select_block - 1)
    return max(0, last - first + 1)


def overlaps(rules: Rules) -> list[dict[int, int]]:
    """For each select block b, the compressed blocks that touch it: {j: overlap(j, b) > 0}."""
    result = []
    for b in range(rules.select_count):
        tokens = {j: overlap(j, b, rules) for j in range(rules.compressed_count)}
        result.append({j: count for j, count in tokens.items() if count > 0})
    return result


def tile_scores(tile: int, queries: list[Vector], keys: list[Vector], rules: Rules) -> dict[int, Fraction]:
    """s[t, j] of one query head over the tile's scored compressed blocks (step 3, tile mode)."""
    last = rules.last_token(tile)
    query = mean(queries[rules.first_token(tile) : last + 1])
    return {j: Fraction(rules.scale * dot(query, keys[j])) for j in visible_compressed(last, rules)}


def token_probabilities(token: int, query: Vector, keys: list[Vector], rules: Rules) -> dict[int, Fraction]:
    """p of one query head over the compressed blocks visible to the token (step 3, token mode)."""
    p = softmax({j: rules.scale * dot(query, keys[j]) for j in visible_compressed(token, rules)})
    return {j: Fraction(value) for j, value in p.items()}


def block_score(scores: dict[int, Fraction], touching: dict[int, int]) -> Fraction | None:
    """The score of a select block: sum overlap * s / sum overlap over its scored blocks (step 3, tile mode)."""
    scored = [j for j in touching if j in scores]
    if not scored:
        return None
    return sum(touching[j] * scores[j] for j in scored) / sum(touching[j] for j in scored)


def block_importance(probabilities: dict[int, Fraction], touching: dict[int, int], rules: Rules) -> Fraction | None:
    """The importance of a select block: sum p * overlap / l over visible blocks (step 3, token mode)."""
    scored = [j for j in touching if j in probabilities]
    if not scored:
        return None
    return sum(probabilities[j] * touching[j] for j in scored) / rules.compress_block


def add(per_head: list[dict[int, Fraction]]) -> dict[int, Fraction]:
    """Sum over the heads that select together; all heads have the same keys."""
    return {key: sum(scores[key] for scores in per_head) for key in per_head[0]}


def select_scores(
    tile: int, queries: list[list[Vector]], keys: list[Vector], touching: list[dict[int, int]], rules: Rules
) -> dict[int, Fraction]:
    """Scores of the eligible select blocks for query heads that select together; queries [heads][N] (step 3)."""
    per_head = []
    if rules.tile == 1:
        for head_queries in queries:
            p = token_probabilities(tile, head_queries[tile], keys, rules)
            importance = {b: block_importance(p, touching[b], rules) for b in range(rules.select_count)}
            per_head.append({b: value for b, value in importance.items() if value is not None})
        return add(per_head)
    summed = add([tile_scores(tile, head_queries, keys, rules) for head_queries in queries])
    scores = {b: block_score(summed, touching[b]) for b in range(rules.select_count)}
    return {b: score for b, score in scores.items() if score is not None}


# Step 4, select.


def forced_blocks(tile: int, rules: Rules) -> set[int]:
    """The initial and the local select blocks of a tile (step 4)."""
    first_block = rules.first_token(tile) // rules.select_block
    last_block = rules.last_token(tile) // rules.select_block
    if rules.causal:
        exist = range(last_block + 1)
        local_start = last_block - rules.local_blocks + 1
    else:
        exist = range(rules.select_count)
        local_start = (first_block + last_block + 1 - rules.local_blocks) // 2
    initial = set(range(rules.init_blocks))
    local = set(range(local_start, local_start + rules.local_blocks))
    return {b for b in initial | local if b in exist}


def choose(count: int, forced: set[int], scores: dict[int, Fraction]) -> set[int]:
    """The forced blocks, then the highest scores up to `count` in all; ties go to the lower index (step 4)."""
    others = [b for b in scores if b not in forced]
    others.sort(key=lambda b: (-scores[b], b))
    return forced | set(others[: count - len(forced)])


def choose_cmp_blocks(
    tile: int, queries: list[Vector], keys: list[Vector], rules: Rules
) -> tuple[set[int], dict[int, Fraction]]:
    """The blocks of n_block_size compressed entries that a query head's tile attends to, and scores (step 5)."""
    if rules.cmp_selected >= rules.cmp_block_count:
        return set(range(rules.cmp_block_count)), {}
    entry_scores = tile_scores(tile, queries, keys, rules)
    scores = {}
    forced = set()
    for block in range(rules.cmp_block_count):
        scored = [j for j in entry_scores if j // rules.cmp_block == block]
        if scored:
            scores[block] = sum(entry_scores[j] for j in scored) / len(scored)
        # Every scored entry ends at or before e, so these become visible inside the tile.
        if rules.causal and any(rules.end_of_compressed(j) >= rules.first_token(tile) for j in scored):
            forced.add(block)
    if len(forced) > rules.cmp_selected:
        raise ValueError(f"tile {tile} forces {len(forced)} blocks, num_cmp_selected_blocks={rules.cmp_selected}")
    return choose(rules.cmp_selected, forced, scores), scores


# Step 5, three attentions.


def cmp_keys(token: int, chosen: set[int] | None, rules: Rules) -> list[int]:
    """Compressed blocks that a token attends to; chosen None means all of the visible ones."""
    return [j for j in visible_compressed(token, rules) if chosen is None or j // rules.cmp_block in chosen]


def slc_keys(token: int, chosen: set[int], rules: Rules) -> list[int]:
    """Tokens of the chosen select blocks that a token attends to."""
    in_chosen = [j for j in range(rules.tokens) if j // rules.select_block in chosen]
    return [j for j in in_chosen if not rules.causal or j <= token]


def win_keys(token: int, rules: Rules) -> list[int]:
    """Tokens of a token's window."""
    if rules.window == 0:
        return []
    if rules.causal:
        return [j for j in range(rules.tokens) if token - rules.window < j <= token]
    return [j for j in range(rules.tokens) if abs(token - j) <= rules.window // 2]


def attend(
    query: Vector, keys: list[Vector], values: list[Vector], seen: list[int], value_dim: int, scale: float
) -> tuple[Vector, float]:
    """Softmax attention of one query over the keys `seen`: O and LSE; (0, -inf) without keys (step 5)."""
    if not seen:
        return [0.0] * value_dim, -math.inf
    logits = [scale * dot(query, keys[j]) for j in seen]
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = sum(weights)
    out = [dot(weights, [values[j][c] for j in seen]) / total for c in range(value_dim)]
    return out, top + math.log(total)


# Step 6, gate.


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def token_gates(query: Vector, projection: list[Vector] | None, given: Vector | None) -> Vector:
    """The three gates of one token and query head (step 6)."""
    if given is not None:
        return given
    if projection is not None:
        return [sigmoid(dot(query, row)) for row in projection]
    return [1.0 / 3.0] * 3


# One document, then a pack of documents.


def by_head(x: Tensor) -> list[list[Vector]]:
    """[N, heads, dim] -> [heads][N] vectors."""
    return x.detach().transpose(0, 1).tolist()


def to_tensor(nested: list, *shape: int) -> Tensor:
    return torch.tensor(nested, dtype=torch.float64).reshape(shape)


def check_pairs(k_cmp: Any, v_cmp: Any, w_k_compress: Any, w_v_compress: Any, proj: Any, gates: Any) -> None:
    """Refuse the combinations that steps 1 and 6 refuse."""
    if (k_cmp is None) != (v_cmp is None):
        raise ValueError("k_cmp and v_cmp: give both or neither")
    if k_cmp is not None and (w_k_compress is not None or w_v_compress is not None):
        raise ValueError("k_cmp, v_cmp replace compression: w_k_compress and w_v_compress must be None")
    if proj is not None and gates is not None:
        raise ValueError("gate_proj_weight and gates: give at most one")


@torch.no_grad()
def nsa_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: Any,
    *,
    w_k_compress: Tensor | None = None,
    w_v_compress: Tensor | None = None,
    k_cmp: Tensor | None = None,
    v_cmp: Tensor | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
    gates: Tensor | None = None,
    indices: list[list[set[int]]] | None = None,
    cmp_indices: list[list[set[int]]] | None = None,
) -> LoopResult:
    """NSA of one document: q [N, H, D], k [N, H_kv, D], v [N, H_kv, D_v], fp64 on the CPU, N >= 0.

    gates [N, H, 3], gate_proj_weight [H, 3, D], w_k_compress [H_kv, D, D], w_v_compress [H_kv, D_v, D_v], k_cmp
    [N_cmp, H_kv, D], v_cmp [N_cmp, H_kv, D_v]; the other keys and values are shaped like k and v. `config` has the
    attributes of NSAConfig. `indices` and `cmp_indices`, as in LoopResult, stand for the choice of blocks. Raises
    ValueError for what docs/semantics.md refuses.
    """
    tokens, query_heads, head_dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    group = query_heads // kv_heads
    rules = resolve(config, tokens, head_dim)
    check_pairs(k_cmp, v_cmp, w_k_compress, w_v_compress, gate_proj_weight, gates)

    # Step 1, compress.
    compressed = rules.compressed_count
    if k_cmp is None:
        how_k, how_v = compressors(config.compress)
        k_cmp = to_tensor(compress(k, rules, how_k, w_k_compress), compressed, kv_heads, head_dim)
        v_cmp = to_tensor(compress(v, rules, how_v, w_v_compress), compressed, kv_heads, value_dim)
    elif k_cmp.shape[0] != compressed or v_cmp.shape[0] != compressed:
        raise ValueError(f"k_cmp, v_cmp must have N_cmp={compressed} entries, got {len(k_cmp)} and {len(v_cmp)}")

    queries = by_head(q)
    cmp_k, cmp_v = by_head(k_cmp), by_head(v_cmp)
    slc_k, slc_v = by_head(k if k_slc is None else k_slc), by_head(v if v_slc is None else v_slc)
    win_k, win_v = by_head(k if k_win is None else k_win), by_head(v if v_win is None else v_win)
    given_gates = None if gates is None else by_head(gates)
    projection = None if gate_proj_weight is None else gate_proj_weight.detach().tolist()

    # Steps 3 and 4, score and select.
    touching = overlaps(rules)
    chosen_blocks: list[list[set[int]]] = []
    all_scores: list[list[dict[int, Fraction]]] = []
    for selection_head in range(kv_heads if rules.shared else query_heads):
        if rules.shared:
            together = queries[selection_head * group : (selection_head + 1) * group]
            kv_head = selection_head
        else:
            together = [queries[selection_head]]
            kv_head = selection_head // group
        tiles = range(rules.tile_count)
        scores = [select_scores(tile, together, cmp_k[kv_head], touching, rules) for tile in tiles]
        chosen_blocks.append([choose(rules.selected, forced_blocks(tile, rules), scores[tile]) for tile in tiles])
        all_scores.append(scores)
    indices = chosen_blocks if indices is None else indices

    # Step 5, the compressed branch's own choice.
    cmp_scores: list[list[dict[int, Fraction]]] | None = None
    if rules.cmp_selected is not None:
        choices = [
            [choose_cmp_blocks(tile, queries[h], cmp_k[h // group], rules) for tile in range(rules.tile_count)]
            for h in range(query_heads)
        ]
        cmp_scores = [[scores for _, scores in head] for head in choices]
        if cmp_indices is None:
            cmp_indices = [[chosen for chosen, _ in head] for head in choices]

    # Steps 5 and 6, per query head and token.
    out, all_gates = [], []
    o_cmp, o_slc, o_win = [], [], []
    lse_cmp, lse_slc, lse_win = [], [], []
    for h in range(query_heads):
        kv_head = h // group
        for i in range(tokens):
            tile = i // rules.tile
            query = queries[h][i]
            chosen = indices[kv_head if rules.shared else h][tile]
            cmp_chosen = None if cmp_indices is None else cmp_indices[h][tile]

            seen = cmp_keys(i, cmp_chosen, rules)
            o_c, lse_c = attend(query, cmp_k[kv_head], cmp_v[kv_head], seen, value_dim, rules.scale)
            seen = slc_keys(i, chosen, rules)
            o_s, lse_s = attend(query, slc_k[kv_head], slc_v[kv_head], seen, value_dim, rules.scale)
            seen = win_keys(i, rules)
            o_w, lse_w = attend(query, win_k[kv_head], win_v[kv_head], seen, value_dim, rules.scale)

            g = token_gates(
                query,
                None if projection is None else projection[h],
                None if given_gates is None else given_gates[h][i],
            )
            out.append([g[0] * c + g[1] * s + g[2] * w for c, s, w in zip(o_c, o_s, o_w, strict=True)])
            all_gates.append(g)
            o_cmp.append(o_c)
            o_slc.append(o_s)
            o_win.append(o_w)
            lse_cmp.append(lse_c)
            lse_slc.append(lse_s)
            lse_win.append(lse_w)

    def per_token(nested: list, dim: int) -> Tensor:
        return to_tensor(nested, query_heads, tokens, dim).transpose(0, 1).contiguous()

    return LoopResult(
        out=per_token(out, value_dim),
        o_cmp=per_token(o_cmp, value_dim),
        o_slc=per_token(o_slc, value_dim),
        o_win=per_token(o_win, value_dim),
        lse_cmp=to_tensor(lse_cmp, query_heads, tokens),
        lse_slc=to_tensor(lse_slc, query_heads, tokens),
        lse_win=to_tensor(lse_win, query_heads, tokens),
        k_cmp=k_cmp,
        v_cmp=v_cmp,
        gates=per_token(all_gates, 3),
        indices=indices,
        cmp_indices=cmp_indices,
        scores=all_scores,
        cmp_scores=cmp_scores,
    )


# Queries that continue a sequence: rows of the whole.

PER_KEY = ("k_slc", "v_slc", "k_win", "v_win")
PER_TOKEN = (*PER_KEY, "gates")
PER_COMPRESSED = ("k_cmp", "v_cmp")


def nsa_continued(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: Any,
    *,
    q_start: int | None = None,
    q_sum: Tensor | None = None,
    gates: Tensor | None = None,
    **tensors: Any,
) -> LoopResult:
    """Rows q_start ... of the document of q_start + N_q tokens, for queries q [N_q, H, D] that are those tokens.

    The queries before them are made up: those of q_start's tile add up to q_sum [H, D], as nothing else of them is
    read. k and v have at least as many tokens; what lies behind the last query is cut off. Tiles are those that hold
    queries; k_cmp and v_cmp are whole.
    """
    start = k.shape[0] - q.shape[0] if q_start is None else q_start
    stop, tile = start + q.shape[0], config.q_tile_size
    earlier = torch.zeros(start, *q.shape[1:], dtype=q.dtype)
    if start % tile and q.shape[0]:
        assert q_sum is not None, "the tile's earlier queries are unknown"
        earlier[start - start % tile :] = q_sum / (start % tile)
    block = config.compress_block_size
    stride = block if config.compress_stride is None else config.compress_stride
    for name, tensor in tensors.items():
        if tensor is not None and name in PER_KEY:
            tensors[name] = tensor[:stop]
        elif tensor is not None and name in PER_COMPRESSED:
            tensors[name] = tensor[: compressed_count(stop, block, stride)]
    if gates is not None:
        tensors["gates"] = torch.cat([torch.zeros(start, *gates.shape[1:], dtype=gates.dtype), gates])
    whole = nsa_document(torch.cat([earlier, q]), k[:stop], v[:stop], config, **tensors)
    tiles = slice(start // tile, math.ceil(stop / tile) if q.shape[0] else start // tile)

    def of_tiles(heads: list | None) -> list | None:
        return None if heads is None else [head[tiles] for head in heads]

    return LoopResult(
        out=whole.out[start:],
        o_cmp=whole.o_cmp[start:],
        o_slc=whole.o_slc[start:],
        o_win=whole.o_win[start:],
        lse_cmp=whole.lse_cmp[:, start:],
        lse_slc=whole.lse_slc[:, start:],
        lse_win=whole.lse_win[:, start:],
        k_cmp=whole.k_cmp,
        v_cmp=whole.v_cmp,
        gates=whole.gates[start:],
        indices=of_tiles(whole.indices),
        cmp_indices=of_tiles(whole.cmp_indices),
        scores=of_tiles(whole.scores),
        cmp_scores=of_tiles(whole.cmp_scores),
    )


def nsa_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Any,
    config: Any,
    *,
    cu_seqlens_k: Any = None,
    q_start: Any = None,
    q_sum: Tensor | None = None,
    **tensors: Tensor | None,
) -> list[LoopResult]:
    """NSA of packed documents, one result each; rows at or past cu_seqlens[-1] belong to none.

    `tensors` are the keyword tensors of nsa_document: per-token ones packed like q and k, k_cmp and v_cmp packed by
    document. cu_seqlens_k are the bounds of keys where they have their own; q_start [B] and q_sum [B, H, D] as in
    nsa_continued.
    """
    bounds = [int(bound) for bound in cu_seqlens]
    key_bounds = bounds if cu_seqlens_k is None else [int(bound) for bound in cu_seqlens_k]
    block = config.compress_block_size
    stride = block if config.compress_stride is None else config.compress_stride
    results = []
    cmp_start = 0
    for b, ((start, stop), (k_start, k_stop)) in enumerate(zip(pairwise(bounds), pairwise(key_bounds), strict=True)):
        cmp_stop = cmp_start + compressed_count(k_stop - k_start, block, stride)
        own: dict[str, Any] = {}
        for name, tensor in tensors.items():
            if tensor is None:
                own[name] = None
            elif name in PER_KEY:
                own[name] = tensor[k_start:k_stop]
            elif name in PER_TOKEN:
                own[name] = tensor[start:stop]
            elif name in PER_COMPRESSED:
                own[name] = tensor[cmp_start:cmp_stop]
            else:
                own[name] = tensor
        own["q_start"] = None if q_start is None else int(q_start[b])
        own["q_sum"] = None if q_sum is None else q_sum[b]
        results.append(nsa_continued(q[start:stop], k[k_start:k_stop], v[k_start:k_stop], config, **own))
        cmp_start = cmp_stop
    return results

"""The second oracle of NSA: one Python loop per sentence of the definition (docs/semantics.md), in fp64.

It shares no code with `nsa/` and is never optimised, so that agreement with `nsa.reference` means something. Steps
cited below are those of that page: compress, visibility, score, select, attend, gate. l, d, l', w, T, G as named there.
Block scores are exact fractions of the fp64 scores, so that rounding neither makes nor breaks a tie; inputs are finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
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


class Rules:
    """The options for one document of N tokens, every None resolved (section 3), and what follows from them."""

    def __init__(self, config: Any, tokens: int, head_dim: int) -> None:
        self.tokens = tokens  # N
        self.compress_block = length = config.compress_block_size  # l
        self.stride = length if config.compress_stride is None else config.compress_stride  # d
        self.select_block = length if config.select_block_size is None else config.select_block_size  # l'
        self.selected, self.window, self.tile = config.num_selected_blocks, config.window_size, config.q_tile_size
        self.shared = bool(config.share_heads_in_group) or config.q_tile_size == 1
        self.init_blocks, self.local_blocks = config.num_init_blocks, config.num_local_blocks
        self.cmp_selected, self.cmp_block = config.num_cmp_selected_blocks, config.n_block_size
        self.causal = config.causal
        self.scale = 1.0 / math.sqrt(head_dim) if config.softmax_scale is None else config.softmax_scale
        self.compressed_count = compressed_count(tokens, length, self.stride)  # N_cmp (step 1)
        self.select_count = math.ceil(tokens / self.select_block)  # the ragged last one included (step 3)
        self.cmp_block_count = math.ceil(self.compressed_count / self.cmp_block)  # (step 5)
        self.tile_count = math.ceil(tokens / self.tile)

    def first_token(self, tile: int) -> int:
        return tile * self.tile

    def last_token(self, tile: int) -> int:
        """e (step 3)."""
        return min((tile + 1) * self.tile, self.tokens) - 1

    def end_of_compressed(self, j: int) -> int:
        """The last token that compressed block j has read (step 2)."""
        return j * self.stride + self.compress_block - 1


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
    if compress_option == "mean":
        return None, None
    return compress_option if isinstance(compress_option, (tuple, list)) else (compress_option, compress_option)


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


# One document.


def by_head(x: Tensor) -> list[list[Vector]]:
    """[N, heads, dim] -> [heads][N] vectors."""
    return x.detach().transpose(0, 1).tolist()


def to_tensor(nested: list, *shape: int) -> Tensor:
    return torch.tensor(nested, dtype=torch.float64).reshape(shape)


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
    attributes of NSAConfig. `indices` and `cmp_indices`, as in LoopResult, stand for the choice of blocks.
    """
    tokens, query_heads, head_dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    group = query_heads // kv_heads
    rules = Rules(config, tokens, head_dim)

    # Step 1, compress.
    compressed = rules.compressed_count
    if k_cmp is None:
        how_k, how_v = compressors(config.compress)
        k_cmp = to_tensor(compress(k, rules, how_k, w_k_compress), compressed, kv_heads, head_dim)
        v_cmp = to_tensor(compress(v, rules, how_v, w_v_compress), compressed, kv_heads, value_dim)

    queries = by_head(q)
    cmp_k, cmp_v = by_head(k_cmp), by_head(v_cmp)
    branches = {
        "cmp": (cmp_k, cmp_v),
        "slc": (by_head(k if k_slc is None else k_slc), by_head(v if v_slc is None else v_slc)),
        "win": (by_head(k if k_win is None else k_win), by_head(v if v_win is None else v_win)),
    }
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
    outs: dict[str, list[Vector]] = {branch: [] for branch in branches}
    lses: dict[str, list[float]] = {branch: [] for branch in branches}
    for h in range(query_heads):
        kv_head = h // group
        for i in range(tokens):
            tile = i // rules.tile
            query = queries[h][i]
            seen = {
                "cmp": cmp_keys(i, None if cmp_indices is None else cmp_indices[h][tile], rules),
                "slc": slc_keys(i, indices[kv_head if rules.shared else h][tile], rules),
                "win": win_keys(i, rules),
            }
            for branch, (keys, values) in branches.items():
                o, lse = attend(query, keys[kv_head], values[kv_head], seen[branch], value_dim, rules.scale)
                outs[branch].append(o)
                lses[branch].append(lse)
            g = token_gates(
                query,
                None if projection is None else projection[h],
                None if given_gates is None else given_gates[h][i],
            )
            all_gates.append(g)
            out.append([dot(g, list(column)) for column in zip(*(outs[b][-1] for b in branches), strict=True)])

    def per_token(nested: list, dim: int) -> Tensor:
        return to_tensor(nested, query_heads, tokens, dim).transpose(0, 1).contiguous()

    return LoopResult(
        out=per_token(out, value_dim),
        **{f"o_{branch}": per_token(nested, value_dim) for branch, nested in outs.items()},
        **{f"lse_{branch}": to_tensor(nested, query_heads, tokens) for branch, nested in lses.items()},
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
    own: dict[str, Any] = {name: getattr(whole, name)[start:] for name in ("out", "o_cmp", "o_slc", "o_win", "gates")}
    own |= {name: getattr(whole, name)[:, start:] for name in ("lse_cmp", "lse_slc", "lse_win")}
    for name in ("indices", "cmp_indices", "scores", "cmp_scores"):
        heads = getattr(whole, name)
        own[name] = None if heads is None else [head[tiles] for head in heads]
    return replace(whole, **own)

"""A second oracle of attention residual, in Python loops over lists: it shares no code with the reference."""

from __future__ import annotations

import math

Vector = list[float]


def mix(blocks: list[list[list[Vector]]], w_query: Vector, w_norm: Vector, eps: float) -> list[list[Vector]]:
    """out [B][N][D] from blocks [L][B][N][D]."""
    return [
        [_token([block[b][n] for block in blocks], w_query, w_norm, eps) for n in range(len(blocks[0][b]))]
        for b in range(len(blocks[0]))
    ]


def _token(rows: list[Vector], w_query: Vector, w_norm: Vector, eps: float) -> Vector:
    scores = []
    for row in rows:
        size = math.sqrt(sum(x * x for x in row) / len(row) + eps)
        key = [x / size * w for x, w in zip(row, w_norm, strict=True)]
        scores.append(sum(q * k for q, k in zip(w_query, key, strict=True)))
    weights = [math.exp(score - max(scores)) for score in scores]
    total = sum(weights)
    return [sum(w / total * row[d] for w, row in zip(weights, rows, strict=True)) for d in range(len(rows[0]))]

"""The best blocks of a token from all scores (token_best.py), as the compiler's PTX, interpreted on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cute_kernels.best_blocks import Blocks
from tests.test_token_selected_ptx import argument, program
from tests.token_blocks_model import best

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

PLAIN = Blocks(4, 2, 8, 5, init=1, local=2)
LAST = (Blocks(4, 2, 8, 40, init=1, local=2), Blocks(4, 2, 8, 3, init=1, local=2), Blocks(4, 2, 8, 33))


@pytest.mark.parametrize(
    ("blocks", "first"),
    [(PLAIN, 0), (PLAIN, 5000), (PLAIN, 8192 + 4), (PLAIN, 20000), *((blocks, 3000) for blocks in LAST)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["random", "equal", "ties", "ascending", "nan"])
def test_interpreted(blocks: Blocks, first: int, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cute_kernels import jit, token_best

    monkeypatch.setattr(jit, "OPTIONS", f"{jit.OPTIONS} --gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}")
    tokens, width = 9, -(-(first + 9) // blocks.size)
    generator = torch.Generator().manual_seed(first)
    scores = torch.rand((1, 2, tokens, width), generator=generator)
    if kind == "equal":
        scores.fill_(0.25)
    elif kind == "ties":
        scores = (scores * 4).floor()  # zeros too
    elif kind == "ascending":
        scores = scores.sort(-1).values
    elif kind == "nan":
        scores[..., ::3] = torch.nan
    indices = torch.full((1, 2, tokens, blocks.count), -7, dtype=torch.int32)
    bits = scores.view(torch.int32)
    end = first + tokens
    entries = max(0, (end - blocks.length) // blocks.stride + 1)
    given = [argument(bits), argument(indices, (3,)), *(argument(x) for x in (entries, end, first, 0))]
    program(token_best._best, blocks, False).run(given, (-(-tokens // token_best.WARPS), 2, 1), [bits, indices], True)
    for head in range(2):
        for row in range(tokens):
            got = indices[0, head, row].tolist()
            assert got == best(scores[0, head, row], blocks, first + row), (head, row)

"""Padded batches as packs: each row's NSA is that of its real tokens alone."""

from __future__ import annotations

import pytest
import torch

from nsa import Unpadding, nsa
from tests.support.helpers import SMALL

MASKS = {
    "right": [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
    "both and holes": [[0, 1, 1, 0, 1, 0], [1, 0, 1, 0, 1, 1]],
    "empty row": [[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]],
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("name", MASKS)
def test_each_row_attends_to_its_real_tokens(name: str, dtype: torch.dtype) -> None:
    mask = torch.tensor(MASKS[name], dtype=dtype)
    q, k, v = torch.randn(3, 2, 6, 4, 8, dtype=torch.float64, requires_grad=True)
    rows = Unpadding.from_mask(mask)
    assert rows.cu_seqlens.dtype == torch.int32
    assert torch.equal(rows.pad(rows.unpad(mask)), mask)
    out = rows.pad(nsa(*(rows.unpad(x) for x in (q, k, v)), cu_seqlens=rows.cu_seqlens, config=SMALL["paper"]))
    assert torch.equal(out[~mask.bool()], torch.zeros_like(out[~mask.bool()]))
    for b, real in enumerate(mask.bool()):
        alone = nsa(*(x[b : b + 1, real] for x in (q, k, v)), config=SMALL["paper"])[0]
        torch.testing.assert_close(out[b, real], alone, rtol=0, atol=1e-12)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(dq[~mask.bool()], torch.zeros_like(dq[~mask.bool()]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_for_all_masks() -> None:
    def run(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = Unpadding.from_mask(mask)
        q = rows.unpad(x)
        return rows.pad(nsa(q, q, q, cu_seqlens=rows.cu_seqlens, config=SMALL["paper"]))

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    whole = torch.compile(run, fullgraph=True, backend=counter)
    x = torch.randn(2, 6, 4, 8)
    for mask in MASKS.values():
        torch.testing.assert_close(whole(x, torch.tensor(mask)), run(x, torch.tensor(mask)))
    assert counter.frame_count == 1

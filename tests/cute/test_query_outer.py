"""What query-outer attention alone does; against fp64 it is checked in test_kv_outer.py and test_kv_outer_ptx.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.plan import per_token
from tests.support.kv_outer_cases import BF16, make, random_indices

CUDA = pytest.mark.cuda


@CUDA
@pytest.mark.parametrize("dim", [64, 128])
def test_groups_of_128(dim: int) -> None:
    """As many heads as a key/value head may have."""
    make(517, 128, 2, dim, count=5).check_forward(query_outer=True)


@CUDA
@pytest.mark.parametrize("token", [0, 63, 64, 500, 997])
def test_others_change_nothing(token: int) -> None:
    """Bit for bit: neither what later tokens are nor what they choose, also in the same tile."""
    inputs = make(999, 16, 2, 128, count=8)
    before = inputs.forward(query_outer=True)
    q, k, v, indices = (x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.indices))
    for x in (q, k, v):
        x[:, token + 1 :] = torch.randn_like(x[:, token + 1 :])
    other = random_indices((1, 2), [999], 16, 8, size=64, seed=5).cuda()
    indices[:, :, token + 1 :] = other[:, :, token + 1 :]
    after = forward(q, k, v, indices, inputs)
    assert torch.equal(after[0][:, : token + 1], before[0][:, : token + 1])
    assert torch.equal(after[1][..., : token + 1], before[1][..., : token + 1])


@CUDA
def test_a_call_for_some_tokens_repeats_the_whole() -> None:
    """From any token that begins a tile the same bits; and the same bits each time."""
    inputs = make(1000, 16, 2, 128, count=8)
    whole = inputs.forward(query_outer=True)
    for start, stop in ((0, 1000), (8, 704), (640, 1000)):
        tensors = inputs.q[:, start:stop], inputs.k[:, :stop], inputs.v[:, :stop], inputs.indices[:, :, start:stop]
        o, lse = forward(*tensors, inputs, first_token=start)
        assert torch.equal(o, whole[0][:, start:stop])
        assert torch.equal(lse, whole[1][..., start:stop])


def forward(q: Any, k: Any, v: Any, indices: Any, inputs: Any, **how: Any) -> Any:
    from cute_kernels.attend.query_outer import query_outer_forward

    return query_outer_forward(q, k, v, indices, size=inputs.size, scale=inputs.scale, **how)


def test_the_rule() -> None:
    """By shapes alone, unless told otherwise; never for what the kernel refuses."""

    def query_outer(group: int, slots: int, override: bool | None = None) -> bool:
        return per_token(group, slots, override) == "query_outer"

    groups = (1, 16, 32, 63, 64, 128, 129)
    assert [query_outer(group, 16) for group in groups] == 4 * [False] + [True, True, False]
    assert not query_outer(64, 2049)
    assert query_outer(1, 16, True)
    assert not query_outer(129, 16, True)
    assert not query_outer(64, 16, False)


@pytest.mark.parametrize(
    ("group", "slots", "message"), [(129, 1, "at most 128 heads"), (64, 2049, "at most 2048 slots for 64 heads")]
)
def test_refusals(group: int, slots: int, message: str) -> None:
    q, k = (torch.zeros((1, 3, heads, 64), dtype=BF16) for heads in (group, 1))
    inputs = make(3, 1, 1, device="cpu")
    with pytest.raises(ValueError, match=message):
        forward(q, k, k, torch.zeros((1, 1, 3, slots), dtype=torch.int32), inputs)

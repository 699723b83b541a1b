"""Query-outer attention of each token to its own blocks, against fp64; on a CPU: test_kv_outer_ptx.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.plan import per_token
from tests.support.kv_outer_cases import BF16, FP16, make, random_indices

CUDA = pytest.mark.cuda


@CUDA
@pytest.mark.parametrize("tokens", [1, 2, 15, 63, 64, 65, 200, 1000, 4096])
def test_sizes(tokens: int) -> None:
    make(tokens, count=8).check_forward(query_outer=True)


@CUDA
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (128, 128), (128, 64), (64, 128)])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 16, 64, 128])
def test_groups(group: int, dim: int, v_dim: int, dtype: torch.dtype) -> None:
    batch = 1 if group >= 64 else 2
    make(517, group, 2, dim, v_dim, dtype=dtype, batch=batch, count=5).check_forward(query_outer=True)


@CUDA
@pytest.mark.parametrize("group", [1, 3, 16, 64])
def test_without_wgmma(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs other than Hopper's."""
    monkeypatch.setattr("cute_kernels.attend.query_outer.has_warpgroups", lambda _: False)
    make(517, group, 2, 128, count=5).check_forward(query_outer=True)
    make([300, 1, 216], group, 1, 64, 128, count=5, size=128).check_forward(query_outer=True)


@CUDA
@pytest.mark.parametrize("count", [1, 3, 16, 17, 40])
def test_slots(count: int) -> None:
    make(1500, 2, count=count).check_forward(query_outer=True)


@CUDA
@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_blocks(size: int) -> None:
    make(1100, 4, 2, 128, size=size).check_forward(query_outer=True)
    make([500, 77, 300], 4, 2, 128, size=size).check_forward(query_outer=True)


@CUDA
def test_documents() -> None:
    make([700, 0, 1, 129, 64, 333], 16, 2, 128, behind=9).check_forward(query_outer=True)
    make([64] * 9, 4, behind=0).check_forward(query_outer=True)


@CUDA
def test_rows_without_keys() -> None:
    chosen = torch.full((1, 2, 900, 3), -1, dtype=torch.int32)
    chosen[:, 0, 100:, 1] = 1
    chosen[:, 0, :64, 2] = 2
    make(900, 4, indices=chosen).check_forward(query_outer=True)
    make(300, indices=torch.full((1, 2, 300, 3), -1, dtype=torch.int32)).check_forward(query_outer=True)


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

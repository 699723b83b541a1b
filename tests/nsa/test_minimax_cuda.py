"""MiniMax-M3 of transformers on a GPU, through the kernels, in bf16: its own eager path in fp64 is the oracle.

Errors are compared with those of eager in bf16, by their root mean square: through a whole model the largest one of
both is chance. Scores of hidden states that bf16 has rounded decide which blocks a token takes, so the oracle takes the
blocks that eager chooses in bf16. After the first layer, or in calls of other shapes, these states have other bits, so
there a token takes all of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.integrations import minimax_m3
from tests.support.minimax_models import minimax_model, text

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.cuda_extra,
    pytest.mark.hf_extra,
    pytest.mark.filterwarnings("ignore"),  # transformers' own warnings
]

SIZES = {"hidden_size": 128, "head_dim": 64, "rotary_dim": 32, "index_head_dim": 64, "index_block_size": 64}
"""As kernels want them; no experts, whose choice bits would decide, too."""
SPARSE, DENSE = "minimax_m3_sparse", "full_attention"
LAYERS = {"selects": ([SPARSE], 3), "takes all": ([DENSE, SPARSE, SPARSE], 16)}
"""Kinds of layers, and how many blocks a token takes."""


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    minimax_m3.register()
    yield
    minimax_m3.unregister()


def models(case: str) -> tuple[Any, Any, Any]:
    """Ours, and eager in bf16 and in fp64, where the indexers take the blocks that those of bf16 took last."""
    kinds, blocks = LAYERS[case]
    rounded: dict[str, Any] = {"weights": torch.bfloat16, **SIZES, "layer_types": kinds, "index_topk_blocks": blocks}
    rounded |= {"mlp_layer_types": ["dense"] * len(kinds), "num_hidden_layers": len(kinds)}
    ours = minimax_model("nsa-blocks", dtype=torch.bfloat16, **rounded).cuda()
    low = minimax_model("eager", dtype=torch.bfloat16, **rounded).cuda()
    exact = minimax_model("eager", **rounded).cuda()
    for layer, of_oracle in zip(low.model.layers, exact.model.layers, strict=True):
        if layer.self_attn.indexer is not None:
            taken: list[Tensor] = []
            layer.self_attn.indexer.register_forward_hook(lambda *call, kept=taken: kept.append(call[-1]))
            of_oracle.self_attn.indexer.forward = lambda *_, kept=taken: kept.pop()
    return ours, low, exact


def assert_as_close(got: Tensor, exact: Tensor, low: Tensor, name: str) -> None:
    """The error is at most twice that of eager in bf16, and a rounding."""
    mine, theirs, size = (float(x.double().square().mean().sqrt()) for x in (got - exact, low - exact, exact))
    allowed = 2 * theirs + torch.finfo(got.dtype).eps * size
    assert mine <= allowed, f"{name}: error {mine:.3e} is above the budget {allowed:.3e}"


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients(case: str, padded: bool) -> None:
    ids = text(2, 300).cuda()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 250:] = 0
    weights = torch.randn(2, 300, 50, generator=torch.Generator().manual_seed(1)).cuda() * mask[..., None]
    ours, low, exact = models(case)
    found = []
    for model in (ours, low, exact):
        logits = model(ids, attention_mask=mask if padded else None).logits
        (logits * weights.to(logits.dtype)).sum().backward()
        real = torch.where(mask[..., None] > 0, logits.detach(), 0)
        found.append({"logits": real} | {name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, got in found[0].items():
        assert_as_close(got, found[2][name], found[1][name], name)


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}], ids=str)
@torch.no_grad()
def test_steps_of_generate_behind_padding(how: dict[str, Any]) -> None:
    """Logits of each step are those of a call on the text alone."""
    ours, low, exact = models("takes all")
    ids, mask = text(2, 200).cuda(), torch.ones(2, 200, dtype=torch.long, device="cuda")
    ids[0, :70], mask[0, :70] = 0, 0
    how = {"max_new_tokens": 20, "do_sample": False, "output_logits": True, "return_dict_in_generate": True, **how}
    written = ours.generate(ids, attention_mask=mask, **how)
    steps = torch.stack(written.logits, 1)
    for row, first in enumerate((70, 0)):
        alone = written.sequences[row : row + 1, first:]
        at = slice(199 - first, -1)
        theirs, expected = (model(alone).logits[0, at] for model in (low, exact))
        assert_as_close(steps[row], expected, theirs, f"row {row}")

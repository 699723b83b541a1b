"""convert changes a model as a whole or not at all, also one whose projections were replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nsa.integrations.transformers import convert, modeling
from tests.support.helpers import dynamically_quantized
from tests.support.hf_models import KINDS, OPTIONS, dense_model, token_ids

pytestmark = pytest.mark.hf_extra


def properties(model: nn.Module) -> list[Any]:
    """What a conversion changes of a model's modules."""
    return [(name, type(module), getattr(module, "config", None)) for name, module in model.named_modules()]


def refuse_half_way(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> type[Exception]:
    """The second layer's gates find no memory."""
    made: list[nn.Module] = []

    class Gates(modeling.BranchGates):
        def __init__(self, config: Any) -> None:
            made.append(self)
            if len(made) == 2:
                raise torch.OutOfMemoryError("no memory for gates")
            super().__init__(config)

    monkeypatch.setattr(modeling, "BranchGates", Gates)
    return torch.OutOfMemoryError


def replace_projection(_: pytest.MonkeyPatch, model: Any) -> type[Exception]:
    class Packed(nn.Module):
        pass

    model.model.layers[1].self_attn.q_proj = Packed()
    return TypeError


@pytest.mark.parametrize("fail", [refuse_half_way, replace_projection])
def test_a_conversion_that_fails_leaves_the_model_as_it_was(fail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense_model()
    error = fail(monkeypatch, model)
    before, config = properties(model), copy.deepcopy(model.config)
    with pytest.raises(error, match=r"no memory|projections must have a weight .* Packed"):
        convert(model)
    assert properties(model) == before
    assert model.config == config


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_dynamically_quantized_models_convert(kind: str) -> None:
    """The selected branch alone is dense for k blocks of l' tokens."""
    model, ids = dynamically_quantized(dense_model(kind)), token_ids(1, 32)
    expected = model(ids).logits
    assert convert(model, OPTIONS, gate_init=(1e-9, 1 - 1e-9, 1e-9)) is model
    # Inputs of a projection are quantized by their range: another rounding before it may move them by a step of 1/255
    assert (model(ids).logits - expected).abs().max() < expected.abs().max() / 50
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 35)

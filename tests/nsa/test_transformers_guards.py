"""Guards of attn_implementation="nsa" without conversion: masks of our own, cross-attention, parts of models, keywords.

tests/nsa/test_transformers_sweep.py runs the models of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from nsa.integrations.transformers.guards import CausalMask
from nsa.integrations.transformers.interface import nsa_mask
from tests.support.causal_models import nsa_twin, small_config
from tests.support.hf_models import dense_model, token_ids

pytestmark = [pytest.mark.hf_extra, pytest.mark.filterwarnings("ignore")]  # transformers' own warnings

PADDING = torch.ones(2, 6, dtype=torch.bool)
PADDING[1, :2] = False
FOREIGN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "added": lambda scores, mask: scores + mask,
    "converted, from the left": lambda scores, mask: (1.0 - mask.float()) * -1e9 + scores,
    "filled": lambda scores, mask: scores.masked_fill(mask, -1.0),
    "chosen": lambda scores, mask: torch.where(mask, scores, -1.0),
    "compared": lambda scores, mask: mask == 0,
    "cut": lambda scores, mask: mask[:, :, :, :3],
    "joined": lambda scores, mask: torch.cat([mask, mask], 1),
    "read": lambda scores, mask: bool(mask.all()),
    "attended with": lambda scores, mask: scaled_dot_product_attention(scores, scores, scores, attn_mask=mask),
}


@pytest.mark.parametrize("use", FOREIGN)
def test_no_other_attention_can_use_the_mask(use: str) -> None:
    mask = nsa_mask(2, 6, 6, attention_mask=PADDING)
    assert isinstance(mask, CausalMask)
    assert mask.shape == (2, 1, 6, 6)
    with pytest.raises(ValueError, match="attn_implementation='nsa' needs a model whose layers call"):
        FOREIGN[use](torch.randn(2, 4, 6, 6), mask)


def test_masks_are_copied_and_moved() -> None:
    mask = nsa_mask(2, 6, 6, attention_mask=PADDING)
    assert isinstance(mask, CausalMask)
    for copied in (mask.detach(), mask.clone(), mask.to("cpu", copy=True)):
        assert isinstance(copied, CausalMask)
        assert copied.shape == mask.shape
        assert copied.padding is not None
        assert torch.equal(copied.padding, PADDING)
    sent = send_to_device({"attention_mask": mask}, "meta")["attention_mask"]
    assert isinstance(sent, CausalMask)
    assert sent.padding is not None
    assert (sent.device.type, sent.padding.device.type) == ("meta", "meta")
    assert "CausalMask([2, 1, 6, 6]" in repr(mask)


def padded_batch() -> dict[str, Tensor]:
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, :7] = 0
    return {"input_ids": token_ids(2, 16), "attention_mask": mask}


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch, use_cache=False).logits[batch["attention_mask"].bool()].square().mean().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_masks_go_through_gradient_checkpointing(reentrant: bool) -> None:
    model = dense_model(attn_implementation="nsa").train()
    batch = padded_batch()
    expected = gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for name, grad in gradients(model, batch).items():
        assert torch.equal(grad, expected[name]), name
    mask = nsa_mask(2, 16, 16, attention_mask=batch["attention_mask"].bool())
    x = torch.randn(2, 16, 64, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(16)[None])
    out = checkpoint(model.model.layers[0], x, mask, None, None, False, tables, use_reentrant=reentrant)
    out.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.any())


@pytest.fixture
def _one_process() -> Iterator[None]:
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_masks_go_through_fsdp() -> None:
    model, batch = dense_model(attn_implementation="nsa").double(), padded_batch()
    expected = gradients(model, batch)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for name, grad in gradients(model, batch).items():
        whole = grad.full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(whole, expected[name], rtol=0, atol=1e-4 * float(expected[name].abs().max()))


def test_attention_that_says_it_is_cross_attention_is_refused() -> None:
    module = dense_model(attn_implementation="nsa").model.layers[0].self_attn
    attend = AttentionInterface._global_mapping["nsa"]
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 9, 16)
    with pytest.raises(ValueError, match="got 6 queries and 9 keys in LlamaAttention with a mask of 6 and 6"):
        attend(module, q, k, k, nsa_mask(2, 6, 6))
    with pytest.raises(ValueError, match=r"must be \[B,N_k\] = \[2, 9\] .* got a mask of shape \[2, 1, 6, 9\]"):
        attend(module, q, k, k, torch.zeros(2, 1, 6, 9))
    module.is_cross_attention = True
    with pytest.raises(ValueError, match="causal self-attention, got cross-attention in LlamaAttention"):
        attend(module, q, k[:, :, :6], k[:, :, :6], nsa_mask(2, 6, 6))


def qwen2_vl(names: Any) -> Any:
    torch.manual_seed(0)
    config = small_config(Qwen2VLConfig, full_attention=False)
    config.text_config.rope_parameters |= {"rope_type": "default", "mrope_section": [2, 3, 3]}
    config._attn_implementation = names
    return Qwen2VLForConditionalGeneration(config).eval()


def test_positions_of_three_axes_are_those_of_dense_attention() -> None:
    dense = qwen2_vl("eager")
    model = nsa_twin(dense)
    ids, axes = token_ids(2, 16), torch.randint(0, 16, (3, 2, 16))
    with torch.no_grad():
        for positions in (None, torch.arange(16).expand(3, 2, 16), axes):
            call = {"position_ids": positions, "use_cache": False, "attention_mask": torch.ones_like(ids)}
            expected, got = (each(ids, **call).logits for each in (dense, model))
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-3 * float(expected.std()))


def test_a_part_of_a_model_gets_the_name() -> None:
    model = qwen2_vl({"text_config": "nsa"})
    assert model.model.language_model.config._attn_implementation == "nsa"
    assert model.model.visual.config._attn_implementation == "sdpa"
    ids = token_ids(1, 12)
    expected = model(ids, use_cache=False).logits
    other = qwen2_vl("sdpa")
    other.set_attn_implementation({"text_config": "nsa"})
    assert torch.equal(other(ids, use_cache=False).logits, expected)


class OwnModel(PreTrainedModel):
    """A user's class, whose attention transformers cannot find in its file."""

    config_class = PreTrainedConfig


class OwnAttention(nn.Module):
    """So that transformers takes this file's attention for its own."""


def test_classes_of_users_say_that_they_call_the_interface() -> None:
    config = PreTrainedConfig()
    config._attn_implementation = "nsa"
    with pytest.raises(
        ValueError, match=r"got OwnModel, which has its own attention code .*_supports_attention_backend = True"
    ):
        OwnModel(config)

    class Declared(OwnModel):
        _supports_attention_backend = True

    Declared(config)
    outer = Declared(PreTrainedConfig())
    outer.part = OwnModel(PreTrainedConfig())
    with pytest.raises(ValueError, match="got OwnModel"):
        outer.set_attn_implementation("nsa")
    outer.set_attn_implementation("eager")

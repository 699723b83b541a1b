"""MiniMax-M3 of transformers with block-sparse attention: its own eager path is the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, CompileConfig, StaticCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

from nsa.integrations import minimax_m3
from tests.support.minimax_models import (
    CACHE_ARGUMENT,
    IMAGE_TOKEN,
    PIXELS_OF_A_PATCH,
    minimax_model,
    minimax_vl_model,
    text,
)

pytestmark = [pytest.mark.hf_extra, pytest.mark.filterwarnings("ignore")]  # transformers' own warnings


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    minimax_m3.register()
    yield
    minimax_m3.unregister()


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """The same weights: eager, and ours."""
    minimax_m3.register()
    return minimax_model("eager"), minimax_model("nsa-blocks")


def close(got: Tensor, expected: Tensor) -> None:
    """Norms, rotary angles and eager's probabilities are rounded to fp32, by 2^-24: times 2^8 through three layers."""
    torch.testing.assert_close(got, expected, rtol=0, atol=2**-16 * float(expected.abs().max()))


@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients_are_those_of_eager(models: tuple[Any, Any], padded: bool) -> None:
    """Padding to the right, of which labels and rows do not count."""
    ids, mask, results = text(2, 41), torch.ones(2, 41, dtype=torch.long), []
    if padded:
        ids[0, 30:], mask[0, 30:] = 0, 0
    for model in models:
        model.zero_grad()
        output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        results.append((output.logits[mask > 0], {name: x.grad for name, x in model.named_parameters()}))
    (expected, eager_gradients), (got, gradients) = results
    close(got, expected)
    assert gradients.keys() == eager_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient is None) == (eager_gradients[name] is None) == (".indexer." in name), name
        if gradient is not None:
            close(gradient, eager_gradients[name])


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
def test_generates_what_eager_does(models: tuple[Any, Any], how: dict[str, Any]) -> None:
    how = {"max_new_tokens": 12, "do_sample": False, **how}
    with torch.inference_mode():
        eager, ours = (model.generate(text(2, 13), **how) for model in models)
    assert torch.equal(ours, eager)
    assert eager.shape == (2, 25)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
def test_compiled_steps_write_the_same_tokens() -> None:
    """As `generate` compiles on a GPU: attention is a break of the graph."""
    torch.compiler.reset()
    compiled = CompileConfig(backend="eager", mode="default")
    compiled._compile_all_devices = True
    layer = {"layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["dense"], "num_hidden_layers": 1}
    ours, how = minimax_model("nsa-blocks", **layer), {"max_new_tokens": 5, "do_sample": False}
    ids, mask = text(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    with torch.inference_mode():
        written = ours.generate(ids, attention_mask=mask, cache_implementation="static", compile_config=compiled, **how)
        assert torch.equal(written, ours.generate(ids, attention_mask=mask, **how))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_prefill_in_parts_and_steps_are_the_whole_call(models: tuple[Any, Any]) -> None:
    ids, ours = text(2, 30), models[1]
    whole = ours(ids).logits
    for cache in (None, StaticCache(config=ours.config, max_cache_len=40)):
        output = ours(ids[:, :11], use_cache=True, **{CACHE_ARGUMENT: cache})
        logits = [output.logits]
        for first, stop in ((11, 20), (20, 21), (21, 30)):
            output = ours(ids[:, first:stop], **{CACHE_ARGUMENT: output[CACHE_ARGUMENT]})
            logits.append(output.logits)
        close(torch.cat(logits, 1), whole)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_positions_that_change_in_place(models: tuple[Any, Any], mode: Any) -> None:
    """A static cache's sizes stay, and the tensor is the same one."""
    ids, ours = text(1, 20), models[1]
    with mode():
        whole, cache = ours(ids).logits, StaticCache(config=ours.config, max_cache_len=40)
        position = torch.tensor([[12]])
        ours(ids[:, :12], position_ids=torch.arange(12)[None], **{CACHE_ARGUMENT: cache})
        for t in range(12, 20):
            logits = ours(ids[:, t : t + 1], position_ids=position, **{CACHE_ARGUMENT: cache}).logits
            close(logits[:, 0], whole[:, t])
            position += 1


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_changes_nothing(models: tuple[Any, Any], side: str) -> None:
    eager, ours = models
    ids, mask = torch.zeros(2, 30, dtype=torch.long), torch.zeros(2, 30, dtype=torch.long)
    places = {"left": (slice(7, 30), slice(0, 30)), "right": (slice(0, 23), slice(0, 30)), "both": (slice(2, 25),) * 2}
    for row, place in enumerate(places[side]):
        length = place.stop - place.start
        ids[row, place], mask[row, place] = text(length), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = ours(ids, attention_mask=mask, position_ids=positions).logits
    for row, place in enumerate(places[side]):
        close(got[row, place], eager(ids[row : row + 1, place]).logits[0])


def test_packs_are_separate_documents(models: tuple[Any, Any]) -> None:
    eager, ours = models
    ids, lengths = text(2, 30), ((10, 1, 19), (30,))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    got = ours(ids, position_ids=positions).logits
    for row, own in enumerate(lengths):
        parts = [eager(part[None]).logits[0] for part in ids[row].split(list(own))]
        close(got[row], torch.cat(parts))


def test_bounds_of_documents_are_those_of_positions(models: tuple[Any, Any]) -> None:
    ids, bounds = text(1, 30), torch.tensor([0, 10, 10, 30], dtype=torch.int32)
    positions = torch.cat([torch.arange(10), torch.arange(20)])[None]
    expected = models[1](ids, position_ids=positions).logits
    assert torch.equal(models[1](ids, position_ids=positions, cu_seq_lens_q=bounds).logits, expected)


def test_the_whole_model_reads_an_image_and_writes_what_eager_does() -> None:
    ids = text(1, 30)
    ids[:, 5:9] = IMAGE_TOKEN
    images = {
        "pixel_values": torch.randn(16, PIXELS_OF_A_PATCH, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    eager, ours = (minimax_vl_model(name) for name in ("eager", "nsa-blocks"))
    with torch.inference_mode():
        expected = eager(ids, **images).logits
        close(ours(ids, **images).logits, expected)
        other = ours(ids, **images | {"pixel_values": -images["pixel_values"]}).logits
        assert (other - expected).abs().max() > 1e-3, "the image counts"
        how = {"max_new_tokens": 12, "do_sample": False, **images}
        assert torch.equal(ours.generate(ids, **how), eager.generate(ids, **how))


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=str)
def test_generates_behind_left_padding_as_without(models: tuple[Any, Any], cache: dict[str, Any]) -> None:
    ours, alone, how = models[1], (text(1, 9), text(1, 16).flip(1)), {"max_new_tokens": 8, "do_sample": False}
    ids = torch.cat([torch.nn.functional.pad(one, (16 - one.shape[1], 0)) for one in alone])
    together = ours.generate(ids, attention_mask=(ids > 0).long(), **how, **cache)
    for row, one in zip(together, alone, strict=True):
        assert torch.equal(row[16 - one.shape[1] :], ours.generate(one, **how)[0])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, "must be 2-D"),
    (
        {"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]])},
        "must pad the ends of rows only, got 7 real tokens from 0 to 7 in row 0",
    ),
    ({"is_causal": False}, "is_causal must be True"),
    ({"cu_seq_lens_q": torch.tensor([0, 3, 3, 8])}, r"documents of position_ids, \[0, 8\], got \[0, 3, 8\]"),
    ({"cu_seq_lens_k": torch.tensor([0, 3, 8])}, r"cu_seq_lens_k must bound the documents of position_ids, \[0, 8\]"),
    *(
        ({name: value}, f"{name} .* attn_implementation='nsa-blocks' does not support: got")
        for name, value in {"sinks": torch.zeros(4), "seq_idx": torch.zeros(1, 8), "softcap": 30.0}.items()
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_honoured_is_refused(models: tuple[Any, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models[1](text(1, 8), **given)


def test_keywords_that_change_nothing_pass(models: tuple[Any, Any]) -> None:
    ours, ids = models[1], text(1, 20)
    nothing = {"num_items_in_batch": 3, "output_hidden_states": True, "output_router_logits": True, "sinks": None}
    assert torch.equal(ours(ids, **nothing).logits, ours(ids).logits)


def test_dropout_and_other_models_raise(models: tuple[Any, Any]) -> None:
    attention, x = models[1].model.layers[1].self_attn, torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match=r"has no dropout, got attention_dropout=0\.1"):
        minimax_m3.attention(attention, x, x, x, None, dropout=0.1)
    bloom = BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(ValueError, match="'nsa-blocks' is for MiniMax-M3, got BloomForCausalLM"):
        BloomForCausalLM(bloom).set_attn_implementation("nsa-blocks")
    bloom._attn_implementation = "nsa-blocks"
    with pytest.raises(ValueError, match="'nsa-blocks' is for MiniMax-M3, got BloomForCausalLM"):
        BloomForCausalLM(bloom)


def test_unregister_takes_everything_back() -> None:
    own = minimax_m3._REPLACED["forward"]
    minimax_m3.register()  # again: changes nothing
    minimax_m3.unregister()
    assert modeling.MiniMaxM3VLIndexer.forward is own
    for interface in (AttentionInterface, AttentionMaskInterface):
        assert "nsa-blocks" not in interface._global_mapping
    minimax_m3.unregister()
    minimax_m3.register()
    assert modeling.MiniMaxM3VLIndexer.forward is not own

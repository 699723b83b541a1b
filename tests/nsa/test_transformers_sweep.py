"""attn_implementation="nsa" on every causal model class of transformers: equal to dense attention, or refused by name.

NSA with gates (0, 1, 0) that selects all blocks is causal dense attention, so eager attention with the same weights is
the yardstick. A few classes run in every run of the tests; all of them run in those marked `full`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

import nsa
from nsa.integrations.transformers import interface
from tests.support.causal_models import NotBuilt, class_names, dense_model, nsa_twin
from tests.support.hf_models import VOCABULARY, token_ids

pytestmark = [
    pytest.mark.hf_extra,
    pytest.mark.filterwarnings("ignore"),  # of models alone
]

TOKENS = 16
PADDING = 5
TOLERANCE = 1e-3
"""Of a standard deviation of logits, which are some units: sums of two layers in fp32, in another order."""
SHARDS = 12
GOOD = ("equal", "refused", "nothing to attend")

CAUSAL = ["LlamaForCausalLM", "BartForCausalLM", "GPT2LMHeadModel", "MllamaForCausalLM"]
"""They call the attention interface: with all masks, equal."""
REFUSED_WHEN_SET = ["BloomForCausalLM", "MegatronBertForCausalLM", "ReformerModelWithLMHead", "ProphetNetForCausalLM"]
"""Their attention is their own."""
REFUSED_CALLED = [
    "BartForConditionalGeneration",
    "T5ForConditionalGeneration",
    "DogeForCausalLM",
    "Gemma2ForCausalLM",
]
"""Encoders, a mask with additions of the model's own, soft caps and windows."""


def calls_of(model: Any) -> dict[str, dict[str, Any]]:
    """Keywords of calls by name: with and without a mask, of one row and as many as tokens; padded, packed, cached."""
    torch.manual_seed(1)
    ids = token_ids(TOKENS, TOKENS)
    decoder = {"decoder_input_ids": token_ids(TOKENS, TOKENS)} if model.config.is_encoder_decoder else {}
    tokens = {"input_ids": ids, **decoder}
    left = torch.ones(2, TOKENS, dtype=torch.long)
    left[1, :PADDING] = 0
    packed = torch.cat([torch.arange(9), torch.arange(TOKENS - 9)])[None]

    def call(rows: int, **others: Any) -> dict[str, Any]:
        return {"use_cache": False} | {name: x[:rows] for name, x in tokens.items()} | others

    return {
        "no mask, one row": call(1),
        "no mask, as many rows as tokens": call(TOKENS),
        "mask of ones, one row": call(1, attention_mask=torch.ones(1, TOKENS, dtype=torch.long)),
        "mask of ones, as many rows as tokens": call(TOKENS, attention_mask=torch.ones_like(ids)),
        "left padding": call(2, attention_mask=left),
        "packed": call(1, position_ids=packed),
        "positions of three kinds": call(2, position_ids=torch.arange(TOKENS).expand(3, 2, TOKENS)),
        "cached": call(2, use_cache=True),
    }


def logits_of(model: Any, call: dict[str, Any]) -> Tensor:
    """Logits of real tokens; with a cache, those of all but three tokens, then those of three."""
    with torch.no_grad():
        if not call["use_cache"]:
            logits: Tensor = model(**call)[0]
            mask = None if model.config.is_encoder_decoder else call.get("attention_mask")
            return logits if mask is None else logits[mask.bool()]
        name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        first = model(**call | {name: call[name][:, :-3]})
        argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        after = model(**call | {name: call[name][:, -3:], argument: first[argument]})
        return torch.cat([first.logits, after.logits], 1)


def refused_by_name(error: BaseException) -> bool:
    """True if code of ours raises, or the error names the attention implementation."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    assert frame is not None
    ours = Path(nsa.__file__).parent in Path(frame.tb_frame.f_code.co_filename).parents
    return ours or "'nsa'" in str(error)


def outcomes(name: str, monkeypatch: pytest.MonkeyPatch, *, full_attention: bool) -> dict[str, str]:
    """By call: "equal", "refused", "nothing to attend" without attention layers, or what else happened.

    Calls that dense attention cannot run are left out.
    """
    dense = dense_model(name, full_attention=full_attention)
    calls: list[str] = []

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module).__name__)
        return interface.nsa_attention(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "nsa", counted)
    try:
        twin = nsa_twin(dense)
    except Exception as error:
        return {"set": "refused" if refused_by_name(error) else f"{type(error).__name__}: {error}"}
    found = {}
    for call, given in calls_of(dense).items():
        try:
            expected = logits_of(dense, given)
        except Exception:
            continue
        calls.clear()
        try:
            got = logits_of(twin, given)
        except Exception as error:
            found[call] = "refused" if refused_by_name(error) else f"{type(error).__name__}: {error}"
            continue
        difference, size = (got - expected).abs().max().item(), expected.std().item()
        if not difference < TOLERANCE * size:
            found[call] = f"differs by {difference:.2g} of {size:.2g}"
        elif not calls:
            attentions = {type(x).__name__ for x in twin.modules() if "attention" in type(x).__name__.lower()}
            found[call] = f"{attentions} do without us" if attentions else "nothing to attend"
        else:
            found[call] = "equal" if "row" not in call else equal_or_leak(twin, given, got, size)
    return found


def equal_or_leak(model: Any, call: dict[str, Any], logits: Tensor, size: float) -> str:
    """Return "equal" if no logits change before the last token when that changes."""
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    changed = call[name].clone()
    changed[:, -1] = 3 + (changed[:, -1] + 7) % (VOCABULARY - 3)
    after = logits_of(model, call | {name: changed})
    moved = (after - logits).reshape(len(changed), TOKENS, -1)
    assert bool(moved[:, -1].any())
    leak = moved[:, :-1].abs().max().item()
    return "equal" if leak < TOLERANCE * size else f"leaks {leak:.2g} of {size:.2g}"


@pytest.mark.parametrize("name", [*CAUSAL, *REFUSED_WHEN_SET, *REFUSED_CALLED])
def test_models_are_dense_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(name, monkeypatch, full_attention=False)
    if name in CAUSAL:
        packs = {found.pop("packed", "equal"), found.pop("positions of three kinds", "refused")}
        assert packs <= {"equal", "refused"}, packs
    assert {*found.values()} == {"equal" if name in CAUSAL else "refused"}, found
    assert (found.keys() == {"set"}) == (name in REFUSED_WHEN_SET)
    if name in REFUSED_WHEN_SET:
        model = dense_model(name)
        with pytest.raises(ValueError, match=f"attn_implementation='nsa' needs a model .* got {name}"):
            model.set_attn_implementation("nsa")
        assert model.config._attn_implementation == "eager"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_class_is_dense_or_refused(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names, compared = class_names()[shard::SHARDS], 0
    wrong: dict[tuple[str, bool, str], str] = {}
    summary: Counter[str] = Counter()
    for name in names:
        found: dict[str, str] = {}
        for full_attention in (False, True):
            if full_attention and ("set" in found or "equal" in found.values()):
                continue  # nothing that windows alone have refused
            try:
                found = outcomes(name, monkeypatch, full_attention=full_attention)
            except NotBuilt:
                continue
            compared += bool(found) and not full_attention
            wrong |= {(name, full_attention, call): x for call, x in found.items() if x not in GOOD}
            summary.update({*found.values()})
    assert not wrong, wrong
    assert compared >= 0.8 * len(names), compared
    assert summary["equal"] >= 0.3 * len(names), summary
    assert summary["refused"] > 0, summary

"""convert changes a model as a whole or not at all; transformers goes by names of classes and models as before."""

from __future__ import annotations

import copy
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nsa.integrations.transformers import convert
from nsa.integrations.transformers.modeling import MODELS
from tests.support.helpers import dynamically_quantized
from tests.support.hf_models import KINDS, OPTIONS, VOCABULARY, converted_model, dense_model, token_ids

pytestmark = [
    pytest.mark.hf_extra,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),  # renamed by transformers
]


def tokenizer() -> Any:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    own = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="w0", eos_token="w1", unk_token="w0")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_does_not_name_its_class(kind: str, tmp_path: Path) -> None:
    dense = dense_model(kind).config
    classes = []
    for name, config in {"dense": dense, "converted": convert(dense)}.items():
        folder = tmp_path / name
        config.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if "class" not in k}))
        classes.append(type(AutoTokenizer.from_pretrained(folder)))
    assert classes[1] is classes[0]


def test_the_loss_is_that_of_causal_models() -> None:
    dense = dense_model()
    made = type(converted_model())(convert(dense.config))
    assert convert(copy.deepcopy(dense)).loss_type == made.loss_type == dense.loss_type == "ForCausalLM"


def test_every_list_of_names_with_a_dense_class_has_its_nsa_class() -> None:
    """Lists of transformers that the modules above read, and any that a later version adds there."""
    names = {dense.__name__: own.__name__ for dense, own in MODELS.items()}
    lists = {
        id(value): value
        for path, module in list(sys.modules.items())
        if path.startswith("transformers.")
        for name, value in list(vars(module).items())
        if not name.startswith("_") and type(value) in (dict, OrderedDict, list, tuple, set, frozenset)
    }
    seen = 0
    for known in lists.values():
        held = {x for x in (*known, *(known.values() if isinstance(known, dict) else ())) if isinstance(x, str)}
        present = names.keys() & held
        assert {names[name] for name in present} <= held, known
        seen += bool(present)
    assert id(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) in lists
    assert seen >= 2


# A model is changed as a whole or not at all


def test_a_conversion_that_fails_half_way_leaves_the_model_as_it_was() -> None:
    def properties() -> list[Any]:
        return [(name, type(x), getattr(x, "config", None)) for name, x in model.named_modules()]

    model = dense_model()
    model.model.layers[1].self_attn.q_proj = nn.Identity()
    before, config = properties(), copy.deepcopy(model.config)
    with pytest.raises(TypeError, match=r"projections must have a weight .* Identity"):
        convert(model)
    assert properties() == before
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

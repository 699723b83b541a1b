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
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nsa.integrations.transformers import convert, modeling
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


@pytest.mark.parametrize(("kind", "adapted"), [("llama", True), ("qwen3", False)])
def test_label_smoothing_is_of_the_next_token(kind: str, adapted: bool, tmp_path: Path) -> None:
    model, ids, smoothing = converted_model(kind), token_ids(3, 40), 0.3
    with torch.no_grad():
        log_probs = torch.log_softmax(model(ids).logits.double(), -1)[:, :-1]
    of_labels = log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    expected = -((1 - smoothing) * of_labels + smoothing * log_probs.mean(-1)).mean()
    if adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    arguments = TrainingArguments(
        str(tmp_path), label_smoothing_factor=smoothing, use_cpu=True, report_to=[], disable_tqdm=True
    )
    examples: Any = [{"input_ids": row, "labels": row} for row in ids]
    found = Trainer(model, arguments, eval_dataset=examples).evaluate()["eval_loss"]
    assert found == pytest.approx(float(expected), rel=1e-5)


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

"""What transformers decides by the name of a class or of a model type: for converted models as for dense ones."""

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
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    TextGenerationPipeline,
    Trainer,
    TrainingArguments,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from nsa.integrations.transformers import convert
from nsa.integrations.transformers.modeling import MODELS
from tests.support.hf_models import KINDS, VOCABULARY, converted_model, dense_model, token_ids

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


def test_the_pipeline_of_texts_knows_them(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    pipeline = TextGenerationPipeline(model=converted_model(), tokenizer=tokenizer())
    assert not caplog.records
    (written,) = pipeline("w5 w6", max_new_tokens=3, do_sample=False)
    assert written["generated_text"].startswith("w5 w6")


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

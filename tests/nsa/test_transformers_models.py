"""Converted models of transformers: converting, saving and loading, what they compute, masks and packs, training."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    DynamicCache,
    GPT2Config,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Trainer,
    TrainingArguments,
)
from transformers.masking_utils import create_causal_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nsa import NSAConfig, NSAttention, nsa
from nsa.integrations.transformers import convert
from nsa.integrations.transformers.interface import nsa_attention, nsa_mask
from nsa.integrations.transformers.modeling import CACHE_ARGUMENT, MODELS
from nsa.integrations.transformers.options import GATES
from tests.support.helpers import dynamically_quantized
from tests.support.hf_models import KINDS, OPTIONS, VOCABULARY, converted_model, dense_model, token_ids

pytestmark = [
    pytest.mark.hf_extra,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),  # renamed by transformers
]

# Sums of the same numbers in other places of a batch, or through a cache, differ by rounding: logits of up to 10 in
# fp32 through two layers, with some 100 roundings of 6e-8 each
TOLERANCE = 1e-4
FP64_TOLERANCE = TOLERANCE * 2**-29
"""In which also positions have to be the same: their tables are fp32."""


def logits_of(model: Any, ids: Tensor, **call: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **call).logits


def close(one: Tensor, other: Tensor) -> bool:
    tolerance = FP64_TOLERANCE if one.dtype == torch.float64 else TOLERANCE
    return bool((one - other).abs().max() < tolerance)


# Conversion


@pytest.mark.parametrize("gates", ["hidden", "query", "learned"])
def test_a_converted_layer_is_nsattention(gates: Any) -> None:
    model = converted_model(gates=gates)
    layer = model.model.layers[0].self_attn
    x, positions = torch.randn(2, 40, 64), torch.arange(40)[None]
    tables = model.model.rotary_emb(x, positions)

    def rotate(heads: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        rotated, _ = layer.rotate(heads, heads, *tables, unsqueeze_dim=2)
        return rotated

    own = NSAttention(64, 4, 2, head_dim=16, config=OPTIONS, gate="x", rope=rotate)
    own.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("gates.")}, strict=False)
    with torch.no_grad():
        own.gate_proj.bias.copy_(layer.gates.bias.flatten())
        own.gate_proj.weight.zero_()
        if gates == "hidden":
            own.gate_proj.weight.copy_(layer.gates.hidden_proj.weight)
        expected = own(x, tables)
        if gates == "query":  # o_proj of the same branches with other gates
            arguments = own._nsa_arguments(x, tables)
            extra = torch.einsum("bnhd,hcd->bnhc", arguments["q"], layer.gates.query_proj)
            arguments["gates"] = torch.sigmoid(layer.gates.bias + extra)
            expected = own.o_proj(nsa(**arguments).flatten(-2))
        assert close(layer(x, tables)[0], expected)


def test_hidden_states_are_those_of_copies_adapters_and_checkpoints() -> None:
    model, ids = converted_model(), token_ids(1, 20)
    expected = model(ids, output_hidden_states=True).hidden_states
    asking, checkpoints = copy.deepcopy(model), copy.deepcopy(model).train()
    asking.config.output_hidden_states = True
    checkpoints.gradient_checkpointing_enable()
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"], modules_to_save=["gates"]))
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    found = [call(ids, output_hidden_states=True).hidden_states for call in (checkpoints, adapted, compiled)]
    for states in (asking(ids).hidden_states, *found):
        assert len(states) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))
    chosen = model(ids, output_hidden_states=[1, -1]).hidden_states
    assert [state is not None for state in chosen] == [False, True, True]


@pytest.mark.parametrize(("kind", "loaded"), [("llama", True), ("qwen3", False)])
def test_configs_convert(kind: str, loaded: bool, tmp_path: Path) -> None:
    dense = dense_model(kind)
    config = convert(dense.config, OPTIONS, gates="query")
    if loaded:
        dense.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
        ids = token_ids(1, 40)
        assert torch.equal(logits_of(model, ids), logits_of(convert(dense, OPTIONS, gates="query"), ids))
    else:
        model = AutoModelForCausalLM.from_config(config)
    gates = model.model.layers[1].self_attn.gates
    assert torch.sigmoid(gates.bias)[3].tolist() == pytest.approx([0.05, 0.9, 0.05])
    assert not gates.query_proj.any()


def test_the_base_model_loads_from_a_whole_one(tmp_path: Path) -> None:
    model, ids = converted_model("qwen3"), token_ids(1, 40)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is type(model.model)
    with torch.no_grad():
        assert torch.equal(model.lm_head(base(ids).last_hidden_state), logits_of(model, ids))


FRESH = """
import sys, torch
import nsa.integrations.transformers
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map={"": "cpu"})
    case = torch.load(folder + "/case.pt")
    with torch.no_grad():
        assert torch.equal(model(case["ids"]).logits, case["logits"]), folder
"""


def test_saved_models_load_in_a_fresh_process(tmp_path: Path) -> None:
    folders = []
    for kind, dtype, gates in (("llama", torch.float32, "query"), ("qwen3", torch.bfloat16, "hidden")):
        model = converted_model(kind, gates=gates).to(dtype)
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # in fp32, as from_pretrained makes it
        folder = tmp_path / kind
        model.save_pretrained(folder)
        ids = token_ids(1, 40)
        torch.save({"ids": ids, "logits": logits_of(model, ids)}, folder / "case.pt")
        folders.append(str(folder))
        config = AutoConfig.from_pretrained(folder)
        assert config.to_dict() == model.config.to_dict() | {"_name_or_path": str(folder)}
    subprocess.run([sys.executable, "-c", FRESH, *folders], check=True, timeout=120)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_does_not_name_its_class(kind: str, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")
    dense, classes = dense_model(kind).config, []
    for name, config in {"dense": dense, "converted": convert(dense)}.items():
        folder = tmp_path / name
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
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


# Masks and packs


@pytest.mark.parametrize(
    ("kind", "gates", "use_cache"), [("llama", "hidden", True), ("qwen3", "query", False), ("llama", "learned", True)]
)
def test_padding_equals_unpadded_rows(kind: str, gates: str, use_cache: bool) -> None:
    model = converted_model(kind, gates=gates).double()
    lengths, width = (33, 40, 1), 45
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    texts = [token_ids(1, n) for n in lengths]
    spans = [slice(width - 33, width), slice(0, 40), slice(7, 8)]  # to the left, to the right, both
    for row, (text, span) in enumerate(zip(texts, spans, strict=True)):
        ids[row, span], mask[row, span] = text, 1
    logits = logits_of(model, ids, attention_mask=mask, use_cache=use_cache)
    for row, (text, span) in enumerate(zip(texts, spans, strict=True)):
        assert close(logits[row, span], logits_of(model, text)[0])


@pytest.mark.parametrize("gates", [None, *GATES])
def test_packs_equal_separate_documents(gates: str | None) -> None:
    model = converted_model(gates=gates).double() if gates else unconverted()
    lengths = (30, 1, 41)
    texts = [token_ids(1, n) for n in lengths]
    expected = torch.cat([logits_of(model, text) for text in texts], 1)
    ids = torch.cat(texts, 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    assert close(logits_of(model, ids, position_ids=positions, use_cache=False), expected)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": text[0].tolist()} for text in texts])
    assert {"input_ids", "position_ids", "cu_seq_lens_q", "max_length_q"} <= batch.keys()
    assert close(model(**batch, use_cache=False).logits, expected)
    assert close(logits_of(model, ids, cu_seq_lens_q=batch["cu_seq_lens_q"], use_cache=False), expected)
    if gates:  # rows of a batch are documents, too; a cache is left out, not given documents
        twice = ids.flip(1).repeat(2, 1)
        twice[0] = ids
        assert close(logits_of(model, twice, position_ids=positions)[:1], expected)


def unconverted() -> Any:
    model = dense_model(attn_implementation="nsa")
    sizes = dict.fromkeys(("compress_block_size", "select_block_size", "window_size"), 8)
    model.config.nsa_config = sizes | {"num_selected_blocks": 3, "q_tile_size": 1}
    return model


def test_the_attention_function_takes_padding_and_caches() -> None:
    model = unconverted()
    text = token_ids(1, 40)
    expected = logits_of(model, text)
    assert not close(expected, logits_of(dense_model().to(torch.float32), text))
    for shift, rows in ((0, slice(0, 40)), (5, slice(5, 45))):
        padded = torch.cat([text, torch.zeros(1, 5, dtype=torch.long)], 1).roll(shift, 1)
        mask = (padded > 0).long()
        assert close(logits_of(model, padded, attention_mask=mask)[:, rows], expected)
    kwargs = {"max_new_tokens": 8, "do_sample": False}
    with_cache = model.generate(padded, attention_mask=mask, **kwargs)
    assert torch.equal(with_cache, model.generate(padded, attention_mask=mask, use_cache=False, **kwargs))
    with pytest.raises(ValueError, match="use a dynamic cache"):
        model.generate(text, cache_implementation="static", **kwargs)


@pytest.mark.parametrize("converted", [False, True])
def test_other_masks_are_refused(converted: bool) -> None:
    model = converted_model() if converted else unconverted()
    ids = token_ids(2, 6)
    holes = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0]])
    with pytest.raises(ValueError, match="row 1: 1 real, 2 padded, 2 real, 1 padded"):
        model(ids, attention_mask=holes)
    with pytest.raises(ValueError, match=r"attention_mask must be \[B,N_k\] = \[2, 6\]"):
        model(ids, attention_mask=torch.zeros(2, 1, 6, 6), use_cache=False)
    with pytest.raises(ValueError, match="beginning in row 0"):
        model(ids, attention_mask=torch.ones(2, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
    model.config.is_causal = False
    with pytest.raises(ValueError, match=r"is causal attention|is_causal must be True"):
        model(ids, use_cache=False)


BOUNDS = torch.tensor([0, 2, 6], dtype=torch.int32)
REFUSED = {
    "attention_dropout must be 0": {"dropout": 0.1},
    "is_causal must be True": {"is_causal": False},
    "softcap asks for soft-capped logits, .* got 30.0": {"softcap": 30.0},
    r"s_aux asks for attention sinks, .* a tensor of shape \[4\]": {"s_aux": torch.zeros(4)},
    "sliding_window asks for": {"sliding_window": 8},
    "block_indices asks for attention to the blocks": {"block_indices": torch.zeros(2, 2, 6, 1)},
    r"indices asks for attention to the tokens.* shape \[6\]": {"indices": torch.zeros(6)},
    r"seq_idx is a keyword that attn_implementation='nsa' does not support: got a tensor of shape \[1, 6\]": {
        "seq_idx": torch.zeros(1, 6)
    },
    "never_heard_of is a keyword that attn_implementation='nsa' does not support: got False": {"never_heard_of": False},
    "output_attentions must be False": {"output_attentions": True},
    "is_cross_attention must be False": {"is_cross_attention": True},
    "a batch of 2": {"cu_seq_lens_q": BOUNDS},
    r"cu_seq_lens_q must have the shape \[documents \+ 1\], got \[1, 3\]": {"cu_seq_lens_q": BOUNDS[None]},
    r"cu_seq_lens_q must be on the tokens' device cpu, got meta": {"cu_seq_lens_q": BOUNDS.to("meta")},
    "cu_seq_lens_k must come with cu_seq_lens_q": {"cu_seq_lens_k": BOUNDS},
    r"be cu_seq_lens_q.*, got \[0, 6\] and \[0, 2, 6\]": {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS[::2]},
    "max_length_k must be max_length_q=4, got 3": {"cu_seq_lens_q": BOUNDS, "max_length_q": 4, "max_length_k": 3},
    r"position_ids must be \[B,N\]": {"position_ids": torch.zeros(3, 2, 6)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_the_attention_function_refuses_what_it_would_ignore(message: str) -> None:
    module = unconverted().model.layers[0].self_attn
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16)
    with pytest.raises(ValueError, match=message):
        nsa_attention(module, q, k, k, nsa_mask(2, 6, 6), **REFUSED[message])


@pytest.mark.parametrize("converted", [False, True])
def test_keywords_that_change_nothing_pass(converted: bool) -> None:
    model, ids = converted_model() if converted else unconverted(), token_ids(2, 12)
    expected = logits_of(model, ids, use_cache=False)
    given = {"num_items_in_batch": 3, "output_hidden_states": True, "output_router_logits": True, "logits_to_keep": 0}
    nothing = dict.fromkeys(("softcap", "s_aux", "sinks", "block_indices", "indices", "seq_idx", "never_heard_of"))
    given |= {"is_causal": True, "output_attentions": False, "labels": ids, "return_dict": True} | nothing
    assert torch.equal(logits_of(model, ids, use_cache=False, **given), expected)
    with pytest.raises(ValueError, match=r"seq_idx is .* got"):
        model(ids, seq_idx=torch.zeros(2, 12), use_cache=False)


def test_bounds_of_documents_are_integers_and_those_of_keys() -> None:
    model, ids = converted_model(), token_ids(1, 6)
    expected = logits_of(model, ids, cu_seq_lens_q=BOUNDS, use_cache=False)
    pack = {"cu_seq_lens_q": BOUNDS.long(), "cu_seq_lens_k": BOUNDS, "max_length_q": 4, "max_length_k": 4}
    assert torch.equal(logits_of(model, ids, **pack, use_cache=False), expected)
    errors: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"cu_seq_lens_q": BOUNDS[:2] * 2}, ValueError, r"must end with the number of tokens, 6, got \[0, 4\]"),
        ({"cu_seq_lens_q": BOUNDS + torch.tensor([0, 0, 1])}, ValueError, r"of tokens, 6, got \[0, 2, 7\]"),
        ({"cu_seq_lens_q": BOUNDS.float()}, TypeError, r"must be a tensor of int32 or int64, got torch\.float32"),
        (pack | {"max_length_q": torch.tensor(4)}, TypeError, r"max_length_q must be an integer or None, got tensor"),
    ]
    for given, error, message in errors:
        with pytest.raises(error, match=message):
            logits_of(model, ids, **given, use_cache=False)


def test_packs_that_contradict_a_mask_or_a_cache_are_refused() -> None:
    module = unconverted().model.layers[0].self_attn
    q, k, padding = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.ones(1, 6, dtype=torch.bool)
    padding[0, 0] = False
    with pytest.raises(ValueError, match="contradict each other"):
        nsa_attention(module, q, k, k, nsa_mask(1, 6, 6, attention_mask=padding), cu_seq_lens_q=BOUNDS)
    with pytest.raises(ValueError, match="a cache holds earlier ones"):
        nsa_attention(module, q[:, :, :4], k, k, nsa_mask(1, 4, 6, 2), cu_seq_lens_q=torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match=r"position_ids pack documents, .* not pass them to its mask, as with a cache"):
        nsa_attention(module, q[:, :, :4], k, k, nsa_mask(1, 4, 6, 2), position_ids=torch.tensor([[2, 3, 0, 1]]))


def test_arguments_come_in_the_order_of_the_dense_model() -> None:
    model, ids, cache = converted_model().model, token_ids(1, 20), DynamicCache()
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        assert torch.equal(model(ids, None, None, cache).last_hidden_state, expected)
        assert cache.get_seq_length() == 20
        embeds = model.embed_tokens(ids)
        assert torch.equal(model(None, None, None, None, embeds).last_hidden_state, expected)
    for given, message in (
        ((), "got neither"),
        ((ids, None, None, None, embeds), "got both"),
        ((ids[0],), r"input_ids must be \[B,N\], got shape \[20\]"),
        ((None, None, None, None, embeds[0]), r"inputs_embeds must be \[B,N,hidden_size\], got shape"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*given)


def test_overlays_of_masks_are_refused() -> None:
    model = converted_model()
    call = {"config": model.config, "inputs_embeds": torch.zeros(1, 6, 64), "attention_mask": None}
    call |= {"position_ids": None, CACHE_ARGUMENT: None}
    assert create_causal_mask(**call) is None
    with pytest.raises(ValueError, match="or_mask"):
        create_causal_mask(**call, or_mask_function=lambda b, h, q, k: k == 0)


def test_packs_of_models_that_keep_positions_to_themselves_are_refused() -> None:
    config = GPTBigCodeConfig(
        vocab_size=50, n_embd=32, n_layer=1, n_head=4, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2
    )
    model = GPTBigCodeForCausalLM(config).eval()
    model.set_attn_implementation("nsa")
    ids, positions = torch.ones(1, 9, dtype=torch.long), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    assert logits_of(model, ids, use_cache=False).shape == (1, 9, 50)
    with pytest.raises(ValueError, match="position_ids pack documents, and this model does not pass them"):
        model(ids, position_ids=positions, use_cache=False)


# Training


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])


def test_gradients_reach_every_parameter_also_through_checkpoints() -> None:
    model = converted_model("qwen3").train()
    ids = token_ids(1, 40)
    loss_of(model, ids).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert all(bool(grad.any()) for grad in expected.values())
    model.zero_grad()
    model.gradient_checkpointing_enable()
    loss_of(model, ids).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_lora_trains_and_merges() -> None:
    model = converted_model()
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "hidden_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, lora)
    ids = token_ids(1, 40)
    loss_of(adapted, ids).backward()
    grads = {name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert grads
    assert all("lora" in name and bool(grad.any()) for name, grad in grads.items())
    expected = logits_of(adapted, ids)
    assert close(logits_of(adapted.merge_and_unload(), ids), expected)


def padded_to_the_right(texts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collator's batch; labels behind a text do not count."""
    ids, labels = (
        pad_sequence([text["input_ids"] for text in texts], batch_first=True, padding_value=value)
        for value in (0, -100)
    )
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def test_trainer_takes_padded_batches_and_evaluates(tmp_path: Path) -> None:
    model = converted_model()
    texts = [token_ids(1, n)[0] for n in (40, 23, 31, 17)]
    options = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "max_steps": 6, "learning_rate": 3e-3}
    arguments = TrainingArguments(str(tmp_path), **options, use_cpu=True, report_to=[], save_strategy="no")
    examples: Any = [{"input_ids": text} for text in texts]
    given = {"train_dataset": examples, "eval_dataset": examples, "data_collator": padded_to_the_right}
    trainer = Trainer(model, arguments, **given)

    def loss_by_texts() -> float:
        """Of each text alone."""
        with torch.no_grad():
            sums = [loss_of(model, text[None]) * (len(text) - 1) for text in texts]
        return float(sum(sums)) / sum(len(text) - 1 for text in texts)

    before = loss_by_texts()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-5)
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after == pytest.approx(loss_by_texts(), rel=1e-5)
    assert after < before

    smoothing = 0.3
    with torch.no_grad():
        log_probs = torch.log_softmax(model(texts[0][None]).logits[:, :-1].double(), -1)
    of_labels = log_probs.gather(-1, texts[0][None, 1:, None])
    expected = -((1 - smoothing) * of_labels.mean() + smoothing * log_probs.mean())
    arguments.label_smoothing_factor = smoothing
    smoothed = Trainer(model, arguments, **{**given, "eval_dataset": examples[:1]}).evaluate()
    assert smoothed["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_compiles_as_a_whole() -> None:
    model = converted_model(num_hidden_layers=1, gates="query").double()
    ids = token_ids(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    padded = logits_of(model, ids, attention_mask=mask)
    assert close(logits_of(compiled, ids, attention_mask=mask)[0, 9:], padded[0, 9:])
    for longest in (23, 33):  # a symbol from the second one on
        bounds = torch.tensor([0, longest, 40], dtype=torch.int32)
        pack = {"cu_seq_lens_q": bounds, "max_length_q": longest, "max_length_k": longest}
        assert close(logits_of(compiled, ids[1:], **pack), logits_of(model, ids[1:], **pack))
    with pytest.raises(Exception, match="position_ids may hold packed documents"):
        compiled(ids, position_ids=torch.arange(40)[None])
    with pytest.raises(Exception, match=r"runs in torch\.compile after"):
        torch.compile(unconverted(), fullgraph=True, backend="eager")(ids, use_cache=False)


def test_a_cache_and_gradients_exclude_each_other() -> None:
    model, ids = converted_model(), token_ids(1, 8)
    assert getattr(model(ids), CACHE_ARGUMENT) is None
    with pytest.raises(ValueError, match=r"a cache does not support gradients: .* got use_cache=True"):
        model(ids, use_cache=True)


# Errors


def hooked() -> Any:
    model = dense_model()
    model.model.layers[0].forward = model.model.layers[0].forward
    return model


SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 2}
FIRST = NSAConfig.paper(compress=lambda blocks: blocks[..., 0, :])
UNCONVERTED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: convert(GPT2Config()), TypeError, r"model must be one of LlamaModel.*got GPT2Config"),
    (lambda: convert(type("MiniCPMConfig", (), {"sparse_config": {"kernel_size": 32}})()), TypeError, "InfLLM-v2"),
    (lambda: convert(LlamaConfig(attention_dropout=0.1)), ValueError, "attention_dropout must be 0"),
    (lambda: convert(Qwen3Config(**SLIDING)), ValueError, "layer_types must all be 'full_attention', got full_attent"),
    (lambda: convert(LlamaConfig(), gates="x"), ValueError, "gates must be one of"),  # type: ignore[arg-type]
    (
        lambda: convert(LlamaConfig(), gate_init=(0, 1, 0)),
        ValueError,
        "gate_init must be three numbers between 0 and 1",
    ),
    (lambda: convert(LlamaConfig(), NSAConfig(causal=False)), ValueError, "causal must be True"),
    (lambda: convert(LlamaConfig(), FIRST), ValueError, "compress must be 'mean'"),
    (lambda: convert(hooked()), ValueError, r"got one at model\.layers\.0"),
    (lambda: converted_model().set_attn_implementation("sdpa"), ValueError, "attn_implementation must be 'nsa'"),
]


@pytest.mark.parametrize(("run", "error", "message"), UNCONVERTED, ids=[message for *_, message in UNCONVERTED])
def test_what_cannot_be_converted_is_refused(run: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run()

"""Converted models on a GPU, through the kernels: saved and loaded, padded, packed, and generating with a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo.utils
from transformers import AutoModelForCausalLM

from nsa import NSAConfig
from tests.support.hf_models import converted_model, token_ids

pytestmark = [pytest.mark.cuda, pytest.mark.cuda_extra, pytest.mark.hf_extra]

BF16 = 0.1
"""Logits of up to 10, of two layers: some 16 roundings of 2^-9 of their size, one beside the other."""


@pytest.fixture
def model(tmp_path: Path) -> torch.nn.Module:
    """In bf16 with heads of 64, as kernels want it, loaded from where it was saved."""
    made = converted_model(options=NSAConfig.paper(), head_dim=64, initializer_range=0.05).to(torch.bfloat16)
    made.save_pretrained(tmp_path)
    return AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", device_map="cuda").eval()


@pytest.mark.filterwarnings("ignore")  # inside torch.compile
def test_thousands_of_compiled_steps() -> None:
    """As `generate` compiles with a static cache by itself: CUDA graphs of one graph, which no write keeps from being
    captured. A token takes all of its blocks, so that rounding is all that differs from the call on the whole text.
    """
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()  # of what other tests compiled
    options = NSAConfig.paper(num_selected_blocks=80)
    model = converted_model(options=options, head_dim=64, initializer_range=0.05).to(torch.bfloat16).cuda()
    ids, mask = token_ids(2, 300).cuda(), torch.ones(2, 300, dtype=torch.long, device="cuda")
    ids[0, :40], mask[0, :40] = 0, 0
    how = {"do_sample": False, "cache_implementation": "static", "max_new_tokens": 4096}
    written = model.generate(ids, attention_mask=mask, **how)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert counters["inductor"]["cudagraph_skips"] == 0
    whole = torch.cat([mask, torch.ones_like(written[:, 300:])], 1)
    with torch.no_grad():
        logits = model(written, attention_mask=whole, use_cache=False).logits[:, 299:-1].float()
    chosen = logits.gather(2, written[:, 300:, None])[..., 0]
    assert (logits.amax(2) - chosen).max() < 2 * BF16
    assert model.generate(ids[:, :200], attention_mask=mask[:, :200], **how | {"max_new_tokens": 9}).shape == (2, 209)
    assert counters["stats"]["unique_graphs"] == 1, "the next cache is of the same size"


@torch.no_grad()
def test_padding_packs_and_caches_equal_texts_alone(model: torch.nn.Module) -> None:
    texts = [token_ids(1, n).cuda() for n in (2000, 1300)]
    expected = [model(text, use_cache=False).logits[0].float() for text in texts]
    mask = torch.ones(2, 2000, dtype=torch.long, device="cuda")
    mask[1, :700] = 0
    ids = torch.cat([texts[0], torch.nn.functional.pad(texts[1], (700, 0))])
    for use_cache in (False, True):
        logits = model(ids, attention_mask=mask, use_cache=use_cache).logits.float()
        assert (logits[0] - expected[0]).abs().max() < BF16
        assert (logits[1, 700:] - expected[1]).abs().max() < BF16
    positions = torch.cat([torch.arange(2000), torch.arange(1300)])[None].cuda()
    packed = model(torch.cat(texts, 1), position_ids=positions).logits[0].float()
    assert (packed - torch.cat(expected)).abs().max() < BF16
    written = model.generate(
        ids, attention_mask=mask, max_new_tokens=40, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    whole = torch.cat([mask, torch.ones(2, 40, dtype=torch.long, device="cuda")], 1)
    again = model(written.sequences, attention_mask=whole, use_cache=False).logits[:, 1999:-1].float()
    assert (torch.stack(written.logits, 1).float() - again).abs().max() < BF16

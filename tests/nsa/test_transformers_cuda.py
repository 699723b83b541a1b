"""Converted models on a GPU, through the kernels: saved and loaded, padded, packed, and generating with a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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


@torch.no_grad()
def test_loaded_models_agree(model: torch.nn.Module, tmp_path: Path) -> None:
    ids = token_ids(1, 2000).cuda()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", device_map="cuda").eval()
    assert torch.equal(model(ids).logits, again(ids).logits)


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

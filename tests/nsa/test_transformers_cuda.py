"""Converted models on a GPU, through the kernels: saved and loaded, padded, packed, and generating with a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor
from transformers import AutoModelForCausalLM

from nsa import NSAConfig, nsa_forward_aux
from nsa.integrations.transformers.options import options_of
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


def gaps(model: Any, ids: Tensor, rows: list[int]) -> Tensor:
    """`[B,rows]`, of a model of one layer: by which part of the last block's score that a token takes the next one
    scores less, the least of its key/value heads. Scores are fp64 of q and K_cmp in bf16.
    """
    from tests.support.select_cases import probabilities

    layer, config = model.model.layers[0], options_of(model.config)
    x, positions = layer.input_layernorm(model.model.embed_tokens(ids)), torch.arange(ids.shape[1])[None]
    q, k, v = layer.self_attn._heads(x)
    tables = model.model.rotary_emb(x, positions.to(x.device))
    q, k = layer.self_attn.rotate(q, k, *tables, unsqueeze_dim=2)
    _, aux = nsa_forward_aux(q, k, v, config=config)
    group, local = q.shape[2] // k.shape[2], config.num_local_blocks
    room = config.num_selected_blocks - config.num_init_blocks - local
    found = torch.empty(len(ids), len(rows), k.shape[2])
    for b, i, h in torch.cartesian_prod(*(torch.arange(n) for n in found.shape)).tolist():
        own = slice(h * group, (h + 1) * group)
        lse = aux.lse_cmp[b, own, rows[i]].double()
        scores, _ = probabilities(q[b, rows[i], own], aux.k_cmp[b, :, h], lse, config, rows[i])
        free = scores[config.num_init_blocks : -local].sort(descending=True).values
        found[b, i, h] = 1 - free[room] / free[room - 1]
    return found.amin(-1)


@pytest.mark.filterwarnings("ignore")  # inside torch.compile
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@torch.no_grad()
def test_thousands_of_steps_that_select(how: dict[str, Any]) -> None:
    """A step takes 16 of up to 69 blocks, and gives the last row of a call on its text, but where a near tie lets
    roundings of q and k choose: they change a score by some 2^-11 of itself, as logits are less than 1.
    """
    torch.compiler.reset()
    model = converted_model(options=NSAConfig.paper(), head_dim=64, initializer_range=0.1, num_hidden_layers=1)
    model = model.to(torch.bfloat16).cuda()
    how = {"do_sample": True, "max_new_tokens": 4096, "output_logits": True, "return_dict_in_generate": True, **how}
    written = model.generate(token_ids(2, 300).cuda(), **how)
    rows = list(range(1100, 4395, 50))
    ids = written.sequences
    steps = torch.stack([written.logits[row - 299] for row in rows], 1)

    def last_rows() -> Tensor:
        return torch.stack([model(ids[:, : row + 1], use_cache=False).logits[:, -1].float() for row in rows], 1)

    whole = last_rows()
    clear = gaps(model, ids, rows) > 2**-9
    assert clear.sum() > len(rows) / 4
    assert (steps - whole).abs().amax(-1)[clear.to(steps.device)].max() < BF16
    model.config.nsa_config["num_selected_blocks"] = 80
    assert (last_rows() - whole).abs().amax(-1).mean() > 2 * BF16, "which blocks a token takes shows"


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

"""Packs, most of whose documents continue, interpreted on a CPU and on a GPU: each document as it is alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels import backward, forward
from nsa import NSAAux, NSAConfig, nsa, nsa_forward_aux
from nsa.inputs import NSAInputs
from tests.support.cases import rest
from tests.support.continued_packs import PACKS, TAIL, Pack, assert_each_as_alone, assert_gradients
from tests.support.hardware import with_strategies
from tests.support.interpreted_gpu import GPUS, interpreted_gpu

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]


def run(inputs: NSAInputs, config: NSAConfig) -> tuple[Tensor, NSAAux]:
    out, aux = forward.nsa(inputs, config)
    assert aux is not None
    return out, NSAAux(*aux)


@pytest.mark.parametrize(("arch", "name"), rest(*[(arch, name) for name in PACKS for arch in GPUS]))
def test_interpreted(arch: str, name: str) -> None:
    pack = PACKS[name]
    inputs, config = pack.inputs, pack.config
    with interpreted_gpu(arch):
        out, aux = assert_each_as_alone(pack, run)
        saved_out, saved = forward.nsa_saving(inputs, config, recompute=False)
        assert torch.equal(saved_out, out)
        like = forward.nsa_saved_like(inputs, config, recompute=False)
        assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in like]
        do = torch.randn_like(out)
        got = backward.nsa_backward(inputs, config, saved, do)
    assert_gradients(pack, aux, do, got)


@pytest.mark.parametrize("arch", rest(*GPUS))
def test_training_from_inside_a_tile(arch: str) -> None:
    """With a start that the host knows: rows are those of the forward alone, which takes other steps."""
    pack = replace(PACKS["sequences, inside a tile"], documents=((200, 90, 0),))
    (document,) = pack.each()
    with interpreted_gpu(arch):
        expected, aux = run(document.inputs, pack.config)
        out, saved = forward.nsa_saving(document.inputs, pack.config, recompute=False)
        assert torch.equal(out, expected)
        do = torch.randn_like(out)
        got = backward.nsa_backward(document.inputs, pack.config, saved, do)
    assert_gradients(pack, aux, do, got)


# On a GPU


ON_GPU = {
    "token": (
        ((700, 300, 0), (0, 1, 9), (5000, 1, 0), (0, 0, 70), (64, 2000, 100)),
        NSAConfig.paper(num_selected_blocks=6, window_size=200),
    ),
    "tile": (
        ((512, 300, 0), (0, 700, 5), (1024, 1, 0)),
        NSAConfig(num_selected_blocks=4, window_size=200),
    ),
    "inside a tile": (((700, 300, 0), (0, 1, 9), (5000, 3000, 50)), NSAConfig(num_selected_blocks=4, window_size=200)),
    "sequences": (((700, 300, 0), (0, 300, 700), (123, 300, 577)), NSAConfig.paper(num_selected_blocks=6)),
    "sequences, inside a tile": (((700, 300, 0), (0, 300, 700), (123, 300, 577)), NSAConfig(num_selected_blocks=4)),
    **{
        f"documents, {name}": (tuple((0, tokens, 0) for tokens in (1, 0, 700, 64, 65, 1500, 3, 256)), config)
        for name, config in {
            "token": NSAConfig.paper(num_selected_blocks=6, window_size=200),
            "tile": NSAConfig(num_selected_blocks=3, window_size=100),
            "short blocks": NSAConfig(compress_block_size=16, select_block_size=64, num_selected_blocks=3),
            "selected entries": NSAConfig(
                compress_block_size=4, select_block_size=64, num_selected_blocks=3, num_cmp_selected_blocks=2
            ),
        }.items()
    },
}


@pytest.mark.cuda
@with_strategies("name heads", ON_GPU, [(16, 1, 64), (8, 2, 128), (4, 4, 128)])
def test_on_a_gpu(name: str, heads: tuple[int, int, int]) -> None:
    documents, config = ON_GPU[name]
    sizes = dict(zip(("heads", "kv_heads", "dim"), heads, strict=True))
    pack = Pack(documents, config, **sizes, sequences="sequences" in name, device="cuda")

    def by_api(inputs: NSAInputs, config: NSAConfig) -> tuple[Tensor, NSAAux]:
        return nsa_forward_aux(**inputs.tensors(), config=config, backend="cute")  # type: ignore[arg-type]

    out, aux = assert_each_as_alone(pack, by_api)
    inputs = pack.inputs
    leaves = {name: getattr(inputs, name).requires_grad_() for name in ("q", "k", "v", "gate_proj_weight")}
    for recompute in (False, True):
        trained = nsa(**replace(inputs, **leaves).tensors(), config=config, backend="cute", recompute=recompute)
        assert torch.equal(trained.detach(), out)
        do = torch.randn_like(out)
        if not pack.continues:
            do[-TAIL:] = torch.nan  # of no document
        got = torch.autograd.grad(trained, list(leaves.values()), do)
        assert_gradients(pack, aux, do, dict(zip(leaves, got, strict=True)))

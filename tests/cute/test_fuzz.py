"""Drawn calls of what kernels take, on a GPU: right. Calls with mistakes are drawn in tests/nsa/test_fuzz.py.

Options, heads and dims are those of a few cases, since each other one has kernels of its own to compile. All else is
drawn: lengths, batches, documents, layouts in buffers of NaN, magnitudes, gradients, bad values. Results and gradients
are held against the reference in fp64 on the blocks that the kernels chose.

`python -m pytest -n 20 tests/cute/test_fuzz.py -m cuda` gives each case a process, which compiles its kernels once.
FUZZ_EXAMPLES, as there, are of all cases; with FUZZ_SECONDS each case stops drawing after so many.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dispatch
from bench import oracles
from nsa import NSAAux, NSAConfig, nsa, nsa_forward, nsa_forward_aux, reference
from nsa.inputs import TENSOR_NAMES, NSAInputs
from tests.support import neighborhood_cases, residual_cases
from tests.support.cute_cases import OVERLAPPING, SLACK, assert_agrees_with_oracle, check_selection, gradients
from tests.support.documents import documents, of_document
from tests.support.fuzzing import (
    EXAMPLES,
    LAYOUTS,
    NEW_EACH_TIME,
    OPTIONS,
    Outcomes,
    guarded,
    note,
    of_call,
    placed,
    reach,
    strided,
)
from tests.support.helpers import assert_within_budget

BF16, FP16 = torch.bfloat16, torch.float16
SECONDS = float(os.environ.get("FUZZ_SECONDS", "inf"))
BATCH = 25
"""Examples between two looks at the clock."""
SECONDS_PER_CALL = 600
"""The first call of a kind compiles."""


# Cases


@dataclass(frozen=True)
class Case:
    """Properties that kernels are compiled for."""

    config: NSAConfig
    group: int = 2
    dim: int = 64
    v_dim: int = 64
    dtype: torch.dtype = BF16
    given: tuple[str, ...] = ()
    """Optional tensors."""


KV_HEADS = 2
FORCED = replace(OVERLAPPING, num_selected_blocks=5)
PAPER = NSAConfig.paper(num_selected_blocks=4, window_size=100)
CASES = {
    "seed": Case(NSAConfig(num_selected_blocks=3, window_size=100), 4, 128, 128, given=("gate_proj_weight",)),
    "seed, one head a group": Case(NSAConfig(num_selected_blocks=3), 1, 64, 128, FP16),
    "forced": Case(FORCED, given=("gates", "w_k_compress", "w_v_compress")),
    "shared, wide": Case(
        replace(FORCED, share_heads_in_group=True, select_block_size=128, q_tile_size=512), 8, given=("k_win", "v_win")
    ),
    "sparse compressed": Case(
        replace(FORCED, compress_block_size=16, compress_stride=8, num_cmp_selected_blocks=2), dtype=FP16
    ),
    "not causal": Case(NSAConfig(num_selected_blocks=3, window_size=100, causal=False), given=("gates",)),
    "per token": Case(PAPER, 4, 128, 128, given=("gates",)),
    "per token, own keys": Case(PAPER, 8, dtype=FP16, given=("gate_proj_weight", "k_slc", "v_slc")),
    "per token, wide": Case(replace(PAPER, select_block_size=128, num_local_blocks=1), given=("k_cmp", "v_cmp")),
}
NO_DOCUMENTS = ("not causal",)
"""Refused with cu_seqlens; tests/cute/test_varlen.py."""
PARTS = [(name, packed) for name in CASES for packed in (False, True) if not (packed and name in NO_DOCUMENTS)]


# Calls that fit


# FlashAttention-4 compiles in which dimensions repeat one element.
GPU_LAYOUTS = [layout for layout in LAYOUTS if layout != "expanded"]
EDGES = [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]


def lengths_up_to(most: int) -> st.SearchStrategy[int]:
    return st.sampled_from([edge for edge in EDGES if edge <= most]) | st.integers(0, most)


@st.composite
def calls(draw: st.DrawFn, case: Case, packed: bool) -> dict[str, Any]:
    """Keywords."""
    dim, v_dim = case.dim, case.v_dim
    lengths = draw(st.lists(lengths_up_to(700), max_size=5)) if packed else []
    tail = draw(st.integers(0, 70)) if packed else 0
    tokens = sum(lengths) + tail if packed else draw(lengths_up_to(1500))
    lead = (tokens,) if packed else (draw(st.sampled_from([1, 1, 2, 3, 0])), tokens)
    generator = torch.Generator("cuda").manual_seed(draw(st.integers(0, 2**31)))
    size = draw(st.sampled_from([1, 1, 1, 0, 1e-3]))
    logits = draw(st.sampled_from([1, 1, 1, 20, 100]))  # their standard deviation, where size is 1

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).to(case.dtype)

    config, heads = case.config, KV_HEADS * case.group
    entries = sum(map(config.num_compressed, lengths)) if packed else config.num_compressed(tokens)
    shapes: dict[str, tuple[int, ...]] = {"gates": (*lead, heads, 3), "gate_proj_weight": (heads, 3, dim)}
    for kind, last in (("k", dim), ("v", v_dim)):
        shapes |= dict.fromkeys([kind, f"{kind}_slc", f"{kind}_win"], (*lead, KV_HEADS, last))
        shapes[f"{kind}_cmp"] = (entries, KV_HEADS, last) if packed else (lead[0], entries, KV_HEADS, last)
        shapes[f"w_{kind}_compress"] = (KV_HEADS, last, last)
    tensors = {"q": normal(*lead, heads, dim, scale=size * logits)}
    for name in ("k", "v", *case.given):
        weight = name.startswith("w_") or name == "gate_proj_weight"
        tensors[name] = normal(*shapes[name], scale=shapes[name][-1] ** -0.5 if weight else size)
    if packed and draw(st.booleans()):  # rows of no document are not read
        for name in ("q", "k", "v", *(n for n in case.given if n == "gates" or n.endswith(("_slc", "_win")))):
            tensors[name][tokens - tail :] = math.nan
    keywords: dict[str, Any] = {name: draw(placed(tensor, GPU_LAYOUTS)) for name, tensor in tensors.items()}
    if packed:
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
        keywords["cu_seqlens"] = draw(placed(bounds, GPU_LAYOUTS))
    if draw(st.booleans()):
        keywords["config"] = config
    else:
        keywords |= {name: getattr(config, name) for name in OPTIONS}
    backends = [None, "cute"] if config.num_cmp_selected_blocks is not None else [None, "cute", "triton"]
    keywords["backend"] = draw(st.sampled_from(backends))
    return keywords


# What is right


def assert_right(keywords: dict[str, Any], out: Tensor, aux: NSAAux) -> None:
    inputs, config = of_call(keywords)
    inputs = inputs.map(Tensor.detach)
    assert (out.dtype, out.shape) == (inputs.q.dtype, (*inputs.q.shape[:-1], inputs.v.shape[-1]))
    if inputs.cu_seqlens is None:
        assert_one_right(inputs, config, out, aux)
        return
    for document in documents(inputs, config):
        assert_one_right(document.inputs, config, document.part("out", out), of_document(aux, document))
    assert not out[int(inputs.cu_seqlens[-1]) :].any(), "rows past the last document"


def assert_one_right(inputs: NSAInputs, config: NSAConfig, out: Tensor, aux: NSAAux) -> None:
    if out.numel() == 0:
        return
    assert_agrees_with_oracle(inputs, config, out, aux)
    blocks_are_entries = config.compress_block_size == config.stride == config.select_size
    if config.token_mode or blocks_are_entries:  # else near ties cannot be told from mistakes
        check_selection(inputs, config, aux)


def assert_gradients_right(keywords: dict[str, Any], aux: NSAAux, seed: int, flags: dict[str, bool]) -> None:
    inputs, config = of_call(keywords)
    inputs = inputs.map(Tensor.detach)
    dtype, shape = inputs.q.dtype, (*inputs.q.shape[:-1], inputs.v.shape[-1])
    do = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)

    def kernels(leaves: NSAInputs) -> Tensor:
        return nsa(**leaves.tensors(), config=config, backend=keywords["backend"], **flags)

    def by_documents(leaves: NSAInputs, run: Callable[..., Any]) -> Tensor:
        if leaves.cu_seqlens is None:
            out: Tensor = run(leaves, config, **chosen(aux))[0]
            return out
        rows = [
            run(document.inputs, config, **chosen(of_document(aux, document)))[0][0]
            for document in documents(leaves, config)
        ]
        return torch.cat([*rows, leaves.q.new_zeros(do.shape[0] - sum(map(len, rows)), *do.shape[1:])])

    got = gradients(kernels, inputs, do)
    if do.numel() == 0 or (inputs.cu_seqlens is not None and inputs.cu_seqlens[-1] == 0):
        assert not any(gradient.any() for gradient in got.values())
        return
    # Branches with keys of their own, to know how large the gradients are that add up to that of k or v
    own = {f"{x}_{branch}": getattr(inputs, x).clone() for x in "kv" for branch in ("slc", "win")}
    apart = replace(inputs, **{name: keys for name, keys in own.items() if getattr(inputs, name) is None})
    exact = gradients(lambda leaves: by_documents(leaves, reference.nsa), apart.map(Tensor.double), do.double())
    low = gradients(lambda leaves: by_documents(leaves, oracles.nsa), inputs, do)
    half_ulp = torch.finfo(dtype).eps / 2
    for name, gradient in got.items():
        parts = [exact[name], *(part for key, part in exact.items() if key not in got and key[0] == name)]
        rounding = half_ulp * sum(part.abs().max().item() for part in parts) if len(parts) > 1 else 0.0
        assert gradient.dtype == getattr(inputs, name).dtype
        of_name = f"gradient of {name}"
        assert_within_budget(gradient, sum(parts), low[name], of_name, slack=SLACK + rounding)


def chosen(aux: NSAAux) -> dict[str, Tensor]:
    return {n: found.long() for n in ("indices", "cmp_indices") if (found := getattr(aux, n)) is not None}


# The drawn calls


def draw_and_check(case: Case, packed: bool, data: st.DataObject) -> str:
    """One example; how it ended."""
    keywords = data.draw(calls(case, packed))
    kind = data.draw(st.sampled_from(["right", "right", "gradients", "gradients", "bad value"]))
    if kind == "bad value":
        return outcome_of_bad_value(keywords, data)
    with guarded(strided(keywords), SECONDS_PER_CALL):
        try:
            out, aux = nsa_forward_aux(**keywords)
        except dispatch.BackendError:
            if not (packed and keywords["cu_seqlens"].shape == (1,)):
                raise
            return "refused, no documents"
        assert_right(keywords, out, aux)
        assert torch.equal(data.draw(st.sampled_from([nsa_forward, dispatch.nsa]))(**keywords), out)
        if kind == "right":
            return kind
        flags = {"deterministic": data.draw(st.booleans()), "recompute": data.draw(st.booleans())}
        seed = data.draw(st.integers(0, 2**31))
        try:
            assert_gradients_right(keywords, aux, seed, flags)
        except dispatch.BackendError as error:
            if not (flags["deterministic"] and "takes deterministic=True in backward only" in str(error)):
                raise
            return "right, deterministic=True refused"
    return "right, with gradients"


def outcome_of_bad_value(keywords: dict[str, Any], data: st.DataObject) -> str:
    """A NaN or inf reaches no other document and head group: there the bits stay what they were."""
    name = data.draw(st.sampled_from([n for n in TENSOR_NAMES if n in keywords and n != "cu_seqlens"]))
    if keywords[name].numel() == 0 or keywords.get("cu_seqlens", torch.empty(2)).shape == (1,):
        return "no value to spoil"
    keywords = keywords | {name: keywords[name].detach().clone()}
    spoilt = keywords[name].clone()
    at = tuple(data.draw(st.integers(0, length - 1)) for length in spoilt.shape)
    spoilt[at] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    inputs, config = of_call(keywords)
    reached = reach(name, at, inputs, config).repeat_interleave(inputs.group_size, -1)
    with guarded(strided(keywords), SECONDS_PER_CALL):
        before, after = nsa_forward(**keywords), nsa_forward(**keywords | {name: spoilt})
    assert torch.equal(after[~reached], before[~reached]), f"out beyond what {name}{list(at)} may reach"
    return "NaN or inf kept apart"


# Neighborhood attention and attention residual


NEIGHBORHOODS = {"narrow windows": (1, 2, 7, 48, 96), "wide windows": (97, 200, 1001)}
"""Kernel sizes: Triton comes first for those, FlashAttention-4's window, where it can, for these."""
SCALES = [None, 0.1, 2.0]
LOGITS = [1, 1, 20, 100]
"""Standard deviations of logits, if the scale is 1/sqrt(D)."""


def draw_neighborhood(kernel_sizes: tuple[int, ...], data: st.DataObject) -> str:
    dtype = data.draw(st.sampled_from([BF16, FP16]))
    batch, tokens = data.draw(st.sampled_from([1, 1, 2, 0])), data.draw(lengths_up_to(1500))
    generator = torch.Generator("cuda").manual_seed(data.draw(st.integers(0, 2**31)))

    def normal(heads: int, size: float = 1.0) -> Tensor:
        drawn = torch.randn((batch, tokens, heads, 64), generator=generator, device="cuda") * size
        return data.draw(placed(drawn.to(dtype), GPU_LAYOUTS))

    keywords: dict[str, Any] = {"q": normal(4, data.draw(st.sampled_from(LOGITS))), "k": normal(2), "v": normal(2)}
    options: dict[str, Any] = {
        "kernel_size": data.draw(st.sampled_from(kernel_sizes)),
        "dilation": data.draw(st.sampled_from([1, 2, 3, 16, 100])),
        "softmax_scale": data.draw(st.sampled_from(SCALES)),
        **data.draw(st.sampled_from([*neighborhood_cases.WINDOWS.values()])),
    }
    inputs = tuple(keywords.values())
    with guarded(strided(keywords), SECONDS_PER_CALL):
        if data.draw(st.sampled_from([False, False, True]), label="bad value"):
            return outcome_of_bad_neighbor(inputs, options, data)
        do = normal(4)
        got = neighborhood_cases.results(None, inputs, do, **options)
        neighborhood_cases.assert_right(got, inputs, do, **options)
    return "right, with gradients"


def outcome_of_bad_neighbor(inputs: tuple[Tensor, ...], options: dict[str, Any], data: st.DataObject) -> str:
    """A NaN or inf reaches no other sequence and head group: there the bits stay what they were."""
    if inputs[0].numel() == 0:
        return "no value to spoil"
    which = data.draw(st.integers(0, 2))
    plain = [tensor.detach().clone() for tensor in inputs]
    spoilt = [tensor.clone() for tensor in plain]
    at = tuple(data.draw(st.integers(0, length - 1)) for length in spoilt[which].shape)
    spoilt[which][at] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    before, after = (dispatch.neighborhood_attention(*tensors, **options) for tensors in (plain, spoilt))
    group = at[2] // 2 if which == 0 else at[2]
    touched = torch.zeros_like(before, dtype=torch.bool)
    touched[at[0], :, 2 * group : 2 * group + 2] = True
    assert torch.equal(after[~touched], before[~touched])
    return "NaN or inf kept apart"


def draw_residual(data: st.DataObject) -> str:
    options = {
        "batch": data.draw(st.integers(1, 3)),
        "layout": data.draw(st.sampled_from(["stacked", "token-major", "list", "slices", "strided"])),
        "norm": data.draw(st.booleans()),
        "dtype": data.draw(st.sampled_from([BF16, torch.float32])),
        "logits": data.draw(st.sampled_from([1.5, 20.0, 100.0])),
        "spread": data.draw(st.sampled_from([None, 0.0, 0.1])),
    }
    sizes = [data.draw(st.sampled_from(some)) for some in ([0, 1, 37, 300], [64, 1000], [1, 4, 9])]
    residual_cases.check("triton", *sizes, residual_cases.through_the_public_op, device="cuda", **options)
    return "right, with gradients"


# All of it


EXAMPLES_OF: dict[str, Callable[[st.DataObject], str]] = {
    **{f"{name}, packed" if packed else name: partial(draw_and_check, CASES[name], packed) for name, packed in PARTS},
    **{name: partial(draw_neighborhood, sizes) for name, sizes in NEIGHBORHOODS.items()},
    "attention residual": draw_residual,
}
"""Each draws an example, and says how it ended."""


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("what", EXAMPLES_OF)
def test_on_a_gpu(what: str, outcomes: Outcomes, record_property: Callable[[str, object], None]) -> None:
    record_property("device", "cuda")  # tests/support/fuzz_report.py is told
    draw_in_batches(lambda data: note(outcomes, EXAMPLES_OF[what](data)), EXAMPLES // len(EXAMPLES_OF), SECONDS)


def draw_in_batches(example: Callable[[st.DataObject], None], most: int, seconds: float) -> None:
    """`most` examples, or fewer where the time is over between batches: within one, hypothesis takes no early end."""
    end = time.monotonic() + seconds
    first_seed = random.SystemRandom().getrandbits(32) if NEW_EACH_TIME else 0
    for first in range(0, max(1, most), BATCH):

        @hypothesis.seed(first_seed + first)
        @settings(
            max_examples=max(1, min(BATCH, most - first)),
            phases=[Phase.generate],  # a smaller example is not worth the GPU's time
        )
        @given(data=st.data())
        def draw(data: st.DataObject) -> None:
            example(data)

        draw()
        if time.monotonic() > end:
            break

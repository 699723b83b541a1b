"""Drawn calls of every public function on the CPU: right, or refused with a documented error that names the argument.

No other exception, no hang, no NaN from finite input, no input changed in place, nothing read outside of a view (views
lie in buffers of NaN). A NaN or inf in an input stays inside its document and head group. Results are held against the
loops of tests/support/{loop_oracle,neighborhood_loops,residual_loops}.py, which share no code with what is tested.

250 examples in all, the same ones each time; with FUZZ_EXAMPLES, which `make fuzz` sets to 10,000, as many others.
docs/reliability.md says what this proves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dispatch
from nsa import NSAAux, NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.inputs import TENSOR_NAMES, NSAInputs
from nsa.neighborhood.api import neighborhood_attention_forward
from tests.support import loop_oracle, neighborhood_loops, residual_loops
from tests.support.fuzzing import (
    DTYPES,
    EXAMPLES,
    NEIGHBORHOOD_OPTIONS,
    NEW_EACH_TIME,
    OPTIONS,
    Odd,
    Outcomes,
    assert_documented,
    guarded,
    no_tensor,
    note,
    of_call,
    placed,
    reach,
    spoiled,
    strided,
    wrong_shape,
)
from tests.support.helpers import make_inputs, make_qkv
from tests.support.reference_cases import Document, cases, documents


def share(part: float) -> settings:
    return settings(max_examples=max(1, round(EXAMPLES * part)), derandomize=not NEW_EACH_TIME)


# NSA: agreement with the loops


def assert_right(keywords: Mapping[str, Any], out: Tensor, aux: NSAAux) -> None:
    """All results against the loops, in the inputs' precision."""
    inputs, config = of_call(keywords)
    assert (out.dtype, out.shape) == (inputs.q.dtype, (*inputs.q.shape[:-1], inputs.v.shape[-1]))
    exact = inputs.map(lambda tensor: tensor.detach().double())
    token = entry = 0
    for document in documents(exact, config, out, aux):
        assert_document_right(document, config, inputs)
        token += document.out.shape[0]
        entry += config.num_compressed(document.out.shape[0])
    if inputs.packed:
        assert not out[token:].any()
        assert not aux.k_cmp[entry:].any()


def assert_document_right(document: Document, config: NSAConfig, inputs: NSAInputs) -> None:
    dtype, tensors = inputs.q.dtype, dict(document.tensors)
    aux = {name: tensor for name, tensor in document.aux.items() if tensor is not None}
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    half_ulp = torch.finfo(dtype).eps / 2
    tokens, heads, dim = tensors["q"].shape
    rules = loop_oracle.Rules(config, tokens, dim)

    def near(name: str, got: Tensor, want: Tensor, ulp: float, slack: float) -> None:
        assert got.shape == want.shape, name
        keyless = want == -math.inf
        assert torch.equal(got == -math.inf, keyless), f"{name}: rows without keys"
        error = (got.double() - want).masked_fill(keyless, 0).abs()
        allowed = ulp * want.masked_fill(keyless, 0).abs() + slack + torch.finfo(dtype).tiny
        assert (error <= allowed).all(), f"{name}: error {error.max():.2e}, slack {slack:.2e}, in {dtype}"

    if "k_cmp" not in tensors:  # rounded once to the inputs' dtype, and used so
        for name, how in zip(("k", "v"), loop_oracle.compressors(config.compress), strict=True):
            weight = tensors.pop(f"w_{name}_compress", None)
            nested = loop_oracle.compress(tensors[name], rules, how, weight)
            got = aux[f"{name}_cmp"]
            want = torch.tensor(nested, dtype=torch.float64).reshape(got.shape)
            sums = largest(tensors[name]) * (1 if weight is None else largest(weight) * tensors[name].shape[-1])
            near(f"{name}_cmp", got, want, half_ulp, 64 * eps * sums)
            tensors[f"{name}_cmp"] = got.double()
    plain = replace(config, compress="mean")
    loop = loop_oracle.nsa_document(config=plain, **tensors)

    keys = max(largest(tensors[name]) for name in ("k", "k_cmp", "k_slc", "k_win") if name in tensors)
    logits = rules.scale * dim * largest(tensors["q"]) * keys
    rounding = 64 * eps * (1 + logits)
    chosen = {}
    for name, want, scores in (
        ("indices", loop.indices, loop.scores),
        ("cmp_indices", loop.cmp_indices, loop.cmp_scores),
    ):
        if want is not None and scores is not None:
            sets = [[{b for b in row if b >= 0} for row in head] for head in aux[name].tolist()]
            if sets != want:
                slack = rounding * heads if config.token_mode else rounding * heads * max(1, logits)
                assert_close_choice(sets, want, scores, slack)
                chosen[name] = sets
            assert all(row == sorted(row) for row in (aux[name] % 2**20).flatten(0, -2).tolist()), f"{name}: order"
    if chosen:
        loop = loop_oracle.nsa_document(config=plain, **tensors, **chosen)

    values = max(largest(tensors[name]) for name in ("v", "v_cmp", "v_slc", "v_win") if name in tensors)
    gate_slack = 64 * eps
    if "gate_proj_weight" in tensors:
        gate_slack *= 1 + dim * largest(tensors["q"]) * largest(tensors["gate_proj_weight"])
    near("gates", aux["gates"], loop.gates, 0 if "gates" in tensors else eps, gate_slack)
    gates = largest(loop.gates)
    for branch in ("cmp", "slc", "win"):
        near(f"lse_{branch}", aux[f"lse_{branch}"], getattr(loop, f"lse_{branch}"), 4 * eps, rounding)
        near(f"o_{branch}", aux[f"o_{branch}"], getattr(loop, f"o_{branch}"), half_ulp, rounding * values)
    near("out", document.out, loop.out, half_ulp, 3 * values * (gates * rounding + gate_slack))


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def assert_close_choice(
    got: list[list[set[int]]], want: list[list[set[int]]], scores: list[list[dict[int, Fraction]]], slack: float
) -> None:
    """Where blocks differ, their scores are equal but for rounding: none chosen is worse than one left out."""
    for got_head, want_head, score_head in zip(got, want, scores, strict=True):
        for mine, theirs, score in zip(got_head, want_head, score_head, strict=True):
            assert len(mine) == len(theirs)
            if mine != theirs:
                assert mine - theirs <= score.keys(), "a block that cannot be chosen"
                worst = min(score[b] for b in mine - theirs)
                best = max(score[b] for b in theirs - mine if b in score)
                assert float(best - worst) <= slack, f"chosen {mine}, not {theirs}"


# NSA: drawn calls


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a call that fits the definition."""
    packed = draw(st.booleans())
    inputs, config = draw(cases(packed, batches=(1, 1, 2, 0)))
    dtype = draw(st.sampled_from(DTYPES))
    sizes = [1, 1, 1, 0, 1e-3, 10 if dtype == torch.float16 else 30]  # 10: logits of 100
    size = draw(st.sampled_from(sizes))
    weights_dtype = draw(st.sampled_from([dtype, torch.float32]))
    keywords: dict[str, Any] = {}
    for name, tensor in inputs.tensors().items():
        if not tensor.is_floating_point():
            pass
        elif name in ("gates", "gate_proj_weight"):
            tensor = tensor.to(weights_dtype)
        else:
            tensor = (tensor * size).to(dtype)
        keywords[name] = draw(placed(tensor))
    if draw(st.booleans()):
        keywords["config"] = config
    else:
        keywords |= {name: getattr(config, name) for name in OPTIONS}
    if draw(st.integers(0, 3)) == 0:
        keywords |= {name: draw(st.booleans()) for name in ("deterministic", "recompute")}
        keywords["backend"] = draw(st.sampled_from([None, "reference"]))
        if "cu_seqlens" in keywords:
            keywords["max_seqlen"] = draw(st.integers(30, 2**40))
    return keywords


def assert_gradients(keywords: dict[str, Any], aux: NSAAux, seed: int) -> None:
    """Finite, of the right shape and dtype, and None only for what no key of any row comes from."""
    names = [name for name in TENSOR_NAMES if name in keywords and name != "cu_seqlens"]
    leaves = {name: keywords[name].detach().requires_grad_() for name in names}
    out = nsa(**keywords | leaves)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), do, allow_unused=True)
    seen = {branch: bool((getattr(aux, f"lse_{branch}") > -math.inf).any()) for branch in ("cmp", "slc", "win")}
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None:
            source, _, branch = name.partition("_")
            feeds = [branch] if branch in seen else ["cmp"] if branch == "compress" or source == "w" else list(seen)
            feeds = [one for one in feeds if name not in ("k", "v") or f"{name}_{one}" not in keywords]
            assert name not in ("q", "gates", "gate_proj_weight") or out.numel() == 0, f"no gradient of {name}"
            assert not any(seen[one] for one in feeds) or out.numel() == 0, f"no gradient of {name}"
        else:
            assert (gradient.shape, gradient.dtype) == (leaves[name].shape, leaves[name].dtype)
            assert torch.isfinite(gradient).all(), f"gradient of {name}"


# NSA: calls with something wrong, or something unusual


INTEGERS = [-(2**70), -1, 0, 1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63, 2**70]
OTHERS = [None, True, False, 1.0, 2.5, math.nan, math.inf, -1.0, 10**400, Fraction(1, 3), "2", "", (), [], {}, Odd()]
SCALARS = [torch.tensor(3), torch.tensor(2.5), torch.tensor([1, 2]), torch.tensor(True)]
ANYTHING = [*INTEGERS, *OTHERS, *SCALARS]
anything = st.sampled_from(ANYTHING)
LISTS_OF_ALL_CHOSEN = ["num_selected_blocks", "num_init_blocks", "num_local_blocks", "num_cmp_selected_blocks"]


def option_values(name: str) -> list[Any]:
    """Results hold lists as long as the number of blocks to choose, so that one stays small."""
    if name in LISTS_OF_ALL_CHOSEN:
        return [value for value in ANYTHING if type(value) is not int or value <= 64]
    return ANYTHING


@st.composite
def bounds_out_of_place(draw: st.DrawFn) -> Tensor:
    return torch.tensor(draw(st.lists(st.integers(-3, 70), max_size=4)), dtype=torch.int32)


@st.composite
def changes(draw: st.DrawFn, keywords: dict[str, Any]) -> dict[str, Any]:
    """One change of a call; a name that the call then lacks has the value `Odd`, the class."""
    kind = draw(st.sampled_from(["tensor", "tensor", "tensor", "option", "option", "flag", "bounds", "pool", "added"]))
    if kind == "option":
        name = draw(st.sampled_from([*OPTIONS, "block_size", "config"]))
        return {name: draw(st.sampled_from(option_values(name)))}
    if kind == "flag":
        name = draw(st.sampled_from(["deterministic", "recompute", "backend", "max_seqlen"]))
        named = st.sampled_from(["cute", "triton", "ascend", "reference", "cudnn"])
        return {name: draw(anything | named if name == "backend" else anything)}
    if kind == "bounds":
        return {"cu_seqlens": draw(bounds_out_of_place())}
    if kind == "pool":
        return {"compress": draw(st.sampled_from([wrong_shape, no_tensor, (wrong_shape, no_tensor), (no_tensor,)]))}
    if kind == "added":
        given = keywords[draw(st.sampled_from(["q", "k", "v"]))]
        return {draw(st.sampled_from([name for name in TENSOR_NAMES if name not in keywords] or ["q"])): given}
    name = draw(st.sampled_from([name for name in TENSOR_NAMES if name in keywords]))
    if draw(st.integers(0, 9)) == 0:
        return {name: Odd}
    return {name: draw(spoiled(keywords[name]))}


@share(0.6)
@given(st.data())
def test_nsa_is_right_or_refused(outcomes: Outcomes, data: st.DataObject) -> None:
    keywords = data.draw(calls())
    changed: dict[str, Any] = {}
    for _ in range(data.draw(st.sampled_from([0, 0, 1, 1, 2]))):
        changed |= data.draw(changes(keywords))
    if data.draw(st.integers(0, 19)) == 0:
        changed |= {n: value.to("meta") for n, value in keywords.items() if isinstance(value, Tensor)}
    keywords = {name: value for name, value in (keywords | changed).items() if value is not Odd}
    function = data.draw(st.sampled_from([nsa, nsa_forward, nsa_forward_aux, dispatch.nsa]))
    seed = data.draw(st.none() | st.integers(0, 2**31), label="do")
    note(outcomes, outcome_of(function, keywords, changed, partial(judge_nsa, seed=seed)))


def outcome_of(
    function: Callable[..., Any], keywords: dict[str, Any], changed: Iterable[str], judge: Callable[..., str]
) -> str:
    """End of a call: as `judge(keywords, result, changed)` says, or refused by the names that were changed."""
    with guarded(strided(keywords)):
        try:
            result = function(**keywords)
        except Exception as error:
            assert_documented(error, [*changed])
            return f"refused, {type(error).__name__}"
        return judge(keywords, result, bool([*changed]))


def judge_nsa(keywords: dict[str, Any], result: Any, changed: bool, seed: int | None = None) -> str:
    """Right, or it fails. Args: seed: of do, for gradients."""
    out, aux = nsa_forward_aux(**keywords)
    got = result if isinstance(result, Tensor) else result[0]
    assert not out.requires_grad
    if out.device.type == "meta":  # which has no values
        assert got.shape == out.shape
        return "right, though changed"
    assert torch.equal(got, out)
    assert_right(keywords, out, aux)
    if seed is not None and not changed:
        assert_gradients(keywords, aux, seed)
        return "right, with gradients"
    return "right, though changed" if changed else "right"


@pytest.mark.parametrize(
    "name", [*OPTIONS, "block_size", "config", "deterministic", "recompute", "backend", "max_seqlen"]
)
def test_every_value_of_an_option_of_nsa(name: str) -> None:
    """Not drawn: hypothesis would try some pairs of option and value a hundred times, and others never."""
    sizes = {
        "compress_block_size": 2,
        "select_block_size": 3,
        "num_selected_blocks": 2,
        "window_size": 3,
        "q_tile_size": 4,
    }
    one, some = make_inputs(9), replace(make_inputs(9, batch=None), cu_seqlens=torch.tensor([0, 4, 4, 9]).int())
    entries, tokens = {"num_cmp_selected_blocks": 4, "n_block_size": 1}, {"q_tile_size": 1, "num_local_blocks": 1}
    for inputs, more in ((one, {}), (some, entries), (one, tokens)):
        keywords = {**inputs.tensors(), **sizes, **more}
        assert outcome_of(nsa, keywords, (), judge_nsa) == "right"
        for value in option_values(name):
            outcome_of(nsa, {**keywords, name: value}, [name], judge_nsa)


# NSA: NaN and inf


@st.composite
def with_a_bad_value(draw: st.DrawFn, keywords: dict[str, Any], name: str) -> tuple[tuple[int, ...], Tensor]:
    """A place in a tensor, and a copy that is not finite there; the call gets a copy in the same layout, too."""
    keywords[name] = keywords[name].detach().clone()
    spoilt = keywords[name].clone()
    at = tuple(draw(st.integers(0, size - 1)) for size in spoilt.shape)
    spoilt[at] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return at, spoilt


@share(0.12)
@given(st.data())
def test_a_bad_value_stays_in_its_document_and_head_group(outcomes: Outcomes, data: st.DataObject) -> None:
    keywords = data.draw(calls())
    name = data.draw(st.sampled_from([n for n in TENSOR_NAMES if n in keywords and n != "cu_seqlens"]))
    if keywords[name].numel() == 0:
        return
    at, spoilt = data.draw(with_a_bad_value(keywords, name))
    inputs, config = of_call(keywords)
    reached = reach(name, at, inputs, config)

    def run(changed: dict[str, Any]) -> tuple[Tensor, ...]:
        """out and the gradients of q, k and v."""
        leaves = {n: (keywords | changed)[n].detach().requires_grad_() for n in ("q", "k", "v")}
        out = nsa(**keywords | changed | leaves)
        gradients = torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True)
        return out.detach(), *(
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), gradients, strict=True)
        )

    with guarded(strided(keywords)):
        clean, bad = run({}), run({name: spoilt})
    group, dtype = inputs.group_size, inputs.q.dtype
    # Taking bad keys out copies all of them, and products of tensors in another layout round otherwise
    keys = max(largest(keywords[n]) for n in ("k", "k_cmp", "k_slc", "k_win") if n in keywords)
    logits = config.scale(inputs.q.shape[-1]) * inputs.q.shape[-1] * largest(inputs.q) * keys
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    slack = torch.finfo(dtype).eps + 64 * eps * (1 + logits)
    for what, before, after in zip(("out", "dq", "dk", "dv"), clean, bad, strict=True):
        per_head = before.shape[-2] // reached.shape[-1]
        touched = reached.repeat_interleave(per_head, -1)[..., None].expand_as(before)
        assert per_head in (1, group)
        difference = (after.double() - before.double())[~touched].abs()
        assert (difference <= slack * largest(before)).all(), f"{what} beyond what {name}{list(at)} may reach"
    note(outcomes, "NaN or inf kept apart")


# Neighborhood attention


@st.composite
def neighborhoods(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a call that fits."""
    batch, tokens = draw(st.sampled_from([1, 1, 2, 0])), draw(st.integers(0, 20))
    kv_heads, group, dim = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    keywords: dict[str, Any] = {}
    size = draw(st.sampled_from([1, 1, 100]))  # of queries: logits in the hundreds
    for name, heads, scale in (("q", kv_heads * group, size), ("k", kv_heads, 1), ("v", kv_heads, 1)):
        tensor = torch.randn(batch, tokens, heads, dim, generator=generator, dtype=torch.float64) * scale
        keywords[name] = draw(placed(tensor.to(dtype)))
    options = {
        "kernel_size": st.integers(1, 12) | st.sampled_from([30, 1001, 2**63 - 1]),
        "dilation": st.integers(1, 5) | st.sampled_from([100, 2**63 - 1]),
        "softmax_scale": st.sampled_from([None, 0.1, 2.0, -0.5, 0, Fraction(1, 3)]),
        "boundary": st.sampled_from(["truncate", "shift"]),
        "causal": st.booleans(),
        "algorithm": st.sampled_from(["auto", "flash", "band", "dense"]),
        "backend": st.sampled_from([None, "reference"]),
    }
    return keywords | draw(st.fixed_dictionaries({}, optional=options))


@share(0.16)
@given(st.data())
def test_neighborhood_attention_is_right_or_refused(outcomes: Outcomes, data: st.DataObject) -> None:
    keywords = data.draw(neighborhoods())
    changed: dict[str, Any] = {}
    if data.draw(st.booleans(), label="spoiled"):
        name = data.draw(st.sampled_from(["q", "k", "v", *NEIGHBORHOOD_OPTIONS]))
        changed = {name: data.draw(spoiled(keywords[name]) if name in ("q", "k", "v") else anything)}
        if name == "softmax_scale" and type(changed[name]) is int:  # finite logits need a scale that is no larger
            changed = {name: 1}
        keywords |= changed
    note(outcomes, outcome_of(dispatch.neighborhood_attention, keywords, changed, judge_neighborhood))


def judge_neighborhood(keywords: dict[str, Any], out: Tensor, changed: bool) -> str:
    assert_neighborhood_right(keywords, out)
    inputs = [keywords[name].detach().requires_grad_() for name in ("q", "k", "v")]
    options = {name: value for name, value in keywords.items() if name not in ("q", "k", "v")}
    gradients = torch.autograd.grad(dispatch.neighborhood_attention(*inputs, **options).sum(), inputs)
    for tensor, gradient in zip(inputs, gradients, strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        assert torch.isfinite(gradient).all()
    return "right, though changed" if changed else "right, with gradients"


@pytest.mark.parametrize("name", NEIGHBORHOOD_OPTIONS)
def test_every_value_of_an_option_of_neighborhood_attention(name: str) -> None:
    for tokens in (0, 9):
        tensors = dict(zip("qkv", make_qkv(tokens, 2, 1, 2), strict=True))
        for more in ({}, {"boundary": "shift", "dilation": 2}, {"causal": True, "kernel_size": 4}):
            for value in ANYTHING:
                if name != "softmax_scale" or type(value) is not int or abs(value) < 100:
                    given = {**tensors, **more, name: value}
                    outcome_of(dispatch.neighborhood_attention, given, [name], judge_neighborhood)


def assert_neighborhood_right(keywords: dict[str, Any], out: Tensor) -> None:
    q, k, v = (keywords[name].detach().double() for name in ("q", "k", "v"))
    dtype, dim = keywords["q"].dtype, q.shape[-1]
    assert (out.dtype, out.shape) == (dtype, q.shape)
    if q.numel() == 0:
        return
    scale = keywords.get("softmax_scale")
    scale = 1 / math.sqrt(dim) if scale is None else float(scale)
    kernel_size = keywords.get("kernel_size", 7)
    window = {
        "kernel_size": min(kernel_size, 100 + kernel_size % 2),  # N is at most 21: nothing is farther away
        "dilation": min(keywords.get("dilation", 1), 100),
        "boundary": keywords.get("boundary", "truncate"),
        "causal": keywords.get("causal", False),
    }
    nested, band, _ = neighborhood_loops.attend(q.tolist(), k.tolist(), v.tolist(), scale=scale, **window)
    want = torch.tensor(nested, dtype=torch.float64)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rounding = 64 * eps * (1 + abs(scale) * dim * largest(q) * largest(k))
    allowed = torch.finfo(dtype).eps / 2 * want.abs() + rounding * largest(v) + torch.finfo(dtype).tiny
    assert ((out.double() - want).abs() <= allowed).all()
    if kernel_size <= 100:
        again, probabilities = neighborhood_attention_forward(**keywords)
        assert ((again.double() - want).abs() <= allowed).all()
        error = (probabilities.double() - torch.tensor(band, dtype=torch.float64)).abs()
        assert (error <= rounding).all()


@share(0.04)
@given(st.data())
def test_a_bad_value_stays_in_its_head_group_of_a_neighborhood(outcomes: Outcomes, data: st.DataObject) -> None:
    keywords = data.draw(neighborhoods())
    name = data.draw(st.sampled_from(["q", "k", "v"]))
    if keywords[name].numel() == 0:
        return
    at, spoilt = data.draw(with_a_bad_value(keywords, name))
    with guarded(strided(keywords)):
        before = dispatch.neighborhood_attention(**keywords)
        after = dispatch.neighborhood_attention(**keywords | {name: spoilt})
    group = before.shape[2] // keywords["k"].shape[2]
    touched = torch.zeros(before.shape, dtype=torch.bool)
    first = at[2] if name == "q" else at[2] * group
    touched[at[0], :, first : first + (1 if name == "q" else group)] = True
    assert torch.equal(after[~touched], before[~touched])
    note(outcomes, "NaN or inf kept apart")


# Attention residual


@st.composite
def residuals(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a call that fits."""
    size, batch, tokens = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 0])), draw(st.integers(0, 4))
    dim, dtype = draw(st.integers(1, 9)), draw(st.sampled_from(DTYPES))
    weights_dtype = draw(st.sampled_from([dtype, torch.float32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    blocks = draw(placed((normal(size, batch, tokens, dim) * draw(st.sampled_from([1, 1, 0, 100]))).to(dtype)))
    w_query = normal(dim) * draw(st.sampled_from([1, 1, 30, 100]))
    keywords: dict[str, Any] = {"blocks": blocks, "w_query": draw(placed(w_query.to(weights_dtype)))}
    if draw(st.booleans()):
        keywords["blocks"] = list(blocks.detach().unbind(0))
    if draw(st.booleans()):
        keywords["w_norm"] = draw(placed(normal(dim).to(weights_dtype)))
    options = {"eps": st.sampled_from([1e-6, 1e-3, 1, Fraction(1, 3)]), "backend": st.sampled_from([None, "reference"])}
    return keywords | draw(st.fixed_dictionaries({}, optional=options))


@share(0.08)
@given(st.data())
def test_attention_residual_is_right_or_refused(outcomes: Outcomes, data: st.DataObject) -> None:
    keywords = data.draw(residuals())
    changed: dict[str, Any] = {}
    if data.draw(st.booleans(), label="spoiled"):
        name = data.draw(st.sampled_from(["blocks", "w_query", "w_norm", "eps", "backend"]))
        value = keywords.get(name)
        if isinstance(value, list):
            i = data.draw(st.integers(0, len(value) - 1))
            changed = {name: [*value[:i], data.draw(spoiled(value[i])), *value[i + 1 :]]}
        else:
            changed = {name: data.draw(spoiled(value) if isinstance(value, Tensor) else anything)}
        keywords |= changed
    named = [*changed, "w_query", "w_norm"] if "blocks" in changed else changed  # whose sizes are those of blocks
    note(outcomes, outcome_of(dispatch.attention_residual, keywords, named, judge_residual))


def judge_residual(keywords: dict[str, Any], out: Tensor, changed: bool) -> str:
    if keywords.get("eps") == 0 and (stacked(keywords["blocks"]) == 0).all(-1).any():
        return "0 / 0 by definition"
    assert_residual_right(keywords, out)
    return "right, though changed" if changed else "right, with gradients"


@pytest.mark.parametrize("name", ["eps", "backend"])
def test_every_value_of_an_option_of_attention_residual(name: str) -> None:
    for blocks in (torch.randn(3, 1, 2, 4), torch.zeros(3, 1, 2, 4), torch.zeros(3, 1, 0, 4)):
        for value in ANYTHING:
            given = {"blocks": blocks, "w_query": torch.randn(4), name: value}
            outcome_of(dispatch.attention_residual, given, [name], judge_residual)


def stacked(blocks: Tensor | list[Tensor]) -> Tensor:
    return blocks if isinstance(blocks, Tensor) else torch.stack(blocks)


def assert_residual_right(keywords: dict[str, Any], out: Tensor) -> None:
    blocks, eps = stacked(keywords["blocks"]), float(keywords.get("eps", 1e-6))
    dtype, dim = blocks.dtype, blocks.shape[-1]
    assert (out.dtype, out.shape) == (dtype, blocks.shape[1:])
    leaves = {n: x.detach().requires_grad_() for n, x in keywords.items() if isinstance(x, Tensor)}
    again = dispatch.attention_residual(**keywords | leaves)
    assert torch.equal(again, out)
    for name, gradient in zip(leaves, torch.autograd.grad(again.sum(), list(leaves.values())), strict=True):
        assert (gradient.shape, gradient.dtype) == (leaves[name].shape, leaves[name].dtype)
        assert torch.isfinite(gradient).all(), f"gradient of {name}"
    if blocks.numel() == 0:
        return
    w_query, w_norm = (keywords.get(n) for n in ("w_query", "w_norm"))
    w_norm = torch.ones(dim) if w_norm is None else w_norm
    want = torch.tensor(
        residual_loops.mix(blocks.double().tolist(), w_query.tolist(), w_norm.tolist(), eps), dtype=torch.float64
    )
    ulp = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rounding = 64 * ulp * (1 + dim * math.sqrt(dim) * largest(w_query) * largest(w_norm))
    error = (out.double() - want).abs()
    allowed = torch.finfo(dtype).eps / 2 * want.abs() + rounding * largest(blocks) + torch.finfo(dtype).tiny
    assert (error <= allowed).all(), f"error {error.max():.2e} in {dtype}"

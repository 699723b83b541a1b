"""The ops inside of PyTorch's transforms, selective checkpointing, fake and meta tensors, and autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nsa import (
    AttentionResidual,
    LinearCompression,
    NSACache,
    NSAttention,
    attention_residual,
    block_sparse_attention,
    indexer_kl_loss,
    neighborhood_attention,
    nsa,
    nsa_forward,
    nsa_forward_aux,
    nsa_with_cache,
    top_blocks_by_max,
)
from nsa.neighborhood.api import neighborhood_attention_backward, neighborhood_attention_forward
from tests.support.cases import product
from tests.support.helpers import LARGE, SMALL, make_qkv

Op = Callable[[Tensor], Tensor]

OPS: dict[str, Op] = {
    "nsa": lambda x: nsa(x, x, x),
    "neighborhood_attention": lambda x: neighborhood_attention(x, x, x),
    "attention_residual": lambda x: attention_residual(x, x[0, 0, 0]),
}
WITHOUT_GRAPH: dict[str, Op] = {
    "nsa": lambda x: nsa_forward(x, x, x),
    "nsa ": lambda x: nsa_forward_aux(x, x, x)[0],
    "neighborhood_attention": lambda x: neighborhood_attention_forward(x, x, x)[0],
    "neighborhood_attention_backward": lambda x: neighborhood_attention_backward(x, x, x, x, torch.zeros(1, 2, 20, 7))[
        0
    ],
}
ALL = [*OPS.items(), *WITHOUT_GRAPH.items()]


@pytest.mark.parametrize(("op", "run"), ALL, ids=[name for name, _ in ALL])
def test_refuses_vmap_by_name(op: str, run: Op) -> None:
    with pytest.raises(RuntimeError, match=f"^{op.strip()} does not support torch.vmap: .* batch dimension B"):
        torch.vmap(run)(torch.randn(3, 1, 20, 2, 8))


@pytest.mark.parametrize("run", OPS.values(), ids=list(OPS))
def test_results_may_be_changed_in_place(run: Op) -> None:
    x = torch.randn(1, 20, 2, 8, requires_grad=True)
    expected = torch.autograd.grad((run(x) * 3)[:, 5:].sum(), x)[0]
    out = run(x)
    out *= 3
    out[:, :5] = 0
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.func.jvp, of torch.jit
@pytest.mark.parametrize(("op", "run"), ALL, ids=[name for name, _ in ALL])
def test_refuses_derivatives_of_functions_by_name(op: str, run: Op) -> None:
    x = torch.randn(1, 20, 2, 8)

    def loss(x: Tensor) -> Tensor:
        return run(x).square().sum()

    by_backward = f"^{op.strip()} does not support torch.func.grad, vjp or jacrev: call backward"
    for transform in (torch.func.grad, torch.func.jacrev, lambda f: lambda x: torch.func.vjp(f, x)):
        with pytest.raises(RuntimeError, match=by_backward):
            transform(loss)(x)
    for transform in (torch.func.jacfwd, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises(RuntimeError, match=f"^{op.strip()} does not support torch.(vmap|func.jvp or jacfwd): "):
            transform(loss)(x)
    with pytest.raises(RuntimeError, match=f"^{op.strip()} does not support torch.func.grad"):
        torch.vmap(torch.func.grad(loss))(x[None])


@pytest.mark.parametrize("run", [nsa, nsa_forward], ids=["nsa", "nsa_forward"])
def test_nsa_refuses_dual_tensors(run: Any) -> None:
    x = torch.randn(1, 20, 2, 8)
    with forward_ad.dual_level():
        run(x, x, x)
        with pytest.raises(RuntimeError, match=r"^nsa does not support forward-mode derivatives: use backward"):
            run(x, forward_ad.make_dual(x, x), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
@pytest.mark.parametrize(
    ("op", "transform"), [("nsa", torch.func.grad), ("attention_residual", torch.vmap)], ids=["nsa", "residual"]
)
def test_refuses_in_a_compiled_function_too(op: str, transform: Any) -> None:
    torch._dynamo.reset()
    whole = torch.compile(lambda x: transform(lambda x: OPS[op](x).sum())(x), backend="aot_eager")
    with pytest.raises(Exception, match=f"{op} does not support torch"):
        whole(torch.randn(3, 1, 20, 2, 8) if transform is torch.vmap else torch.randn(1, 20, 2, 8))


def changed_calls(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]]:
    """A function and all of its inputs."""
    q, k, v = make_qkv(40, dtype=dtype)
    blocks = {"block_indices": torch.zeros(1, 2, 40, 1).int(), "block_size": 8}
    keys = {"k_slc": k, "v_slc": v, "k_win": k, "v_win": v}
    weights = {"w_k_compress": torch.randn(2, 16, 16), "gate_proj_weight": torch.randn(4, 3, 16)}
    entries = {"k_cmp": k[:, :5], "v_cmp": v[:, :5], "gates": torch.rand(1, 40, 4, 3)}
    qkv, seed = {"q": q, "k": k, "v": v}, SMALL["seed"]
    packed = {name: x[0] for name, x in (qkv | keys | entries).items()}
    bounds = torch.tensor([0, 40], dtype=torch.int32)
    return {
        "nsa": (partial(nsa, config=seed), qkv | keys | weights),
        "nsa, entries": (partial(nsa, config=seed), qkv | keys | entries),
        "nsa, packed": (partial(nsa, config=seed, cu_seqlens=bounds), packed),
        "neighborhood": (partial(neighborhood_attention, kernel_size=5), qkv),
        "residual": (lambda x, y, w: attention_residual([x, y], w, w), {"x": q, "y": q, "w": q[0, 0, 0]}),
        "blocks": (partial(block_sparse_attention, **blocks), qkv),
        "loss": (
            lambda q_idx, k_idx, k: indexer_kl_loss(q_idx, k_idx, k * 2, k, **blocks),
            {"q_idx": q[:, :, :2], "k_idx": k, "k": k},
        ),
    }


@pytest.mark.parametrize(("op", "dtype"), product(changed_calls(torch.float32), [torch.float32, torch.bfloat16]))
def test_inputs_changed_before_backward_are_refused(op: str, dtype: torch.dtype) -> None:
    run, tensors = changed_calls(dtype)[op]
    for name in tensors:
        leaves = {key: x.detach().to(dtype).clone().requires_grad_() for key, x in tensors.items()}
        out = run(**leaves)
        with torch.no_grad():
            leaves[name].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


# Selective checkpointing

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
TOKENS = 40


def indexed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blocks = top_blocks_by_max(q[:, :, :2].contiguous(), k[:, :, :1].contiguous(), block_size=8, k=2)
    loss = indexer_kl_loss(q[:, :, :2], k[:, :, :1], q, k, blocks, block_size=8)
    return block_sparse_attention(q, k, v, blocks, block_size=8) * loss


def in_packs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bounds = torch.tensor([0, 13, TOKENS], dtype=torch.int32, device=q.device)
    return nsa(q[0], k[0], v[0], cu_seqlens=bounds, config=SMALL["paper"])


def in_two_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, band = neighborhood_attention_forward(q, k, v, kernel_size=5)
    dq, dk, dv = neighborhood_attention_backward(out, q, k, v, band, kernel_size=5)
    return (q + out + dq).unflatten(2, (2, -1)) * (dk + dv)[:, :, :, None]


CALLS: dict[str, Attention] = {
    "nsa, per token": partial(nsa, config=SMALL["paper"]),
    "nsa, per tile": partial(nsa, config=SMALL["seed"]),
    "nsa, packed": in_packs,
    "nsa, continued": lambda q, k, v: nsa(q[:, 9:30], k, v, q_start=9, config=SMALL["paper"]),
    "nsa, frozen": lambda q, k, v: q * nsa(q.detach(), k.detach(), v.detach(), config=SMALL["paper"]),
    "nsa, without a graph": lambda q, k, v: q * nsa_forward(q, k, v, config=SMALL["paper"]),
    "indexer and blocks": indexed,
    "neighborhood": partial(neighborhood_attention, kernel_size=5),
    "neighborhood's band": lambda q, k, v: q * neighborhood_attention_forward(q, k, v, kernel_size=5)[0],
    "residual": lambda q, k, v: attention_residual([q.flatten(2), q.flatten(2) * 2], k[0, 0].repeat(2, 1).flatten()),
}


def save_all_but_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_SAVE


def selectively(policy: Any, function: Any, *tensors: Tensor) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(function, *tensors, use_reentrant=False, context_fn=contexts)


def gradients(run: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    return [*torch.autograd.grad(run(*leaves).square().sum(), leaves, allow_unused=True)]


def assert_checkpoints_change_nothing(run: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    expected, got = gradients(run, leaves), gradients(partial(selectively, save_all_but_products, run), leaves)
    assert any(x is not None for x in expected)
    for one, other in zip(expected, got, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("run", CALLS.values(), ids=list(CALLS))
def test_selective_checkpoints_change_nothing(run: Attention) -> None:
    leaves = [x.requires_grad_() for x in make_qkv(TOKENS, dtype=torch.float32)]
    assert_checkpoints_change_nothing(run, leaves)


@DEVICES
@pytest.mark.parametrize("preset", LARGE)
def test_selective_checkpoints_of_layers_change_nothing(device: str, preset: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = NSAttention(64, 4, 1, head_dim=64, config=LARGE[preset], device=device, dtype=dtype)
    x = torch.randn(1, 200, 64, device=device, dtype=dtype, requires_grad=True)
    assert_checkpoints_change_nothing(layer, [x])


def test_a_policy_sees_a_call_as_one_operator() -> None:
    seen = []

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(str(op))
        return (
            CheckpointPolicy.MUST_SAVE
            if op is torch.ops.nsa_kernels.saving.default
            else CheckpointPolicy.MUST_RECOMPUTE
        )

    leaves = [x.requires_grad_() for x in make_qkv(TOKENS, dtype=torch.float32)]
    gradients(partial(selectively, policy, CALLS["nsa, per token"]), leaves)
    assert {*seen} == {"nsa_kernels.saving.default"}


# Fake tensors


@pytest.mark.parametrize("meta", [False, True], ids=["fake", "meta"])
@pytest.mark.parametrize("run", [*CALLS.values(), in_two_steps], ids=[*CALLS, "band's backward"])
def test_tensors_without_values_have_shapes_and_gradients(run: Attention, meta: bool) -> None:
    """test_reference.py compares shapes of drawn calls on the meta device."""
    made = make_qkv(TOKENS, dtype=torch.bfloat16)
    expected = run(*made)
    with nullcontext() if meta else FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [(x.to("meta") if meta else mode.from_tensor(x)).requires_grad_() for x in made]
        out = run(*leaves)
        found = [x for x in gradients(run, leaves) if x is not None]
    assert (out.shape, out.dtype, out.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert found
    assert all(x.device.type == "meta" if meta else isinstance(x, FakeTensor) for x in (out, *found))
    with torch.no_grad():
        assert not run(*leaves).requires_grad


def test_a_cache_of_fake_tensors_takes_steps() -> None:
    """Per tile, where a cut depends on lengths."""
    sizes: Any = {"heads": 4, "heads_kv": 2, "dim": 16}
    with FakeTensorMode(), torch.no_grad():
        cache = NSACache.empty(SMALL["seed"], 1, 60, **sizes)
        q, k, v = (torch.randn(1, 2, heads, 16) for heads in (4, 2, 2))
        out = nsa_with_cache(q, k, v, cache, counts=torch.ones(1, dtype=torch.int32))
        cache.reorder(torch.zeros(1, dtype=torch.int64))
        cache.truncate(torch.ones(1, dtype=torch.int32))
        NSACache(SMALL["seed"], cache.table, **sizes)
    assert isinstance(out, FakeTensor)
    assert out.shape == q.shape


def test_intermediate_results_are_refused_in_both() -> None:
    refused = pytest.raises(RuntimeError, match="nsa_forward_aux supports neither fake tensors nor selective")
    q, k, v = make_qkv(TOKENS, dtype=torch.float32)
    with refused:
        selectively(save_all_but_products, lambda q: nsa_forward_aux(q, k, v)[0] * q, q.requires_grad_())
    with refused, FakeTensorMode() as mode:
        nsa_forward_aux(*map(mode.from_tensor, (q, k, v)))


@pytest.mark.parametrize("backend", [None, "cute", "reference"])
def test_a_named_backend_has_the_same_shapes_on_the_meta_device(backend: str | None) -> None:
    q = torch.empty(1, 20, 2, 64, device="meta")
    for op in (nsa, neighborhood_attention):
        assert op(q, q, q, backend=backend).shape == q.shape


# Autocast

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MIXES = [(FP32, FP32, FP32), (FP32, BF16, BF16), (BF16, FP32, FP16), (FP16, FP16, FP16), (FP64, FP64, FP64)]
ATTENTION: dict[str, Callable[..., Tensor]] = {
    "nsa": partial(nsa, config=SMALL["seed"]),
    "nsa_forward": partial(nsa_forward, config=SMALL["paper"]),
    "nsa_forward_aux": lambda *qkv: nsa_forward_aux(*qkv, config=SMALL["seed"])[0],
    "neighborhood_attention": neighborhood_attention,
    "neighborhood_attention_forward": lambda *qkv: neighborhood_attention_forward(*qkv)[0],
    "block_sparse_attention": lambda *qkv: block_sparse_attention(*qkv, torch.zeros(1, 2, 40, 1).int(), block_size=8),
}


@pytest.mark.parametrize(("name", "mix", "dtype"), product(ATTENTION, MIXES, [BF16, FP16]))
def test_autocast_casts_as_scaled_dot_product_attention(
    name: str, mix: tuple[torch.dtype, ...], dtype: torch.dtype
) -> None:
    qkv = [x.to(own).requires_grad_() for x, own in zip(make_qkv(40), mix, strict=True)]
    with torch.autocast("cpu", dtype):
        like_theirs = torch.nn.functional.scaled_dot_product_attention(*(x[:, :, :2].transpose(1, 2) for x in qkv))
        out = ATTENTION[name](*qkv)
    assert out.dtype == like_theirs.dtype
    cast = [x.detach().to(out.dtype).requires_grad_() for x in qkv]
    expected = ATTENTION[name](*cast)
    assert torch.equal(out, expected)
    if out.requires_grad:
        do = torch.randn_like(out)
        got, wanted = torch.autograd.grad(out, qkv, do), torch.autograd.grad(expected, cast, do)
        for x, y, leaf in zip(got, wanted, qkv, strict=True):
            assert x.dtype == leaf.dtype
            assert torch.equal(x, y.to(leaf.dtype))


def test_autocast_casts_what_lies_beside_q() -> None:
    """Gates and their weight stay fp32, which they may be beside any dtype."""
    q, k, v = make_qkv(40, dtype=FP32)
    own = {name: x.to(FP16) for name, x in zip(("k_slc", "v_slc"), make_qkv(40, seed=1)[1:], strict=True)}
    own |= {"w_k_compress": torch.eye(16).repeat(2, 1, 1), "w_v_compress": torch.eye(16).repeat(2, 1, 1)}
    for gates in ({"gates": torch.rand(1, 40, 4, 3)}, {"gate_proj_weight": torch.randn(4, 3, 16)}):
        for half, given in ((False, gates), (True, {n: x.to(FP16) for n, x in gates.items()})):
            with torch.autocast("cpu", BF16):
                got = nsa(q, k, v, **own, **given, config=SMALL["seed"])
            cast = {n: x.to(BF16) for n, x in own.items()} | {n: x.to(BF16) if half else x for n, x in given.items()}
            assert torch.equal(got, nsa(q.to(BF16), k.to(BF16), v.to(BF16), **cast, config=SMALL["seed"]))


@pytest.mark.parametrize("op", [nsa, neighborhood_attention])
def test_autocast_leaves_fp64_alone(op: Any) -> None:
    q, k, v = make_qkv(40)
    with torch.autocast("cpu", BF16):
        with pytest.raises(TypeError, match=r"k must be float64 \(q is float64\), got float32"):
            op(q, k.float(), v)
        with pytest.raises(TypeError, match=r"q must be bfloat16, .* got int64"):
            op(q.long(), k.float(), v.float())
    with pytest.raises(TypeError, match=r"k must be float32 \(q is float32\), got bfloat16"):
        op(q.float(), k.bfloat16(), v.float())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
@pytest.mark.parametrize("name", ["nsa", "nsa_forward", "neighborhood_attention", "compress", "residual"])
def test_autocast_casts_in_compiled_functions_too(name: str) -> None:
    pool = LinearCompression(2, SMALL["seed"].compress_block_size, 16)
    functions = {
        **ATTENTION,
        "compress": partial(nsa, config=replace(SMALL["seed"], compress=pool)),
        "residual": lambda q, k, v: attention_residual([q[:, :, 0], k[:, :, 0], v[:, :, 0]], q[0, 0, 0]),
    }
    qkv = [x.to(own) for x, own in zip(make_qkv(40), (FP32, BF16, FP32), strict=True)]
    torch._dynamo.reset()
    whole = torch.compile(functions[name], fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", BF16):
        got, expected = whole(*qkv), functions[name](*qkv)
    assert got.dtype == expected.dtype == (FP32 if name == "residual" else BF16)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("mix", "weight", "stacked"),
    [((BF16, FP32, FP16), BF16, False), ((FP16, BF16, BF16), FP32, False), ((BF16,) * 3, FP16, True)],
)
def test_autocast_promotes_blocks_as_stack(mix: tuple[torch.dtype, ...], weight: torch.dtype, stacked: bool) -> None:
    """As sums of layers' outputs are promoted; nothing that is fp32 is rounded."""
    blocks = [torch.randn(2, 5, 8).to(own).requires_grad_() for own in mix]
    w_query, w_norm = torch.randn(8).to(weight), torch.rand(8)
    dtype = mix[0] if len(set(mix)) == 1 else FP32
    if stacked:
        blocks = [torch.stack(blocks).detach().requires_grad_()]
    else:
        with torch.autocast("cpu", BF16):
            if FP16 not in mix:  # which torch.stack refuses under an autocast to bfloat16
                assert torch.stack(blocks).dtype == dtype
    with torch.autocast("cpu", BF16):
        out = attention_residual(blocks[0] if stacked else blocks, w_query, w_norm)
    cast = [x.detach().to(dtype) for x in blocks]
    of_weight = w_query if weight == dtype else w_query.float()
    assert out.dtype == dtype
    assert torch.equal(out, attention_residual(cast[0] if stacked else cast, of_weight, w_norm))
    for x, block in zip(torch.autograd.grad(out.sum(), blocks), blocks, strict=True):
        assert x.dtype == block.dtype


def test_a_residual_layer_of_16_bits_takes_blocks_of_32_under_autocast() -> None:
    layer, blocks = AttentionResidual(8, dtype=BF16), torch.randn(3, 2, 5, 8)
    with torch.autocast("cpu", BF16):
        torch.testing.assert_close(layer(blocks), blocks.mean(0))


@pytest.mark.parametrize("blocks", [None, [], [None], [torch.ones(2, 5, 8), None], [torch.ones(2, 5, 8), 3.0]], ids=str)
def test_wrong_blocks_are_named_under_autocast_too(blocks: Any) -> None:
    with torch.autocast("cpu", BF16), pytest.raises((TypeError, ValueError), match=r"^blocks"):
        attention_residual(blocks, torch.ones(8))

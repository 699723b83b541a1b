"""NeighborhoodAttention: the function between projections, its arguments, training with it; the layer around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch import neighborhood_attention
from nsa import NeighborhoodAttention, NeighborhoodAttentionLayer
from tests.support.helpers import assert_within_budget
from tests.support.layer_cases import check_autocast
from tests.support.neighborhood_training import WINDOWS, assert_same_curve, eager
from tests.support.rotary import rotary_table, rotate

WIDTH, HEADS, KV_HEADS = 32, 4, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "truncate": {"kernel_size": 5},
    "shift": {"kernel_size": 6, "dilation": 2, "boundary": "shift", "softmax_scale": 0.4},
    "causal": {"kernel_size": 4, "dilation": 3, "causal": True},
}


@pytest.mark.parametrize("kv_heads", [None, KV_HEADS, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_parameter_learns(options: dict[str, Any], kv_heads: int | None) -> None:
    layer = NeighborhoodAttention(WIDTH, HEADS, kv_heads, head_dim=6, bias=True, rope=rotate, **options)
    x = torch.randn(2, 30, WIDTH, requires_grad=True)
    out = layer(x, rotary_table(30, 6))
    assert out.shape == x.shape
    out.square().sum().backward()
    for name, parameter in [("x", x), *layer.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_is_the_function_between_projections(options: dict[str, Any]) -> None:
    layer = NeighborhoodAttention(WIDTH, HEADS, KV_HEADS, **options)
    x = torch.randn(2, 30, WIDTH)
    q, k, v = (
        project(x).unflatten(-1, (heads, -1))
        for project, heads in ((layer.q_proj, HEADS), (layer.k_proj, KV_HEADS), (layer.v_proj, KV_HEADS))
    )
    expected = layer.o_proj(neighborhood_attention(q, k, v, **options).flatten(-2))
    torch.testing.assert_close(layer(x), expected)


def test_dropout_zeroes_outputs_in_training_only() -> None:
    layer = NeighborhoodAttention(WIDTH, HEADS, dropout=0.5)
    x = torch.randn(1, 100, WIDTH)
    kept = layer.eval()(x)
    assert torch.equal(kept, layer(x))
    dropped = layer.train()(x)
    zero = dropped == 0
    assert 0.4 < zero.double().mean() < 0.6
    torch.testing.assert_close(dropped[~zero], 2 * kept[~zero])


@pytest.mark.parametrize("boundary", ["truncate", "shift"])
def test_under_autocast_only_the_projections_lose_precision(boundary: str) -> None:
    layer = NeighborhoodAttention(WIDTH, HEADS, KV_HEADS, boundary=boundary)
    check_autocast(layer, WIDTH, "nsa.neighborhood.module.neighborhood_attention", neighborhood_attention)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "num_heads must be a multiple of num_kv_heads, got 4 and 3", {"num_kv_heads": 3}),
        (ValueError, "head_dim must be given: hidden_size=32 is not a multiple of 5 heads", {"num_heads": 5}),
        (TypeError, "kernel_size must be an integer, got 3.0", {"kernel_size": 3.0}),
        (ValueError, "dropout must be from 0 to 1, got 1.5", {"dropout": 1.5}),
        (TypeError, "dropout must be a number, got 'some'", {"dropout": "some"}),
        (TypeError, "rope must be a callable", {"rope": "llama"}),
    ],
    ids=str,
)
def test_bad_arguments_are_named(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        NeighborhoodAttention(**{"hidden_size": WIDTH, "num_heads": HEADS, **changes})


# Training


@pytest.mark.parametrize(
    "window",
    [pytest.param(x, id=name, marks=[] if name == "odd" else pytest.mark.full) for name, x in WINDOWS.items()],
)
def test_trains_like_plain_pytorch(window: dict[str, Any]) -> None:
    curve = assert_same_curve("reference", **window)
    assert curve[-1] < 0.05 * curve[0]


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("cute", torch.bfloat16), ("triton", torch.bfloat16), ("triton", torch.float32)],
    ids=["cute-bf16", "triton-bf16", "triton-fp32"],
)
def test_trains_like_plain_pytorch_on_a_gpu(backend: str, dtype: torch.dtype, window: dict[str, Any]) -> None:
    curve = assert_same_curve(backend, device="cuda", dtype=dtype, head_dim=64, **window)
    assert curve[-1] < 0.05 * curve[0]


# The layer: norm in front, residual connection around

LAYER = {"kernel_size": 5, "dilation": 2, "bias": True, "norm_eps": 1e-2}


def plain_layer(
    x: Tensor, weights: dict[str, Tensor], *, heads: int, kv_heads: int, eps: float, **window: Any
) -> Tensor:
    """The layer's math in the dtype of x, with a masked softmax over all pairs of tokens.

    In 16 bits the norm is PyTorch's own, which rounds sums of its gradients more than once on a CPU.
    """

    def linear(name: str, tensor: Tensor) -> Tensor:
        return tensor @ weights[f"attention.{name}.weight"].T + weights[f"attention.{name}.bias"]

    of_norm = weights["layer_norm.weight"], weights["layer_norm.bias"]
    if x.dtype == torch.bfloat16:
        normed = nn.functional.layer_norm(x, x.shape[-1:], *of_norm, eps)
    else:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * of_norm[0] + of_norm[1]
    q, k, v = (
        linear(name, normed).unflatten(-1, (count, -1))
        for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
    )
    return x + linear("o_proj", eager(q, k, v, boundary="truncate", causal=False, **window).flatten(-2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_layer_is_norm_attention_and_residual(dtype: torch.dtype) -> None:
    """out, dx and the gradient of every parameter."""
    assert_layer_is_plain_math("cpu", dtype, WIDTH)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("backend", "dtype"), [("cute", torch.bfloat16), ("triton", torch.bfloat16), ("triton", torch.float32)], ids=str
)
def test_layer_on_a_gpu(backend: str, dtype: torch.dtype) -> None:
    assert_layer_is_plain_math("cuda", dtype, 256, backend=backend)


def assert_layer_is_plain_math(device: str, dtype: torch.dtype, width: int, backend: str | None = None) -> None:
    torch.manual_seed(0)
    layer = NeighborhoodAttentionLayer(width, HEADS, KV_HEADS, **LAYER, backend=backend, device=device, dtype=dtype)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    x, do = (torch.randn(2, 40, width, device=device, dtype=dtype) for _ in range(2))
    given = {"x": x.requires_grad_(), **dict(layer.named_parameters())}
    out = layer(x)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    got = {"out": out, **dict(zip(given, torch.autograd.grad(out, list(given.values()), do), strict=True))}
    exact, low = (plain_results(given, do, plain) for plain in (torch.float64, dtype))
    for name, tensor in got.items():
        if dtype == torch.float64:
            torch.testing.assert_close(tensor, exact[name], rtol=1e-12, atol=1e-12, msg=name)
        elif (
            name == "attention.k_proj.bias"
        ):  # 0 but for a rounding in each of 80 tokens: it shifts all scores of a query alike
            assert tensor.abs().max() <= torch.finfo(dtype).eps * got["attention.k_proj.weight"].abs().max() * 80
        else:
            assert_within_budget(tensor.detach(), exact[name], low[name], name)


def plain_results(given: dict[str, Tensor], do: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in given.items()}
    weights = {name: tensor for name, tensor in tensors.items() if name != "x"}
    out = plain_layer(tensors["x"], weights, heads=HEADS, kv_heads=KV_HEADS, eps=1e-2, kernel_size=5, dilation=2)
    gradients = torch.autograd.grad(out, list(tensors.values()), do.to(dtype))
    return {"out": out.detach(), **dict(zip(tensors, gradients, strict=True))}


def test_layer_names_weights_as_liger_does() -> None:
    """But for o_proj, which Liger calls out_proj."""
    layer = NeighborhoodAttentionLayer(WIDTH, HEADS, bias=True)
    projections = [f"attention.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")]
    assert set(layer.state_dict()) == {*projections, "layer_norm.weight", "layer_norm.bias"}
    other = NeighborhoodAttentionLayer(WIDTH, HEADS, bias=True)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 20, WIDTH)
    assert torch.equal(layer(x), other(x))


def test_layer_begins_on_the_meta_device() -> None:
    layer = NeighborhoodAttentionLayer(WIDTH, HEADS, bias=True, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer = layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    for module in layer.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()
    assert layer(torch.randn(1, 20, WIDTH)).isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float32)], ids=str
)
def test_layer_keeps_the_dtype_under_autocast(dtype: torch.dtype, weights: torch.dtype) -> None:
    layer = NeighborhoodAttentionLayer(WIDTH, HEADS, dtype=weights)
    x = torch.randn(2, 20, WIDTH, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    for name, tensor in [("x", x), *layer.named_parameters()]:
        assert tensor.grad is not None, name
        assert tensor.grad.abs().sum() > 0, name


def test_layer_passes_its_options_on() -> None:
    options: dict[str, Any] = {"kernel_size": 4, "dilation": 3, "causal": True, "softmax_scale": 0.4, "head_dim": 6}
    layer = NeighborhoodAttentionLayer(WIDTH, HEADS, KV_HEADS, rope=rotate, dropout=0.5, norm_eps=0.1, **options)
    x, table = torch.randn(2, 30, WIDTH), rotary_table(30, 6)
    kept = layer.eval()(x, table)
    torch.testing.assert_close(kept, x + layer.attention(nn.functional.layer_norm(x, (WIDTH,), eps=0.1), table))
    assert (layer.attention.num_kv_heads, layer.attention.window.causal) == (KV_HEADS, True)
    dropped = layer.train()(x, table) == x
    assert 0.4 < dropped.double().mean() < 0.6


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "unexpected keyword argument 'kernel'", {"kernel": 3}),
        (ValueError, "kernel_size must be at least 1, got 0", {"kernel_size": 0}),
        (TypeError, "norm_eps must be a number, got True", {"norm_eps": True}),
        (ValueError, "norm_eps must be finite and at least 0, got nan", {"norm_eps": float("nan")}),
    ],
    ids=str,
)
def test_bad_arguments_of_the_layer_are_named(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        NeighborhoodAttentionLayer(**{"hidden_size": WIDTH, "num_heads": HEADS, **changes})


def test_layer_refuses_positions_without_a_hook() -> None:
    with pytest.raises(TypeError, match="this layer was built without a rope hook"):
        NeighborhoodAttentionLayer(WIDTH, HEADS)(torch.randn(1, 8, WIDTH), rotary_table(8, 8))

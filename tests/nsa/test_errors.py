"""Bad input: each has its exact error class and a message that names the argument and the value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import dispatch
from nsa import (
    NeighborhoodAttention,
    NeighborhoodAttentionLayer,
    NSACache,
    NSAConfig,
    NSAttention,
    block_sparse_attention,
    nsa,
    nsa_forward,
    nsa_forward_aux,
    nsa_with_cache,
)
from nsa.common import resolve
from nsa.inputs import NSAInputs
from tests.support.cases import product

B, N, H, H_KV, D, D_V = 2, 32, 4, 2, 8, 6
DOUBLE = torch.float64


class OwnTensor(torch.Tensor):
    """As programs derive from torch.Tensor."""


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def good() -> dict[str, Any]:
    return {"q": ones(B, N, H, D), "k": ones(B, N, H_KV, D), "v": ones(B, N, H_KV, D_V), "compress_block_size": 8}


def packed(**changes: Any) -> dict[str, Any]:
    base = {"q": ones(N, H, D), "k": ones(N, H_KV, D), "v": ones(N, H_KV, D_V), "compress_block_size": 8}
    return base | {"cu_seqlens": bounds(0, 10, N)} | changes


def bounds(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# id: (keywords that replace the good ones, error class, pieces of the message)
BAD: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    # options: equal to good ones, but of another type
    "l float": ({"compress_block_size": 8.0}, TypeError, ("compress_block_size", "integer", "8.0")),
    "share int": ({"share_heads_in_group": 1}, TypeError, ("share_heads_in_group", "True or False", "1")),
    "deterministic int": ({"deterministic": 1}, TypeError, ("deterministic", "1")),
    "compress int": ({"compress": 3}, TypeError, ("compress", "3")),
    "compress one of two": ({"compress": (len,)}, TypeError, ("compress", "two callables", "len")),
    # options: value
    "d above l": ({"compress_stride": 9}, ValueError, ("compress_stride", "compress_block_size=8", "9")),
    "forced above k": (
        {"num_init_blocks": 1, "num_local_blocks": 2, "num_selected_blocks": 2},
        ValueError,
        ("num_init_blocks", "num_local_blocks", "num_selected_blocks=2", "1 + 2"),
    ),
    "c per token": (
        {"num_cmp_selected_blocks": 4, "q_tile_size": 1},
        ValueError,
        ("num_cmp_selected_blocks", "q_tile_size=1"),
    ),
    "c below forced": (
        {"num_cmp_selected_blocks": 3, "n_block_size": 1, "q_tile_size": 32},
        ValueError,
        ("num_cmp_selected_blocks", "at least 4", "compress_block_size=8", "causal=True", "got 3"),
    ),
    "compress word": ({"compress": "max"}, ValueError, ("compress", "'mean'", "'max'")),
    # how options are given
    "unknown keyword": ({"attention_mask": None}, TypeError, ("unknown keyword argument attention_mask",)),
    "option misspelt": ({"num_selected_block": 4}, TypeError, ("did you mean num_selected_blocks?",)),
    "tensor misspelt": ({"gate": None, "cu_seqlen": None}, TypeError, ("cu_seqlen, gate", "mean cu_seqlens, gates?")),
    "misspelt beside config": ({"config": NSAConfig(), "is_causal": True}, TypeError, ("the option is causal",)),
    "config and option": ({"config": NSAConfig()}, TypeError, ("config", "compress_block_size")),
    "config dict": ({"config": {"window_size": 1}}, TypeError, ("config", "NSAConfig", "dict")),
    # tensors: type, dtype, device
    "v other device": ({"v": ones(B, N, H_KV, D_V, device="meta")}, ValueError, ("v", "cpu", "meta")),
    "k sparse": ({"k": ones(B, N, H_KV, D).to_sparse()}, TypeError, ("k", "dense", "sparse_coo")),
    "q int": ({"q": ones(B, N, H, D, dtype=torch.int64)}, TypeError, ("q", "bfloat16", "int64")),
    "k other dtype": ({"k": ones(B, N, H_KV, D, dtype=DOUBLE)}, TypeError, ("k", "float32", "float64")),
    "gates dtype": ({"gates": ones(B, N, H, 3, dtype=torch.bfloat16)}, TypeError, ("gates", "float32", "bfloat16")),
    # tensors: shape
    "heads before tokens": (
        {name: ones(B, heads, N, 8) for name, heads in (("q", H), ("k", H_KV), ("v", H_KV))},
        ValueError,
        ("k", f"q's [B,N] = [{B}, {H}] (the layout is [B,N,heads,D])", f"[{B}, {H_KV}, {N}, 8]"),
    ),
    "packed k other T": (packed(k=ones(31, H_KV, D)), ValueError, ("k", f"q's [T] = [{N}]", "[T,heads,D]", "31")),
    "k other D": ({"k": ones(B, N, H_KV, 7)}, ValueError, ("k", "D=8", "7")),
    "v other heads": ({"v": ones(B, N, 1, D_V)}, ValueError, ("v", "H_kv=2", "1")),
    "H not a multiple": ({"q": ones(B, N, 3, D)}, ValueError, ("q", "multiple", "H_kv=2", "H=3")),
    "no kv heads": ({"k": ones(B, N, 0, D), "v": ones(B, N, 0, D_V)}, ValueError, ("k", "at least one head")),
    "w_k shape": ({"w_k_compress": ones(H_KV, D, D_V)}, ValueError, ("w_k_compress", "[2, 8, 8]", "[2, 8, 6]")),
    "gate weight shape": (
        {"gate_proj_weight": ones(H, D, 3)},
        ValueError,
        ("gate_proj_weight", "[4, 3, 8]", "[4, 8, 3]"),
    ),
    "gates shape": ({"gates": ones(B, N, 3, H)}, ValueError, ("gates", "[2, 32, 4, 3]", "[2, 32, 3, 4]")),
    "k_cmp shape": (
        {"k_cmp": ones(B, 5, H_KV, D), "v_cmp": ones(B, 5, H_KV, D_V)},
        ValueError,
        ("k_cmp", "[2, 4, 2, 8]", "[2, 5, 2, 8]"),
    ),
    "packed k_cmp dims": (
        packed(k_cmp=ones(1, 4, H_KV, D), v_cmp=ones(1, 4, H_KV, D_V)),
        ValueError,
        ("k_cmp", "[1, 4, 2, 8]"),
    ),
    # arguments that need or exclude each other
    "k_cmp alone": ({"k_cmp": ones(B, 4, H_KV, D)}, ValueError, ("k_cmp and v_cmp", "only k_cmp")),
    "k_win alone": ({"k_win": ones(B, N, H_KV, D)}, ValueError, ("k_win and v_win", "only k_win")),
    "k_cmp and projection": (
        {"k_cmp": ones(B, 4, H_KV, D), "v_cmp": ones(B, 4, H_KV, D_V), "w_v_compress": ones(H_KV, D_V, D_V)},
        ValueError,
        ("w_v_compress", "k_cmp"),
    ),
    "k_cmp and compress": (
        {"k_cmp": ones(B, 4, H_KV, D), "v_cmp": ones(B, 4, H_KV, D_V), "compress": torch.sum},
        ValueError,
        ("compress", "k_cmp", "sum"),
    ),
    "two gates": (
        {"gates": ones(B, N, H, 3), "gate_proj_weight": ones(H, 3, D)},
        ValueError,
        ("gates", "gate_proj_weight"),
    ),
    "compress result": (
        {"compress": lambda blocks: blocks},
        ValueError,
        ("compress", "[2, 4, 2, 8]", "[2, 4, 2, 8, 8]"),
    ),
    "compress gives nothing": ({"compress": lambda blocks: None}, TypeError, ("compress", "NoneType")),
    # documents
    "q 4 dims packed": (packed(q=ones(1, N, H, D)), ValueError, ("q", "[T,heads,D]", "[1, 32, 4, 8]")),
    "cu_seqlens int64": (packed(cu_seqlens=torch.tensor([0, N])), TypeError, ("cu_seqlens", "int32", "int64")),
    "cu_seqlens 2 dims": (packed(cu_seqlens=bounds(0, N)[None]), ValueError, ("cu_seqlens", "[B+1]", "[1, 2]")),
    "cu_seqlens start": (packed(cu_seqlens=bounds(1, N)), ValueError, ("cu_seqlens", "start at 0", "1")),
    "cu_seqlens of a subclass": (
        packed(cu_seqlens=torch.nn.Parameter(bounds(1, N), requires_grad=False)),
        ValueError,
        ("cu_seqlens", "start at 0", "1"),
    ),
    "cu_seqlens falls": (packed(cu_seqlens=bounds(0, 20, 10)), ValueError, ("cu_seqlens", "20 then 10", "position 2")),
    "cu_seqlens past T": (packed(cu_seqlens=bounds(0, 33)), ValueError, ("cu_seqlens", "T=32", "33")),
    "max_seqlen short": (packed(max_seqlen=21), ValueError, ("max_seqlen", "22", "21")),
    "max_seqlen alone": ({"max_seqlen": 32}, ValueError, ("max_seqlen", "cu_seqlens", "32")),
    "packed k_cmp short": (
        packed(k_cmp=ones(2, H_KV, D), v_cmp=ones(2, H_KV, D_V)),
        ValueError,
        ("k_cmp", "3 compressed entries", "[2, 2, 8]"),
    ),
    # routing
    "backend unknown": ({"backend": "cudnn"}, ValueError, ("backend", "reference", "'cudnn'")),
    # values, on request
    "q nan": (
        {"q": torch.full((B, N, H, D), float("nan")), "debug": True},
        ValueError,
        ("q", "debug=True", "2048 NaN"),
    ),
    "q nan, of a class of its own": (
        {"q": torch.full((B, N, H, D), float("nan")).as_subclass(OwnTensor), "debug": True},
        ValueError,
        ("q", "debug=True", "2048 NaN"),
    ),
}


@pytest.fixture(params=["each call is checked", "good ones are remembered"])
def remembered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether good calls on the CPU were accepted before, as on a GPU, so that their like is not checked again."""
    resolve._ACCEPTED.clear()  # calls of decoding are remembered on the CPU, too
    if request.param == "good ones are remembered":
        monkeypatch.setattr(resolve, "DEVICES", {"cpu"})
        resolve._ACCEPTED.update(accepted())
    yield bool(resolve._ACCEPTED)
    resolve._ACCEPTED.clear()


@cache
def accepted() -> dict[Any, Any]:
    """What is remembered of good calls."""
    for more in (
        {},
        {"gates": ones(B, N, H, 3)},
        {"gate_proj_weight": ones(H, 3, D)},
        {"w_v_compress": ones(H_KV, D_V, D_V)},
        {"k_cmp": ones(B, 4, H_KV, D), "v_cmp": ones(B, 4, H_KV, D_V)},
    ):
        nsa(**good(), **more)
    nsa(**packed())
    return dict(resolve._ACCEPTED)


def test_good_calls_are_checked_once(remembered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(NSAInputs, "check", lambda *_: checked.append("call"))
    nsa(**good())
    nsa(**good(), deterministic=True)
    nsa(**good() | {"q": torch.rand(B, N, H, D)})
    assert len(checked) == (1 if remembered else 3), "of other options"
    checked.clear()
    for more in (packed(), {"debug": True}, {"q_start": 0}, {"q": ones(B, N, H, D).as_subclass(OwnTensor)}):
        for _ in range(2):
            nsa(**good() | more)
    assert len(checked) == 8, "each time"


def test_remembered_calls_are_bounded(remembered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "MOST", 3)
    for window in range(1, 9):
        nsa(**good(), window_size=window)
        assert len(resolve._ACCEPTED) <= (3 if remembered else 0)


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    changes, error, pieces = BAD[case]
    for function in (nsa, nsa_forward, nsa_forward_aux):
        with pytest.raises(Exception) as caught:  # noqa: PT011 (the class is compared below, exactly)
            function(**good() | changes)
        assert type(caught.value) is error
        for piece in pieces:
            assert piece in str(caught.value)


@pytest.mark.usefixtures("remembered")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_named(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([ones(3, H, D), ones(5, H, D)], layout=layout)
    for function in (nsa, nsa_forward, nsa_forward_aux, dispatch.neighborhood_attention):
        with pytest.raises(TypeError, match=r"q must be a dense tensor, got the layout (nested|jagged)"):
            function(nested, nested, nested)
    for blocks, name in ((nested, "blocks"), ([nested, nested], r"blocks\[0\]")):
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got the layout"):
            dispatch.attention_residual(blocks, ones(D))


@pytest.mark.usefixtures("remembered")
def test_environment_names_an_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_KERNELS_BACKEND", "cudnn")
    with pytest.raises(
        ValueError, match="NSA_KERNELS_BACKEND must be one of cute, triton, reference for nsa, got 'cudnn'"
    ):
        nsa(**good())


BAD_MODULES: list[tuple[Any, type[Exception], dict[str, Any], str]] = [
    (NSAttention, ValueError, {"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    (NSAttention, ValueError, {"num_heads": 3}, "head_dim must be given: hidden_size=32"),
    (NSAttention, TypeError, {"hidden_size": 32.0}, "hidden_size must be an integer, got 32.0"),
    (NSAttention, ValueError, {"v_head_dim": 0}, "v_head_dim must be at least 1, got 0"),
    (NSAttention, ValueError, {"gate": "k"}, "gate must be 'x', 'q' or None, got 'k'"),
    (NSAttention, TypeError, {"config": {"window_size": 3}}, "config must be an NSAConfig or None, got dict"),
    (NSAttention, TypeError, {"rope": "llama"}, "rope must be a callable"),
    (NSAttention, ValueError, {"compress": "mlp"}, "compress must be 'linear' or None, got 'mlp'"),
    (NSAttention, ValueError, {"compress": "linear", "compress_proj": True}, "leaves nothing to compress_proj"),
    (
        NSAttention,
        ValueError,
        {"compress": "linear", "config": NSAConfig(compress=torch.nn.Identity())},
        "leaves nothing to a config that compresses",
    ),
    (NeighborhoodAttention, ValueError, {"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4"),
    (NeighborhoodAttention, ValueError, {"num_heads": 5}, "head_dim must be given: hidden_size=32 is not a multiple"),
    (NeighborhoodAttention, TypeError, {"kernel_size": 3.0}, "kernel_size must be an integer, got 3.0"),
    (NeighborhoodAttention, ValueError, {"dropout": 1.5}, "dropout must be from 0 to 1, got 1.5"),
    (NeighborhoodAttention, TypeError, {"dropout": "some"}, "dropout must be a number, got 'some'"),
    (NeighborhoodAttention, TypeError, {"rope": "llama"}, "rope must be a callable"),
    (NeighborhoodAttentionLayer, TypeError, {"kernel": 3}, "unexpected keyword argument 'kernel'"),
    (NeighborhoodAttentionLayer, ValueError, {"kernel_size": 0}, "kernel_size must be at least 1, got 0"),
    (NeighborhoodAttentionLayer, TypeError, {"norm_eps": True}, "norm_eps must be a number, got True"),
    (NeighborhoodAttentionLayer, ValueError, {"norm_eps": math.nan}, "norm_eps must be finite and at least 0, got nan"),
]


@pytest.mark.parametrize(("module", "error", "keywords", "message"), BAD_MODULES, ids=str)
def test_bad_modules(module: Any, error: type[Exception], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        module(**{"hidden_size": 32, "num_heads": 4, **keywords})


@pytest.mark.parametrize("layer", [NSAttention, NeighborhoodAttention])
@pytest.mark.parametrize(
    ("error", "hook", "message"),
    [
        (TypeError, lambda x, _: x.double(), "rope must keep the dtype torch.float32 of queries and keys, got torch.f"),
        (ValueError, lambda x, _: x[..., :4], r"rope must keep the shape \[1, 8, 4, 8\], got \[1, 8, 4, 4\]"),
        (TypeError, lambda x, _: (x, x), "rope must return a torch.Tensor, got tuple"),
    ],
    ids=["dtype", "shape", "pair"],
)
def test_modules_refuse_what_a_hook_must_not_do(layer: Any, error: type[Exception], hook: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        layer(32, 4, rope=hook)(torch.ones(1, 8, 32))


LAYERS = {"nsa": NSAttention, "neighborhood": NeighborhoodAttention}


@pytest.mark.parametrize(
    ("error", "given", "message"),
    [
        (TypeError, None, "must be a torch.Tensor, got NoneType"),
        (TypeError, [[1.0]], "must be a torch.Tensor, got list"),
        (ValueError, ones(1, 8, 16), r"must have hidden_size=32, got shape \[1, 8, 16\]"),
        (TypeError, ones(1, 8, 32, dtype=DOUBLE), "must be float32, as the weights are, got float64"),
        (TypeError, ones(1, 8, 32, dtype=torch.int64), "must be float32, as the weights are, got int64"),
        (ValueError, ones(1, 8, 32, device="meta"), "must be on cpu, as the weights are, got meta"),
    ],
    ids=["none", "list", "width", "dtype", "integers", "device"],
)
@pytest.mark.parametrize("kind", LAYERS)
def test_modules_name_hidden_states(kind: str, error: type[Exception], given: Any, message: str) -> None:
    with pytest.raises(error, match=f"^hidden_states {message}"):
        LAYERS[kind](32, 4)(given)


@pytest.mark.parametrize("kind", LAYERS)
def test_modules_under_autocast_take_what_it_casts(kind: str) -> None:
    layer = LAYERS[kind](32, 4)
    x = torch.randn(1, 8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert layer(x.to(dtype)).dtype == torch.bfloat16
        with pytest.raises(TypeError, match="hidden_states must be bfloat16 or float16 or float32 under autocast, got"):
            layer(x.double())
        with pytest.raises(TypeError, match="hidden_states must be float64 under autocast, got float32"):
            LAYERS[kind](32, 4, dtype=DOUBLE)(x)


@pytest.mark.parametrize(("kind", "how"), product(LAYERS, ["another module", "a hook", "a forward of its own"]))
def test_modules_leave_dtypes_to_projections_that_cast(kind: str, how: str) -> None:
    """As adapters, quantized weights and offloading do."""

    class Casting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    layer = LAYERS[kind](32, 4)
    for name, project in [*layer.named_children()]:
        if not isinstance(project, torch.nn.Linear):
            continue
        if how == "another module":
            casting = Casting(project.in_features, project.out_features, bias=project.bias is not None)
            casting.load_state_dict(project.state_dict())
            setattr(layer, name, casting)
        elif how == "a hook":
            project.register_forward_pre_hook(lambda _, given: (given[0].float(),))
        else:
            project.forward = lambda x, run=project.forward: run(x.float())
    x = torch.randn(1, 8, 32)
    assert torch.equal(layer(x.double()), layer(x.double().float()))


def test_module_names_hidden_states_of_another_layout() -> None:
    layer, bounds = NSAttention(32, 4), torch.tensor([0, 8], dtype=torch.int32)
    for forward in (layer, layer.forward_aux):
        with pytest.raises(ValueError, match=r"hidden_states must have the layout \[B,N,hidden_size\] .*\[8, 32\]"):
            forward(torch.ones(8, 32))
        with pytest.raises(ValueError, match=r"hidden_states must have the layout \[T,hidden_size\] .*\[1, 8, 32\]"):
            forward(torch.ones(1, 8, 32), cu_seqlens=bounds)


def test_presets_name_misspelt_options() -> None:
    for preset in (NSAConfig.paper, NSAConfig.per_tile):
        with pytest.raises(TypeError, match=r"unknown keyword argument windowsize: did you mean window_size\?"):
            preset(windowsize=3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
def test_a_misspelt_option_is_named_by_dynamo() -> None:
    """Dynamo of torch 2.6 leaves the message out of its own error: there the call that is not compiled has it."""
    q, whole = torch.randn(1, 20, 2, 8), not torch.__version__.startswith("2.6.")
    with pytest.raises(torch._dynamo.exc.Unsupported if whole else TypeError, match="unknown keyword argument windows"):
        torch.compile(lambda q: nsa(q, q, q, windowsize=3), fullgraph=whole, backend="eager")(q)


def called(function: Any, **keywords: Any) -> Any:
    """Call a public function on a few tokens, with further keywords."""
    q = ones(1, 6, 2, D)
    given: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
        block_sparse_attention: ((q, q, q, torch.zeros(1, 2, 6, 1, dtype=torch.int32)), {"block_size": 4}),
        nsa_with_cache: ((q, q, q, NSACache.empty(NSAConfig.paper(), 1, 64, heads_kv=2, dim=D)), {}),
    }
    arguments, options = given.get(function, ((q, q, q), {}))
    return function(*arguments, **options, **keywords)


INSTEAD = {
    "attn_mask": "there is no attention mask, ",
    "key_padding_mask": "there is no attention mask, ",
    "dropout_p": "there is no dropout",
    "scale": "the factor of the logits is the option softmax_scale",
    "enable_gqa": "H may be any multiple of H_kv",
    "is_causal": "the option is causal",
    "need_weights": "there are no attention weights",
}
MASKLESS = {
    nsa: "pack documents with cu_seqlens",
    nsa_forward: "pack documents with cu_seqlens",
    nsa_forward_aux: "pack documents with cu_seqlens",
    block_sparse_attention: "pack documents with cu_seqlens",
    nsa_with_cache: "counts says how many tokens of each sequence are real",
    dispatch.neighborhood_attention: "attend to each document in a separate call",
    dispatch.neighborhood_attention_forward: "attend to each document in a separate call",
}


@pytest.mark.parametrize("function", MASKLESS, ids=lambda f: f.__name__)
def test_keywords_of_other_attention_functions_say_what_to_do_instead(function: Any) -> None:
    called(function)
    for name, reason in INSTEAD.items():
        with pytest.raises(TypeError, match=f"^unknown keyword argument {name}: {reason}") as caught:
            called(function, **{name: None})
        assert (MASKLESS[function] in str(caught.value)) == ("mask" in name)
    with pytest.raises(TypeError, match=r"did you mean backend\?"):
        called(function, bakend=None)


@pytest.mark.parametrize("function", [nsa, nsa_forward_aux, block_sparse_attention, dispatch.neighborhood_attention])
def test_heads_before_tokens_are_noticed(function: Any) -> None:
    """The layout of scaled_dot_product_attention, [B,H,N,D]."""
    q = ones(1, 4, 300, D)
    indices = torch.zeros(1, 300, 4, 1, dtype=torch.int32)
    more: dict[str, Any] = {"block_indices": indices, "block_size": 4} if function is block_sparse_attention else {}
    with pytest.warns(UserWarning, match=r"\[1, 4, 300, 8\] are read as 4 tokens of 300 heads: .* \[B,N,heads,D\]"):
        function(q, q, q, **more)


@pytest.mark.parametrize("shape", [(1, 1, 128, D), (2, 100, 300, D)], ids=str)
def test_few_tokens_or_many_heads_alone_are_not_warned_of(shape: tuple[int, ...]) -> None:
    nsa(ones(*shape), ones(*shape), ones(*shape))
    dispatch.neighborhood_attention(ones(*shape), ones(*shape), ones(*shape))

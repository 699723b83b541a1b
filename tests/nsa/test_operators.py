"""Every op as an operator: PyTorch's rules, and torch.compile, which records it whole and once for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import dispatch
from ascend_kernels.neighborhood import algorithms
from nsa import (
    AttentionResidual,
    NeighborhoodAttention,
    NSAConfig,
    attention_residual,
    block_sparse_attention,
    indexer_kl_loss,
    neighborhood_attention,
    nsa,
    nsa_forward,
    nsa_forward_aux,
    operators,
    top_blocks_by_max,
)
from tests.support.hardware import marked
from tests.support.helpers import SMALL, make_qkv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile

INTS = torch.int32
Arguments = tuple[Any, ...]


def qkv(tokens: int, **options: Any) -> Arguments:
    return make_qkv(tokens, requires_grad=True, **options)


def continued(tokens: int, batch: int = 1) -> Arguments:
    """A quarter of the tokens as queries, which begin behind a quarter, at a tile of 16."""
    start = tokens // 4 // 16 * 16
    q, k, v = make_qkv(tokens, batch=batch)
    return *(x.requires_grad_() for x in (q[:, start : start + tokens // 4].clone(), k, v)), start


def with_starts(tokens: int) -> Arguments:
    *tensors, start = continued(tokens, batch=2)
    return *tensors, torch.tensor([0, start], dtype=INTS)


def blocks_of(tokens: int) -> Arguments:
    """More keys than queries, and for each query the first block and its own."""
    q, k, v = make_qkv(tokens + 10)
    own = (torch.arange(tokens, dtype=INTS) + 10) // 16
    blocks = torch.stack([torch.where(own > 0, 0, -1), own], -1).expand(1, 2, -1, -1)
    return *(x.requires_grad_() for x in (q[:, 10:].clone(), k, v)), blocks


def indexed(tokens: int) -> Arguments:
    """An indexer over those blocks."""
    q, k, _, blocks = blocks_of(tokens)
    return q[:, :, :2].detach().requires_grad_(), k[:, :, :1].detach().requires_grad_(), q, k, blocks


def stacked(tokens: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Arguments:
    """Three blocks, and both weights."""
    shapes = (3, 2, tokens, 20), (20,), (20,)
    return tuple(torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)


def of_list(x: Tensor, w_query: Tensor, w_norm: Tensor, **options: Any) -> Tensor:
    return attention_residual([x[0] * 2, x[1], x[2]], w_query, None, **options) * w_norm


COMPILED: dict[str, tuple[Callable[..., Tensor], Callable[[int], Arguments]]] = {
    "nsa_forward": (lambda q, k, v: nsa_forward(q, k, v, config=SMALL["paper"]) * q, qkv),
    **{f"nsa, {name}": (partial(nsa, config=config), qkv) for name, config in SMALL.items()},
    "nsa, its config made inside": (lambda q, k, v: nsa(q, k, v, config=NSAConfig.paper(window_size=5)), qkv),
    "nsa, continued": (lambda q, k, v, start: nsa(q, k, v, q_start=start, config=SMALL["paper"]), continued),
    "nsa, starts": (lambda q, k, v, starts: nsa(q, k, v, q_start=starts, config=SMALL["paper"]), with_starts),
    "neighborhood": (neighborhood_attention, qkv),
    "neighborhood, continued": (
        lambda q, k, v, start: neighborhood_attention(q, k, v, kernel_size=9, causal=True, q_start=start),
        continued,
    ),
    "blocks": (partial(block_sparse_attention, block_size=16), blocks_of),
    "loss": (partial(indexer_kl_loss, block_size=16), indexed),
    "loss, from a start": (partial(indexer_kl_loss, block_size=16, q_start=3), indexed),
    "residual": (attention_residual, stacked),
    "residual of a list": (of_list, stacked),
}
ON_GPUS: dict[str, dict[str, Any]] = {
    "triton": {"backend": "triton", "dilation": 3},
    "band": {"backend": "triton", "algorithm": "band", "kernel_size": 4},
    "cute": {"backend": "cute", "kernel_size": 33, "dilation": 2},
}
GPU: dict[str, Any] = {
    name: (partial(neighborhood_attention, **options), partial(qkv, dim=64, dtype=torch.bfloat16, device="cuda"))
    for name, options in ON_GPUS.items()
} | {
    f"residual, {function.__name__}": (
        partial(function, backend="triton"),
        partial(stacked, dtype=torch.bfloat16, device="cuda"),
    )
    for function in (attention_residual, of_list)
}


def check_compiled(function: Callable[..., Tensor], make: Callable[[int], Arguments]) -> None:
    """Results and gradients of the eager call, without compiling again for another length."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    once = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for tokens in (80, 96, 120):
        arguments = make(tokens)
        leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
        got, expected = (function(*arguments) for function in (once, function))
        do = torch.randn_like(got)
        results = [(out, *torch.autograd.grad(out, leaves, do, allow_unused=True)) for out in (got, expected)]
        torch.testing.assert_close(*results)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3  # a float among the options may take Dynamo two attempts at the first


@pytest.mark.parametrize("case", COMPILED)
def test_compiles_whole_and_once_for_all_lengths(case: str) -> None:
    check_compiled(*COMPILED[case])


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # FlashAttention-4 warns while it compiles
@pytest.mark.parametrize("case", marked(GPU))
def test_compiles_on_a_gpu(case: str) -> None:
    check_compiled(*GPU[case])


# Numbers that torch.compile makes symbols of, since they changed from call to call, are numbers to every check

TOKENS = 40
BLOCKS = torch.tensor([0, -1]).expand(1, 2, TOKENS, 2)
OPTIONS: Any = {name: value for name, value in vars(SMALL["paper"]).items() if name != "window_size"}


def packed_to(first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bounds = torch.tensor([0, first, TOKENS], dtype=INTS)
    return nsa(q[0], k[0], v[0], cu_seqlens=bounds, max_seqlen=first, config=SMALL["paper"])


def chosen_from(n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q_idx, k_idx = q[:, :20, :2].contiguous(), k[:, :, :1].contiguous()
    chosen = top_blocks_by_max(q_idx, k_idx, block_size=n, k=n - 5, q_start=n)
    return block_sparse_attention(q, k, v, BLOCKS, block_size=n) + chosen.sum()


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "max_seqlen": (packed_to, (21, 33)),
    "window_size, q_start": (
        lambda n, q, k, v: nsa(q[:, n : n + 9], k, v, q_start=n, window_size=n, **OPTIONS),
        (8, 9),
    ),
    "softmax_scale, q_start": (
        lambda n, q, k, v: nsa(
            q[:, n : n + 9], k, v, q_start=n, **{**OPTIONS, "window_size": 8, "softmax_scale": n / 20}
        ),
        (8, 9),
    ),
    "block_size, k, q_start": (chosen_from, (8, 7)),
    "kernel_size, dilation": (
        lambda n, q, k, v: neighborhood_attention(q, q, q, kernel_size=n, dilation=n - 3, softmax_scale=n / 9),
        (5, 7),
    ),
    "eps": (lambda n, q, k, v: attention_residual([q[0]], k[0, 0, 0], v[0, 0, 0], eps=n / 100), (1, 2)),
}


@pytest.mark.parametrize(("call", "values"), CALLS.values(), ids=list(CALLS))
def test_arguments_that_change_compile(call: Callable[..., Tensor], values: tuple[int, ...]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    q, k, v = (x.requires_grad_() for x in make_qkv(TOKENS, dtype=torch.float32))
    for value in values:
        torch.testing.assert_close(compiled(value, q, k, v), call(value, q, k, v), rtol=1e-5, atol=1e-5)


def test_sizes_of_a_gpus_tensors_may_be_symbols() -> None:
    """Symbols have no hash, so such a call is not remembered."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    tokens = mode.from_tensor(torch.empty(TOKENS)).shape[0]
    assert isinstance(tokens, torch.SymInt)
    with mode:
        block, weight = torch.empty(1, tokens, 8, device="cuda"), torch.empty(8, device="cuda")
        assert attention_residual([block, block], weight, backend="reference").shape == block.shape


# PyTorch's rules


def of_nsa(*tensors: Tensor, **extra: Any) -> tuple[Arguments, dict[str, Any]]:
    return tuple(operators.operator_tensors(*tensors, extra)), operators.operator_keywords({"config": SMALL["seed"]})


def opchecked() -> dict[str, tuple[str, Arguments, dict[str, Any]]]:
    """By case: the operator's name, its arguments and keywords."""
    bounds, starts = torch.tensor([0, 30, 75], dtype=INTS), torch.tensor([16, 32], dtype=INTS)
    pack = {"cu_seqlens": torch.tensor([0, 20, 35], dtype=INTS), "cu_seqlens_k": torch.tensor([0, 36, 67], dtype=INTS)}
    q, k, v = make_qkv(75, batch=2)
    pq, pk, pv = make_qkv(75, batch=None)
    blocks, w = torch.randn(3, 2, 6, 5).double().transpose(2, 3), torch.randn(6).double()
    plain = {
        "plain": of_nsa(q, k, v),
        "gates": of_nsa(q, k, v, gates=torch.rand(2, 75, 4, 3).double()),
        "weight": of_nsa(q, k, v, gate_proj_weight=torch.randn(4, 3, 16).double()),
        "packed": of_nsa(pq, pk, pv, cu_seqlens=bounds),
        "starts": of_nsa(q[:, 32:], k, v, q_start=starts, q_sum=torch.randn(2, 4, 16).double()),
        "packed, continued": of_nsa(pq[:35], pk, pv, **pack),
    }
    index = torch.zeros(2, 2, 75, 1, dtype=INTS)
    return {
        **{f"saving, {case}": ("saving", *x) for case, x in plain.items()},
        **{f"forward, {case}": ("forward", *plain[case]) for case in ("plain", "packed, continued")},
        "neighborhood": ("neighborhood_attention", (q, k, v, 5, 2, None, "shift", False, "auto", None, True), {}),
        "blocks": ("block_sparse_attention", (q, k, v, index, None, None, None, 16, True, None, False, None, True), {}),
        "top blocks": ("top_blocks_by_max", (q[:, :, :2], k[:, :, :1], None, None, None, 16, 2, 1, None), {}),
        "loss": ("indexer_kl_loss", (*indexed(75), None, None, 16, None, None, None, True), {}),
        "residual": ("attention_residual", ([blocks], w, None, True, 1e-5, None, True), {}),
        "residual of a list": ("attention_residual", ([*blocks], w, w + 1, False, 1e-5, None, True), {}),
    }


def leaf(x: Tensor | None) -> Tensor | None:
    """In the same layout."""
    return None if x is None else x.detach().clone().requires_grad_()


@pytest.mark.parametrize("case", opchecked())
def test_operators_keep_pytorchs_rules(case: str) -> None:
    name, arguments, keywords = opchecked()[case]
    if name not in ("forward", "top_blocks_by_max"):
        first, *others = arguments
        first = [leaf(x) for x in first] if isinstance(first, list) else leaf(first)
        arguments = first, *map(leaf, others[:2]), *others[2:]
    torch.library.opcheck(getattr(torch.ops.nsa_kernels, name).default, arguments, keywords)


# Training, debugging and routing


@pytest.mark.parametrize("need", [False, True])
def test_nsa_has_no_second_derivative(need: bool) -> None:
    q, k, v = make_qkv(40, requires_grad=True)
    out = nsa(q, k, v, config=SMALL["seed"])
    (first,) = torch.autograd.grad(out, q, torch.ones_like(q).requires_grad_(need), create_graph=True)
    with pytest.raises(RuntimeError, match="nsa has no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize(("function", "compress"), [(nsa, "mean"), (nsa_forward, partial(torch.amax, dim=-2))])
def test_debug_reads_what_the_graph_is_given(function: Any, compress: Any) -> None:
    torch._dynamo.reset()
    whole = torch.compile(partial(function, debug=True, compress=compress), fullgraph=True, backend="aot_eager")
    q, k, v = (torch.nn.Parameter(x) for x in make_qkv(75))
    whole(q, k, v)
    with torch.no_grad():
        q[0, 3, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="q must be finite"):
        whole(q, k, v)


def test_bad_input_is_refused_in_the_graph_too() -> None:
    torch._dynamo.reset()
    whole = torch.compile(partial(nsa_forward, gates=torch.ones(3)), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="gates must have the shape"):
        whole(*make_qkv(75))


ASKING: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "nsa": partial(nsa, config=SMALL["paper"]),
    "nsa, gates alone": lambda q, k, v: nsa(q.detach(), k, v, gates=q[..., :3], config=SMALL["paper"]),
    "neighborhood": partial(neighborhood_attention, kernel_size=3),
    "blocks": lambda q, k, v: block_sparse_attention(q, k, v, torch.zeros(1, 2, 20, 1, dtype=INTS), block_size=8),
    "residual": lambda q, k, v: attention_residual(q, k[0, 0, 0]),
}


@pytest.mark.parametrize("op", ASKING)
def test_dispatch_knows_whether_gradients_are_needed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is routed as what is not: no tensor needs a gradient inside of an operator."""
    q, k, v = make_qkv(20, dtype=torch.float32)
    asked, resolved = [], dispatch.resolve

    def resolve(call: dispatch.Call, *rest: Any, **options: Any) -> dispatch.Impl:
        asked.append(call.backward)
        return resolved(call, *rest, **options)

    monkeypatch.setattr(dispatch, "resolve", resolve)
    torch._dynamo.reset()
    compiled = torch.compile(ASKING[op], fullgraph=True, backend="aot_eager")
    for run, needs_grad in ((ASKING[op], True), (ASKING[op], False), (compiled, True)):
        with torch.set_grad_enabled(needs_grad):
            run(q.clone().requires_grad_(), k, v)
        assert {*asked} == {needs_grad}
        asked.clear()


def test_intermediate_results_break_the_graph() -> None:
    """Dynamo calls `nsa_forward_aux` as it is: tracing the reference would take 25 breaks, again at each length."""
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()

    def branches(q: Tensor) -> Tensor:
        out, aux = nsa_forward_aux(q * 2, q, q, config=SMALL["paper"])
        return out + aux.o_win

    compiled = torch.compile(branches, backend=counter)
    for tokens, graphs in ((20, 2), (33, 4), (47, 4)):  # before and after the call, then once more for all lengths
        q = torch.randn(1, tokens, 2, 8)
        assert torch.equal(compiled(q), branches(q))
        assert counter.frame_count == graphs


def test_other_layers_are_exported_for_all_lengths() -> None:
    """NSAttention is in docs/usage.md, which tests run, too."""
    tokens = {1: torch.export.Dim("tokens", min=2, max=4096)}
    x, longer = torch.randn(1, 40, 16), torch.randn(1, 75, 16)
    window = NeighborhoodAttention(16, 2, kernel_size=5)
    exported = torch.export.export(window, (x,), dynamic_shapes=(tokens,)).module()
    torch.testing.assert_close(exported(longer), window(longer))
    mix = AttentionResidual(16)
    exported = torch.export.export(mix, ([x, x + 1],), dynamic_shapes=([tokens] * 2,)).module()
    torch.testing.assert_close(exported([longer, -longer]), mix([longer, -longer]))


@pytest.mark.parametrize(("asked", "compiled"), [(False, False), (True, False), (True, True)])
def test_determinism_is_what_pytorchs_flag_says_in_forward(
    asked: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in backward, which may run much later. PyTorch refuses to run with it what was compiled without."""
    torch._dynamo.reset()
    flags = []

    def backward(do: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, deterministic: bool, **__: Any) -> Any:
        flags.append(deterministic)
        return q.clone(), k.clone(), v.clone()

    training = SimpleNamespace(backward=backward, kept_like=lambda q, *_, **__: q.new_empty(0))
    impl = SimpleNamespace(backend="cute", training="a module", load_training=lambda: training)
    impl.load = lambda: lambda q, k, v, **_: (q.clone(), q.new_empty(0))
    monkeypatch.setattr("nsa.neighborhood.operators.find_impl", lambda *_, **__: impl)
    function = torch.compile(neighborhood_attention, backend="aot_eager") if compiled else neighborhood_attention
    q, k, v = make_qkv(8, requires_grad=True)
    torch.use_deterministic_algorithms(asked)
    out = function(q, k, v)
    torch.use_deterministic_algorithms(not asked)
    out.sum().backward()
    assert flags == [asked]


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", marked(ON_GPUS))
def test_kept_like_is_what_is_kept(case: str) -> None:
    from cute_kernels import neighborhood as cute

    q, k, v = make_qkv(75, dim=64, dtype=torch.bfloat16, device="cuda")
    window = {"kernel_size": 7, "dilation": 1, "softmax_scale": None, "boundary": "truncate", "causal": False}
    module = cute if case == "cute" else algorithms
    options = {**window, **ON_GPUS[case]}
    kept, like = module.forward(q, k, v, **options)[1], module.kept_like(q, k, v, **options)
    assert kept is not None
    assert (kept.shape, kept.dtype, kept.stride()) == (like.shape, like.dtype, like.stride())

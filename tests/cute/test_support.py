"""Which calls the CUDA kernels take, asked on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import dispatch
from cute_kernels import support
from cute_kernels.fa4 import rules as fa4
from cute_kernels.runtime import device
from nsa import NSACache, NSAConfig, PageTable
from nsa.inputs import NSAInputs
from tests.support.helpers import make_qkv
from tools import compile_all

BOUNDS = torch.tensor([0, 100, 300], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _on_hopper(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fa4.STRATEGY_VARIABLE, raising=False)


def ask(
    inputs: NSAInputs | None = None, *, backward: bool = False, deterministic: bool = False, **options: Any
) -> str | None:
    inputs = inputs or NSAInputs(*make_qkv(300, 4, 2, 64, dtype=torch.bfloat16))
    facts = {"inputs": inputs, "config": NSAConfig(**options), "deterministic": deterministic}
    return support.check(dispatch.Call("nsa", "cuda:0", inputs.q.dtype, backward=backward, options=facts))


def made(tokens: int = 300, heads: int = 4, kv_heads: int = 2, *dims: int, first: int = 0, **how: Any) -> NSAInputs:
    """Inputs of these sizes. Args: first: token of the first query. how: a dtype or a batch; other inputs."""
    sizes = {"dtype": torch.bfloat16, **{name: how.pop(name) for name in ("dtype", "batch") if name in how}}
    q, k, v = make_qkv(tokens, heads, kv_heads, *(dims or (64,)), **sizes)
    return NSAInputs(q[:, first:] if first else q, k, v, **how)


def packed(**changes: Any) -> NSAInputs:
    return made(batch=None, **{"cu_seqlens": BOUNDS, **changes})


def continued(first: int, **changes: Any) -> NSAInputs:
    return made(1000, first=first, **changes)


def of_empty(queries: int, keys: int) -> NSAInputs:
    q, k, v = (torch.empty(1, n, 2, 64, dtype=torch.bfloat16, device="meta") for n in (queries, keys, keys))
    return NSAInputs(q, k, v)


ONE = torch.zeros((), dtype=torch.bfloat16)
STARTS = torch.zeros(1, dtype=torch.int32)
FAR_HEADS = NSAInputs(
    torch.empty_strided((1, 300, 4, 64), (0, 64, 1 << 34, 1), dtype=torch.bfloat16, device="meta"),
    *[ONE.expand(1, 300, 2, 64)] * 2,
)
SEQUENCES = NSAInputs(ONE.expand(70_000, 9, 4, 64), *[ONE.expand(70_000, 9, 2, 64)] * 2)
GRID = "takes up to 65535 sequences and heads, got B=70000, H=4"
LONG = "takes fewer than 2^31 elements of one head in backward, got 33554432 rows of 64"
PER_TOKEN = {"q_tile_size": 1}
OVERLAPPING = {"compress_block_size": 32, "compress_stride": 16}
WIDE: dict[str, Any] = {**PER_TOKEN, "select_block_size": 256}
BACKWARD = {"backward": True}
DETERMINISTIC = {"backward": True, "deterministic": True}
WIDE_TILES = "multiples of select_block_size only, got 256 and 512"

ASKED: dict[Any, list[tuple[dict[str, Any], str | None]]] = {
    made: [
        ({}, None),
        (BACKWARD, None),
        ({"causal": False}, None),
        ({"q_tile_size": 128, "select_block_size": 128}, None),
        ({**OVERLAPPING, "select_block_size": 64}, None),
        ({"num_cmp_selected_blocks": 9, "n_block_size": 64}, None),
        ({"num_selected_blocks": 1024}, None),
        (PER_TOKEN, None),
        ({**WIDE, **OVERLAPPING}, None),
        ({**PER_TOKEN, "causal": False}, "with causal=True only, got causal=False"),
        ({**PER_TOKEN, "select_block_size": 320}, "with select_block_size 64, 128, 192, 256, got 320"),
        ({**PER_TOKEN, "compress_stride": 24}, "with a compress_stride that divides compress_block_size and"),
        ({**PER_TOKEN, "num_selected_blocks": 257}, "chooses at most 256 blocks per token, got 257"),
        (
            {**PER_TOKEN, "compress_block_size": 256, "compress_stride": 1},
            "takes at most 256 compressed blocks over one select block",
        ),
        ({"q_tile_size": 192}, "takes q_tile_size in multiples of 128 on this device, got 192"),
        ({"select_block_size": 96}, "takes select_block_size in multiples of 64, got 96"),
        ({"num_cmp_selected_blocks": 9, "n_block_size": 96}, "takes n_block_size 64 or 128 on this device, got 96"),
        ({"q_tile_size": 2**31 - 256}, "takes q_tile_size up to 2^30, got 2147483392"),
        ({"compress_block_size": 2**30 + 64}, "takes compress_block_size up to 2^30, got 1073741888"),
        ({"select_block_size": 2**30 + 64}, "takes select_block_size up to 2^30, got 1073741888"),
        ({"num_selected_blocks": 1025}, "chooses at most 1024 blocks per tile, got 1025"),
        ({"compress_stride": 1, "select_block_size": 128}, "takes at most 128 compressed blocks over one select block"),
        ({"softmax_scale": 1e-46}, "takes softmax_scale from 1.18e-38 to 1.7e+38, got 1e-46"),
        ({**PER_TOKEN, "softmax_scale": 3e38}, "takes softmax_scale from 1.18e-38 to 1.7e+38, got 3e+38"),
        # FlashAttention-4 adds what block lists name with atomics
        (DETERMINISTIC, None),
        ({**DETERMINISTIC, **OVERLAPPING, "select_block_size": 64}, None),
        (
            {**DETERMINISTIC, "compress_block_size": 32, "compress_stride": 12, "select_block_size": 64},
            "got compress_block_size=32, stride=12",
        ),
        ({**DETERMINISTIC, "num_cmp_selected_blocks": 9}, None),
        ({**DETERMINISTIC, **PER_TOKEN}, None),
    ],
    partial(made, 300, 64, 1, 128): [
        (
            {**WIDE, "compress_block_size": 2, "compress_stride": 2},
            "has no room in shared memory to choose 16 blocks of 128 compressed ones per token",
        ),
        ({**WIDE, "compress_block_size": 4, "compress_stride": 4}, None),
    ],
    partial(made, 70, 64, 1): [(PER_TOKEN, None)],
    partial(made, 70, 65, 1): [(PER_TOKEN, "selects per token (q_tile_size=1) for at most 64 heads a group, got 65")],
    partial(made, 300, 4, 2, 96): [({}, "takes head dims 64 and 128, got D=96")],
    partial(made, 300, 4, 2, 64, 32): [({}, "takes head dims 64 and 128, got D_v=32")],
    partial(made, dtype=torch.float32): [({}, "takes bfloat16 and float16, got float32")],
    partial(made, 300, 4, 2, 64, 128): [({**DETERMINISTIC, **PER_TOKEN}, None), (DETERMINISTIC, "got D=64, D_v=128")],
    (lambda: FAR_HEADS): [(PER_TOKEN, "fewer than 2^34 elements apart in q, got 17179869184"), ({}, None)],
    (lambda: SEQUENCES): [({"q_tile_size": 256}, GRID), (PER_TOKEN, GRID)],
    (lambda: replace(SEQUENCES, q_start=STARTS.expand(70_000))): [({}, None)],
    packed: [
        ({}, None),
        (BACKWARD, None),
        (DETERMINISTIC, "got cu_seqlens"),
        ({"causal": False}, "causal"),
        ({"select_block_size": 192}, "select_block_size"),
    ],
    partial(packed, cu_seqlens_k=BOUNDS): [({}, None), (BACKWARD, None), ({"select_block_size": 512}, WIDE_TILES)],
    partial(packed, q_start=STARTS.expand(2)): [({}, None), (BACKWARD, None), ({"select_block_size": 512}, WIDE_TILES)],
    partial(continued, 256, q_start=STARTS): [
        ({}, None),
        (BACKWARD, None),
        ({"select_block_size": 512}, WIDE_TILES),
        (DETERMINISTIC, "q_start as a tensor"),
    ],
    partial(continued, 256): [(BACKWARD, None), (DETERMINISTIC, None)],
    partial(continued, 300): [
        ({}, None),
        (BACKWARD, None),
        ({"select_block_size": 512}, None),
        ({**BACKWARD, "select_block_size": 512}, WIDE_TILES),
        (DETERMINISTIC, "got q_start=300, q_tile_size=256"),
    ],
    partial(continued, 301): [(PER_TOKEN, None), ({**BACKWARD, **PER_TOKEN}, None)],
    partial(continued, 272): [({**DETERMINISTIC, **PER_TOKEN, "compress_stride": 16}, None)],
    partial(continued, 264): [({**DETERMINISTIC, **PER_TOKEN, "compress_stride": 16}, "got q_start=264, stride=16")],
    partial(continued, 1000): [(BACKWARD, None)],  # no queries
    partial(of_empty, 1 << 24, 1 << 24): [(BACKWARD, None)],
    partial(of_empty, 1 << 25, 1 << 25): [(BACKWARD, LONG), ({}, None)],
    partial(of_empty, 256, 1 << 25): [(BACKWARD, LONG), ({}, None)],
}
"""Of inputs: options, and why they are refused."""


@pytest.mark.parametrize("row", range(len(ASKED)))
def test_takes_or_refuses(row: int) -> None:
    make, asked = [*ASKED.items()][row]
    inputs = make()
    for options, reason in asked:
        answer = ask(inputs, **options)
        assert answer is None if reason is None else reason in (answer or ""), options
        if options.get("deterministic"):
            assert ask(inputs, **{**options, "backward": False}) is None, "a forward always is"


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("backward", [False, True])
def test_deterministic_neighborhoods(target: str, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4's deterministic backward is compiled for tensors with data only, so for Blackwell nowhere."""
    monkeypatch.setenv(device.TARGET_VARIABLE, target)
    device.compute_capability.cache_clear()
    call = dispatch.Call("neighborhood_attention", "cuda", torch.bfloat16, backward=backward)
    assert support.check_neighborhood_attention(call) is None
    reason = support.check_neighborhood_attention(replace(call, options={"deterministic": True})) or ""
    refused = "takes torch.use_deterministic_algorithms(True) in backward only on Hopper"
    assert reason.startswith(refused) == (backward and target == "sm_100a")


@pytest.mark.parametrize(
    ("variable", "value"), [(device.TARGET_VARIABLE, "sm_100a"), (fa4.STRATEGY_VARIABLE, "sm_100")]
)
def test_blackwells_tiles(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    device.compute_capability.cache_clear()
    assert "takes q_tile_size in multiples of 256 on this device, got 128" in (ask(q_tile_size=128) or "")
    refusal = ask(num_cmp_selected_blocks=9, n_block_size=64)
    assert "takes n_block_size 128 on this device, got 64" in (refusal or "")
    for preset in (NSAConfig.seed(), NSAConfig.paper()):
        assert ask(backward=True, **vars(preset)) is None
        refusal = ask(backward=True, deterministic=True, **vars(preset))
        assert (refusal or "").endswith("got Blackwell's tiles")


def refusal_of(capability: str) -> str:
    return (
        f"needs compute capability 9.0 or 10.0, this device has {capability}, which the kernels were never compiled for"
    )


def ask_with_cache(
    dims: tuple[int, int] = (64, 64), page_size: int = 64, separate_kv: bool = False, pages: Any = None, **options: Any
) -> str | None:
    q, k, v = make_qkv(1, 4, 2, dims[0], dims[1], dtype=torch.bfloat16)
    weights = {name: options.pop(name) for name in ("w_k_compress",) if name in options}
    own = {"k_slc": k, "v_slc": v, "k_win": k, "v_win": v} if separate_kv else {}
    config = NSAConfig.paper(**options)
    sizes = {"heads_kv": 2, "dim": dims[0], "dim_v": dims[1], "heads": 4, "separate_kv": separate_kv}
    table = PageTable.empty(1, 1000, page_size=page_size)
    cache = NSACache(config, table, dtype=torch.bfloat16, pages=pages, **sizes)
    facts = {"inputs": NSAInputs(q, k, v, **own, **weights), "config": config, "cache": cache}
    return support.check_with_cache(dispatch.Call("nsa_with_cache", "cuda:0", torch.bfloat16, options=facts))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"dims": (64, 128)}, None),
        ({"page_size": 16}, None),
        ({"page_size": 48}, None),
        ({"compress_block_size": 4, "compress_stride": 1, "select_block_size": 64}, None),
        ({"compress_block_size": 64 * 16}, None),
        ({"num_selected_blocks": 256}, None),
        ({"q_tile_size": 64, "share_heads_in_group": False}, None),
        ({"separate_kv": True}, None),
        pytest.param({"w_k_compress": torch.zeros(2, 64, 64, dtype=torch.bfloat16)}, None, id="w_k_compress"),
        pytest.param({"compress": lambda blocks: blocks[..., 0, :]}, None, id="a callable"),
        ({"q_tile_size": 64, "num_cmp_selected_blocks": 4}, "num_cmp_selected_blocks=None only, got 4"),
        ({"q_tile_size": 64, "select_block_size": 32}, "decodes with select_block_size 64, 128, 192, 256, got 32"),
        ({"dims": (32, 64)}, "32"),
        ({"page_size": 40}, "got 40 and 16"),
        ({"select_block_size": 32}, "got 32"),
        ({"compress_block_size": 4, "compress_stride": 1, "select_block_size": 128}, "stride=1, l'=128"),
        ({"compress_block_size": 65 * 16}, "compress_block_size=1040"),
        ({"num_selected_blocks": 257}, "got 257"),
        ({"num_selected_blocks": 0, "num_init_blocks": 0, "num_local_blocks": 0}, "at least one selected block"),
        ({"softmax_scale": 1e-46}, "takes softmax_scale from"),
        pytest.param(
            {"pages": dict.fromkeys("kv", torch.empty(16, 64, 2, 68, dtype=torch.bfloat16)[..., :64])},
            "pages 'k' at multiples of 16 bytes",
            id="pages that are no vectors",
        ),
    ],
    ids=str,
)
def test_takes_or_refuses_a_cache(options: dict[str, Any], reason: str | None) -> None:
    refusal = ask_with_cache(**options)
    assert refusal is None if reason is None else reason in (refusal or "")


def test_refuses_numbers_that_do_not_lie_side_by_side() -> None:
    q, k, v = make_qkv(1, 4, 2, 64, dtype=torch.bfloat16)
    numbers = torch.zeros(2, 16, 3, dtype=torch.int32)
    for name, table in (
        ("seqlens", PageTable(numbers[..., 0].contiguous(), numbers[0, :2, 0], page_size=64, num_pages=64)),
        ("block_table", PageTable(numbers[..., 0], numbers[0, 0, :2], page_size=64, num_pages=64)),
    ):
        cache = NSACache(NSAConfig.paper(), table, heads_kv=2, dim=64, dtype=torch.bfloat16)
        facts = {"inputs": NSAInputs(q, k, v), "config": cache.config, "cache": cache}
        refusal = support.check_with_cache(dispatch.Call("nsa_with_cache", "cuda:0", torch.bfloat16, options=facts))
        assert f"needs numbers of a row of {name} side by side" in (refusal or "")


@pytest.mark.parametrize("ask", [support.check, support.check_neighborhood_attention])
@pytest.mark.parametrize("capability", ["9.0", "10.0", "10.1", "10.3", "11.0", "12.0", "12.1"])
def test_devices_that_kernels_are_compiled_for(
    capability: str, ask: Callable[[dispatch.Call], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sm_100a's machine code runs on 10.0 alone; B300 has 10.3."""
    monkeypatch.setenv(device.TARGET_VARIABLE, f"sm_{capability.replace('.', '')}a")
    device.compute_capability.cache_clear()
    compiled = f"sm_{capability.replace('.', '')}a" in compile_all.TARGETS
    assert ask(dispatch.Call("any", "cuda", torch.bfloat16)) == (None if compiled else refusal_of(capability))


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    call = dispatch.Call("nsa", "cuda", torch.bfloat16)
    assert support.check(call) is None
    monkeypatch.setenv(device.TARGET_VARIABLE, "sm_80")
    device.compute_capability.cache_clear()
    assert support.check(call) == refusal_of("8.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert support.check(call) == "no NVIDIA GPU is visible"
    assert support.check(dispatch.Call("nsa", "cpu", torch.bfloat16)) == "runs on CUDA devices, got cpu"

"""Which calls the CUDA kernels take, asked on a machine without a GPU."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dispatch
from cute_kernels import plan, support
from cute_kernels.fa4 import rules as fa4
from cute_kernels.runtime import device
from nsa import NSACache, NSAConfig, PageTable
from nsa.inputs import NSAInputs
from tests.support import hardware
from tests.support.cute_cases import OPTIONS, SOME
from tests.support.helpers import make_qkv
from tools import compile_all

TESTS = Path(__file__).resolve().parents[1]
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


def packed(**changes: Any) -> NSAInputs:
    q, k, v = make_qkv(300, 4, 2, 64, dtype=torch.bfloat16, batch=None)
    return NSAInputs(q, k, v, **{"cu_seqlens": BOUNDS, **changes})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"q_tile_size": 128, "select_block_size": 128},
        {"compress_block_size": 32, "compress_stride": 16, "select_block_size": 64},
        {"num_cmp_selected_blocks": 9, "n_block_size": 64},
        {"num_selected_blocks": 1024},
        {"q_tile_size": 1},
        {"q_tile_size": 1, "compress_block_size": 32, "compress_stride": 16, "select_block_size": 256},
    ],
    ids=str,
)
def test_takes(options: dict[str, Any]) -> None:
    assert ask(**options) is None


@pytest.mark.parametrize("backward", [False, True])
def test_takes_sequences_and_packed_documents(backward: bool) -> None:
    assert ask(backward=backward) is None
    assert ask(packed(), backward=backward) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"q_tile_size": 1, "causal": False}, "with causal=True only, got causal=False"),
        ({"q_tile_size": 1, "select_block_size": 320}, "with select_block_size 64, 128, 192, 256, got 320"),
        ({"q_tile_size": 1, "compress_stride": 24}, "with a compress_stride that divides compress_block_size and"),
        ({"q_tile_size": 1, "num_selected_blocks": 257}, "chooses at most 256 blocks per token, got 257"),
        (
            {"q_tile_size": 1, "compress_block_size": 256, "compress_stride": 1},
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
        ({"q_tile_size": 1, "softmax_scale": 3e38}, "takes softmax_scale from 1.18e-38 to 1.7e+38, got 3e+38"),
    ],
    ids=str,
)
def test_refuses(options: dict[str, Any], reason: str) -> None:
    assert reason in (ask(**options) or "")


def test_what_shared_memory_does_not_hold_is_refused() -> None:
    inputs = NSAInputs(*make_qkv(300, 64, 1, 128, dtype=torch.bfloat16))
    options = {"q_tile_size": 1, "compress_block_size": 2, "compress_stride": 2, "select_block_size": 256}
    refusal = "has no room in shared memory to choose 16 blocks of 128 compressed ones per token"
    assert refusal in (ask(inputs, **options) or "")
    assert ask(inputs, **{**options, "compress_block_size": 4, "compress_stride": 4}) is None


def test_heads_that_32_bits_do_not_reach_are_refused() -> None:
    one = torch.zeros((), dtype=torch.bfloat16)
    q = torch.empty_strided((1, 300, 4, 64), (0, 64, 1 << 34, 1), dtype=torch.bfloat16, device="meta")
    inputs = NSAInputs(q, *[one.expand(1, 300, 2, 64)] * 2)
    assert "fewer than 2^34 elements apart in q, got 17179869184" in (ask(inputs, q_tile_size=1) or "")
    assert ask(inputs) is None


def test_more_sequences_than_a_grid_has_are_refused() -> None:
    one = torch.zeros((), dtype=torch.bfloat16)
    inputs = NSAInputs(one.expand(70_000, 9, 4, 64), *[one.expand(70_000, 9, 2, 64)] * 2)
    for tile in (256, 1):
        assert "takes up to 65535 sequences and heads, got B=70000, H=4" in (ask(inputs, q_tile_size=tile) or "")
    as_pack = replace(inputs, q_start=torch.zeros(70_000, dtype=torch.int32))
    assert ask(as_pack) is None


def continued(first: int, tokens: int = 1000, dims: tuple[int, int] = (64, 64), **changes: Any) -> NSAInputs:
    q, k, v = make_qkv(tokens, 4, 2, *dims, dtype=torch.bfloat16)
    return NSAInputs(q[:, first:], k, v, **changes)


@pytest.mark.parametrize(
    ("first", "options", "backward", "reason"),
    [
        (256, {}, True, None),
        (300, {}, False, None),
        (300, {}, True, None),
        (300, {"select_block_size": 512}, False, None),
        (300, {"select_block_size": 512}, True, "multiples of select_block_size only, got 256 and 512"),
        (1000, {}, True, None),  # no queries
        (301, {"q_tile_size": 1}, True, None),
        (301, {"q_tile_size": 1}, False, None),
    ],
)
def test_queries_that_continue_a_sequence(
    first: int, options: dict[str, Any], backward: bool, reason: str | None
) -> None:
    refusal = ask(continued(first), backward=backward, **options)
    assert refusal is None if reason is None else reason in (refusal or "")


@pytest.mark.parametrize("backward", [False, True])
def test_starts_that_only_the_device_knows(backward: bool) -> None:
    """As packed documents."""
    starts = torch.zeros(1, dtype=torch.int32)
    for inputs in (
        continued(256, q_start=starts),
        packed(cu_seqlens_k=BOUNDS),
        packed(q_start=starts.expand(2)),
    ):
        assert ask(inputs, backward=backward) is None
        assert "multiples of select_block_size only, got 256 and 512" in (ask(inputs, select_block_size=512) or "")
    assert "q_start as a tensor" in (ask(continued(256, q_start=starts), backward=True, deterministic=True) or "")


@pytest.mark.parametrize(
    ("queries", "keys", "taken"),
    [(1 << 24, 1 << 24, True), (1 << 25, 1 << 25, False), (256, 1 << 25, False)],
)
def test_longest_backward(queries: int, keys: int, taken: bool) -> None:
    q, k, v = (torch.empty(1, n, 2, 64, dtype=torch.bfloat16, device="meta") for n in (queries, keys, keys))
    reason = "takes fewer than 2^31 elements of one head in backward, got 33554432 rows of 64"
    assert ask(NSAInputs(q, k, v), backward=True) == (None if taken else reason)
    assert ask(NSAInputs(q, k, v)) is None


@pytest.mark.parametrize(
    ("inputs", "options", "got"),
    [
        (None, {}, None),
        (None, {"compress_block_size": 32, "compress_stride": 16, "select_block_size": 64}, None),
        (None, {"compress_block_size": 32, "compress_stride": 12, "select_block_size": 64}, "stride=12"),
        (None, {"num_cmp_selected_blocks": 9}, None),
        (packed(), {}, "cu_seqlens"),
        (None, {"q_tile_size": 1}, None),
        (NSAInputs(*make_qkv(300, 4, 2, 64, 128, dtype=torch.bfloat16)), {"q_tile_size": 1}, None),
        (NSAInputs(*make_qkv(300, 4, 2, 64, 128, dtype=torch.bfloat16)), {}, "D=64, D_v=128"),
        ("continued 256", {}, None),
        ("continued 300", {}, "q_start=300, q_tile_size=256"),
        ("continued 272", {"q_tile_size": 1, "compress_stride": 16}, None),
        ("continued 264", {"q_tile_size": 1, "compress_stride": 16}, "q_start=264, stride=16"),
    ],
)
def test_determinism(inputs: NSAInputs | str | None, options: dict[str, Any], got: str | None) -> None:
    """FlashAttention-4 adds what block lists name with atomics."""
    if isinstance(inputs, str):
        inputs = continued(int(inputs.split()[1]))
    reason = ask(inputs, backward=True, deterministic=True, **options)
    assert reason is None if got is None else (reason or "").endswith(got)
    assert ask(inputs, deterministic=True, **options) is None


def test_largest_group_per_token() -> None:
    assert ask(NSAInputs(*make_qkv(70, 64, 1, 64, dtype=torch.bfloat16)), q_tile_size=1) is None
    reason = ask(NSAInputs(*make_qkv(70, 65, 1, 64, dtype=torch.bfloat16)), q_tile_size=1)
    assert reason == "selects per token (q_tile_size=1) for at most 64 heads a group, got 65"


@pytest.mark.parametrize("preset", ["seed", "paper"])
def test_nothing_is_deterministic_with_blackwells_tiles(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.TARGET_VARIABLE, "sm_100a")
    device.compute_capability.cache_clear()
    options = vars(getattr(NSAConfig, preset)())
    assert (ask(backward=True, deterministic=True, **options) or "").endswith("got Blackwell's tiles")
    assert ask(backward=True, **options) is None


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
    ("sizes", "dtype", "reason"),
    [
        ((4, 2, 96), torch.bfloat16, "takes head dims 64 and 128, got D=96"),
        ((4, 2, 64, 32), torch.bfloat16, "takes head dims 64 and 128, got D_v=32"),
        ((4, 2, 64), torch.float32, "takes bfloat16 and float16, got float32"),
    ],
)
def test_refuses_inputs(sizes: tuple[int, ...], dtype: torch.dtype, reason: str) -> None:
    assert ask(NSAInputs(*make_qkv(300, *sizes, dtype=dtype))) == reason


@pytest.mark.parametrize("options", [{"causal": False}, {"select_block_size": 192}], ids=str)
def test_refuses_packed(options: dict[str, Any]) -> None:
    answer = ask(packed(), **options) or ""
    assert next(iter(options)) in answer
    assert "cu_seqlens" in answer or "packed" in answer


def test_blackwell_wants_larger_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(q_tile_size=128) is None
    for name, value in ((fa4.STRATEGY_VARIABLE, "sm_100"), (device.TARGET_VARIABLE, "sm_100a")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            device.compute_capability.cache_clear()
            assert ask() is None
            assert "in multiples of 256 on this device, got 128" in (ask(q_tile_size=128) or "")
        device.compute_capability.cache_clear()


# What tests on a GPU ask, of a Hopper GPU and of Blackwell's


@pytest.fixture(params=["sm_90", "sm_100"])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(device.TARGET_VARIABLE, f"{request.param}a")
    device.compute_capability.cache_clear()
    return str(request.param)


def marks_of_sm_90() -> dict[str, pytest.Mark]:
    """Each mark `sm_90` of a test or of one of its parameters, by module, test and number."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if not re.search(r"tests\.support\.hardware|mark\.sm_90", path.read_text("utf-8")):
            continue
        module = importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))
        for name, test in vars(module).items():
            marks = getattr(test, "pytestmark", []) if name.startswith("test_") else []
            values = [value for mark in marks if mark.name == "parametrize" for value in mark.args[1]]
            of_values = [mark for value in values for mark in getattr(value, "marks", ())]
            needed = [mark for mark in (*marks, *of_values) if mark.name == "sm_90"]
            found |= {f"{module.__name__}.{name} {i}": mark for i, mark in enumerate(needed)}
    return found


@pytest.mark.cuda_extra  # modules of tests import CuTe DSL
def test_what_needs_hopper_is_refused_on_blackwell_alone(arch: str) -> None:
    """Else a mark leaves out of a run on a B200 what would run there."""
    marks, presets = marks_of_sm_90(), (NSAConfig.per_tile(), NSAConfig.paper())
    assert {mark.args[0] for mark in marks.values() if mark.args} == {
        mark.args[0] for mark in (hardware.ATOMIC_FREE, hardware.NEIGHBORHOOD)
    }
    rules = fa4.rules(torch.device("cuda:0"))
    assert rules is not None
    assert plan.has_atomic_free_backward(rules, 64, 64) == (arch == "sm_90")
    of_options = {name: dict(mark.kwargs) for name, mark in marks.items() if not mark.args}
    assert len(of_options) > 20
    for name, options in of_options.items():
        deterministic = options.pop("deterministic", False)
        for preset in presets if deterministic else presets[:1]:
            reason = ask(backward=deterministic, deterministic=deterministic, **{**vars(preset), **options})
            assert (reason is None) == (arch == "sm_90"), (name, reason)


def test_what_other_tests_ask_is_taken(arch: str) -> None:
    """Of docs/blackwell.md's second command."""
    for options in OPTIONS.values():
        assert ask(backward=True, **{**vars(SOME), **options}) is None, options


@pytest.mark.parametrize(
    ("arch", "rows", "widths"), [("sm_90", 128, "64 or 128"), ("sm_100", 256, "128")], indirect=["arch"]
)
@pytest.mark.usefixtures("arch")
def test_sizes_of_tiles_are_named(rows: int, widths: str) -> None:
    assert f"takes q_tile_size in multiples of {rows} on this device, got 100" in (ask(q_tile_size=100) or "")
    refusal = ask(num_cmp_selected_blocks=9, n_block_size=32)
    assert f"takes n_block_size {widths} on this device, got 32" in (refusal or "")


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
    "options",
    [
        {},
        {"dims": (64, 128)},
        {"page_size": 16},
        {"page_size": 48},
        {"compress_block_size": 4, "compress_stride": 1, "select_block_size": 64},
        {"compress_block_size": 64 * 16},
        {"num_selected_blocks": 256},
        {"q_tile_size": 64, "share_heads_in_group": False},
        {"separate_kv": True},
        pytest.param({"w_k_compress": torch.zeros(2, 64, 64, dtype=torch.bfloat16)}, id="w_k_compress"),
        pytest.param({"compress": lambda blocks: blocks[..., 0, :]}, id="a callable"),
    ],
    ids=str,
)
def test_takes_a_cache(options: dict[str, Any]) -> None:
    assert ask_with_cache(**options) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
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
    ],
)
def test_refuses_a_cache(options: dict[str, Any], reason: str) -> None:
    refusal = ask_with_cache(**options)
    assert refusal is not None
    assert reason in refusal


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


def test_refuses_pages_that_are_no_vectors() -> None:
    memory = torch.empty(16, 64, 2, 68, dtype=torch.bfloat16)
    refusal = ask_with_cache(pages={"k": memory[..., :64], "v": memory[..., :64]})
    assert refusal is not None
    assert "pages 'k' at multiples of 16 bytes" in refusal


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

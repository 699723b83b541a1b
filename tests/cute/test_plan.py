"""The plan of a call of NSA: which kernels it chooses, and that these are launched and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cute_kernels import backward, forward
from cute_kernels.call import window_reach
from cute_kernels.plan import Plan, plan, refusal
from cute_kernels.runtime.launches import launches_of
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from tests.support import cases, kernel_calls
from tests.support.compile_keys import meta_gpu

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported

TILE, TOKEN = NSAConfig.per_tile(), NSAConfig.paper()


@pytest.fixture(autouse=True)
def arch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Meta tensors stand for those of this GPU."""
    with meta_gpu(getattr(request, "param", "sm_90a")):
        yield


inputs_of = partial(kernel_calls.inputs_of, dim=128, group=16, dtype=torch.bfloat16, tokens=3000)


# Rules, by what differs from the paper's configuration (or the one per tile) on a Hopper GPU

RULES: dict[str, tuple[NSAInputs, NSAConfig, dict[str, Any]]] = {
    "per token": (
        inputs_of(),
        TOKEN,
        {
            "selected": "kv_outer",
            "forced": (1, 2),
            "window": "combine",
            "gate": "combine",
            "compressed_backward": "split",
            "selected_backward": "kv_outer",
            "window_backward": "split",
            "local_with_window": True,
            "window_dq": "combine",
        },
    ),
    "per tile": (
        inputs_of(),
        TILE,
        {
            "selected": "fa4",
            "forced": (0, 0),
            "window": "fa4",
            "gate": "kernel",
            "compressed_backward": "split",
            "selected_backward": "split",
            "window_backward": "split",
            "local_with_window": False,
        },
    ),
    "64 heads a group": (inputs_of(group=64), TOKEN, {"selected": "query_outer", "window": "fa4", "gate": "kernel"}),
    "4 heads a group": (inputs_of(group=4), TOKEN, {"selected": "kv_outer", "window": "fa4", "gate": "combine"}),
    "own window": (
        inputs_of(tensors=("k_win", "v_win")),
        TOKEN,
        {"window": "fa4", "gate": "combine", "local_with_window": False},
    ),
    "own selected": (inputs_of(tensors=("k_slc", "v_slc")), TOKEN, {"window": "fa4", "local_with_window": False}),
    "given gates": (inputs_of(gates="gates"), TOKEN, {"gate": "combine", "local_with_window": False}),
    "D_v": (inputs_of(other_v_dim=True), TOKEN, {"window": "fa4", "gate": "kernel", "window_backward": "fa4"}),
    "documents": (inputs_of(documents=3), TOKEN, {"window": "combine", "gate": "kernel", "window_backward": "fa4"}),
    "no room for forced blocks": (
        inputs_of(group=4),
        replace(TOKEN, num_init_blocks=2, num_local_blocks=3),
        {"forced": (0, 0)},
    ),
    "forced blocks in the window": (
        inputs_of(),
        replace(TOKEN, num_init_blocks=2, num_local_blocks=3),
        {"forced": (2, 3), "window": "combine"},
    ),
    "local blocks beyond the window": (
        inputs_of(),
        replace(TOKEN, window_size=127),
        {"forced": (1, 2), "window": "fa4", "local_with_window": False},
    ),
    "a window of 128": (inputs_of(), replace(TOKEN, window_size=128), {"window": "combine"}),
    "a window of 2048": (inputs_of(), replace(TOKEN, window_size=2048), {"window": "combine"}),
    "a window of 2049": (inputs_of(), replace(TOKEN, window_size=2049), {"window": "fa4"}),
    "many slots": (inputs_of(), replace(TOKEN, num_selected_blocks=33), {"window": "fa4"}),
    "nothing local": (inputs_of(), replace(TOKEN, num_local_blocks=0), {"window": "fa4"}),
    "two partials a slot": (inputs_of(), replace(TOKEN, select_block_size=128), {"window_dq": "combine"}),
    "too many partials": (
        inputs_of(),
        replace(TOKEN, select_block_size=128, num_selected_blocks=17),
        {"local_with_window": True, "window_dq": "window"},
    ),
    "selected entries": (
        inputs_of(),
        replace(TILE, num_cmp_selected_blocks=4, compress_block_size=1, select_block_size=64),
        {"selects_entries": True, "compressed_backward": "blocks"},
    ),
    "few entries": (
        inputs_of(),
        replace(TILE, num_cmp_selected_blocks=4),
        {"selects_entries": False, "compressed_backward": "split"},
    ),
    "no causality": (
        inputs_of(),
        replace(TILE, causal=False),
        {"compressed_backward": "fa4", "selected_backward": "split", "window_backward": "fa4"},
    ),
    "later queries": (inputs_of(first=512), TILE, {"first_row": 512, "window_backward": "split", "as_pack": False}),
    "from inside a tile": (
        inputs_of(first=500),
        TILE,
        {"first_row": 0, "as_pack": True, "compressed_backward": "fa4", "window_backward": "fa4"},
    ),
}


def test_own_keys_are_not_shared_though_they_are_one_tensor() -> None:
    """Values of both branches differ."""
    inputs = inputs_of()
    keys = torch.empty_like(inputs.k)
    inputs = replace(inputs, k_slc=keys, k_win=keys, v_slc=inputs.v, v_win=torch.empty_like(inputs.v))
    made = plan(inputs, TOKEN, training=True)
    assert (made.window, made.local_with_window) == ("fa4", False)


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    inputs, config, expected = RULES[name]
    made = plan(inputs, config, training=True)
    assert {field: getattr(made, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("arch", "batch", "rows", "expected"),
    [
        ("sm_90a", 1, 131_072, "split"),
        ("sm_90a", 1, 131_073, "phases"),
        ("sm_100a", 1, 300, "phases"),
        ("sm_100a", 2, 16_383, "fa4"),
        ("sm_100a", 2, 16_384, "phases"),
    ],
    indirect=["arch"],
)
def test_compressed_backward_by_length(batch: int, rows: int, expected: str) -> None:
    config = replace(TILE, compress_block_size=64)
    inputs = inputs_of(tokens=rows, group=4).map(lambda x: x.expand(batch, *x.shape[1:]) if x.dim() == 4 else x)
    assert plan(inputs, config, training=True).compressed_backward == expected


def test_windows_reach_no_farther_than_tokens() -> None:
    """FlashAttention-4 adds rows and reach in int32."""
    reaches = [window_reach(size, causal, 100) for size in (7, 2**31 - 1) for causal in (True, False)]
    assert reaches == [(6, 0), (3, 3), (100, 0), (100, 100)]


def test_without_our_backwards() -> None:
    """FlashAttention-4's, for comparisons; and where a deterministic one has no other."""
    made = plan(inputs_of(), TILE, training=True, atomic_free=False)
    assert (made.compressed_backward, made.selected_backward, made.window_backward) == ("phases", "fa4", "fa4")
    made = plan(inputs_of(), TILE, training=True, atomic_free=False, deterministic=True)
    assert (made.selected_backward, made.window_backward) == ("split", "fa4")


@pytest.mark.parametrize("arch", ["sm_100a"], indirect=True)
def test_on_blackwell() -> None:
    made = plan(inputs_of(), TOKEN, training=True)
    assert (made.selected, made.window, made.gate, made.window_backward) == ("kv_outer", "fa4", "combine", "fa4")


# What is launched

KERNELS: dict[str, Callable[[Plan], bool]] = {
    "attend.kv_outer.KVOuterForward": lambda x: x.selected == "kv_outer",
    "attend.query_outer.QueryOuterForward": lambda x: x.selected == "query_outer",
    "attend.window_combine.WindowCombine": lambda x: x.window == "combine",
    "attend.forced.ForcedForward": lambda x: x.forced != (0, 0) and (x.window, x.gate) == ("fa4", "kernel"),
    "attend.forced.ForcedCombineAndGate": lambda x: x.forced != (0, 0) and (x.window, x.gate) == ("fa4", "combine"),
    "gate.forward.GatedSum": lambda x: x.gate == "kernel",
    "attend.compressed_backward.CompressedDQ": lambda x: x.compressed_backward == "split",
    "attend.selected_backward.SelectedDQ": lambda x: (
        x.selected_backward == "split" or x.compressed_backward == "blocks"
    ),
    "attend.kv_outer_backward.KVOuterBackward": lambda x: x.selected_backward == "kv_outer",
    "attend.window_backward.WindowDKV": lambda x: x.window_backward == "split",
    "attend.window_backward.WindowDQ": lambda x: x.window_backward == "split" and x.window_dq == "window",
    "attend.window_dq_combine.WindowDQCombine": lambda x: x.window_dq == "combine",
}
"""Whether a plan launches it."""


def names_of(call: Callable[[], Any]) -> set[str]:
    """Functions that compile the kernels that a call launches."""
    return {str(getattr(launch.kernel, "name", "")).partition(" ")[0] for launch in launches_of(call)}


@pytest.mark.parametrize(
    ("name", "arch", "atomic_free"),
    cases.product(RULES, ["sm_90a", "sm_100a"], [True, False], cover=2),
    indirect=["arch"],
)
def test_launches_are_those_of_the_plan(name: str, atomic_free: bool) -> None:
    inputs, config, _ = RULES[name]
    assert refusal(inputs, config, training=True) is None

    def call() -> None:
        out, saved = forward.nsa_saving(inputs, config, recompute=False)
        backward.nsa_backward(inputs, config, saved, torch.empty_like(out), atomic_free=atomic_free)

    launched = names_of(call)
    made = plan(inputs, config, training=True, atomic_free=atomic_free)
    for kernel, chosen in KERNELS.items():
        assert (f"cute_kernels.{kernel}.compile" in launched) == chosen(made), kernel


def test_indices_of_callers_need_not_hold_forced_blocks() -> None:
    inputs, forced = inputs_of(), "cute_kernels.attend.window_combine.WindowCombine.compile"
    indices = torch.empty((1, 2, 3000, TOKEN.num_selected_blocks), dtype=torch.int32, device="meta")
    assert forced in names_of(lambda: forward.nsa(inputs, TOKEN))
    of_given = names_of(lambda: forward.nsa(inputs, TOKEN, indices=indices))
    assert not any(name.startswith(("cute_kernels.attend.forced", forced)) for name in of_given)

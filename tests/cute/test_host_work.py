"""The host's work of a training step per tile, and of decoding, with launches that do nothing: operators and calls.

Of calls that are replayed (runtime/replay.py), as all but the first two of a kind are, one by one or as graphs
(runtime/graphs.py), and of calls as these two are. Operators are counted exactly, since each costs the host
some microseconds, with a kernel or without, and so are calls of Python's and C's functions. Time is not: beside a loop
of Python in the same moment it doubles where other processes share caches.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.runtime import graphs, replay
from nsa import NSACache, NSAConfig, PageTable, nsa_with_cache
from tests.support import kernel_calls
from tests.support.compile_keys import noted_keys

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported

WITHOUT_KERNEL = ("alias", "as_strided", "detach", "empty", "empty_strided", "expand", "new_empty", "permute", "select",
                  "slice", "transpose", "unbind", "view")  # fmt: skip
"""Views, and new tensors that are not written."""


class Operators(TorchDispatchMode):
    """Counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))

    @property
    def kernels(self) -> int:
        return sum(count for name, count in self.counts.items() if name.removesuffix("_like") not in WITHOUT_KERNEL)


def steps() -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Forward and backward of 8K tokens, 8 heads over 2, D = 128, the defaults. To be called inside `noted_keys`."""
    from cute_kernels import backward, forward

    inputs, config = kernel_calls.inputs_of(dim=128, group=4, dtype=torch.bfloat16, tokens=8192), NSAConfig()
    do = torch.empty_like(inputs.q)
    return (
        lambda: forward.nsa_saving(inputs, config, recompute=False)[1],
        lambda saved: backward.nsa_backward(inputs, config, saved, do),
    )


@pytest.fixture(params=["plain", "replayed", "graphs"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How calls are launched from the fifth on."""
    mode = str(request.param)
    monkeypatch.setattr(replay, "DEVICES", set() if mode == "plain" else {"meta"})
    monkeypatch.setattr(graphs, "DEVICES", {"meta"} if mode == "graphs" else set())  # meta tensors have one address
    monkeypatch.setattr(graphs.Graph, "__init__", lambda *_: None)  # captures nothing
    monkeypatch.setattr(graphs.Graph, "launch", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield mode
    graphs.forget()


def calls_made(function: Callable[[], object]) -> int:
    """Calls of Python functions and of C functions inside `function`."""
    count = 0

    def count_calls(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # finalizers are calls, too
    sys.setprofile(count_calls)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_work_beside_our_kernels(mode: str) -> None:
    """Operators of forward and backward, and calls of functions in a forward."""
    with noted_keys(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forward, backward = steps()
        for _ in range(4):  # the first calls import FlashAttention-4, record, and make graphs
            backward(forward())
        with Operators() as ahead:
            saved = forward()
        with Operators() as back:
            backward(saved)
        calls = calls_made(forward)
    expected = {"plain": ((0, 22), (3, 64)), "replayed": ((0, 25), (3, 48)), "graphs": ((0, 12), (0, 5))}[mode]
    assert (ahead.kernels, sum(ahead.counts.values())) == expected[0], ahead.counts
    assert (back.kernels, sum(back.counts.values())) == expected[1], back.counts
    assert calls <= {"plain": 480, "replayed": 180, "graphs": 115}[mode], calls  # Pythons differ a little


@torch.no_grad()
def test_a_further_layer_of_a_step_allocates_its_result_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary memory is the first layer's; calls of other shapes have their own."""
    from cute_kernels import decoding, support

    monkeypatch.setattr(support, "_machine_problem", lambda call, *, given=False: None)
    tokens, config = 64 << 10, NSAConfig.paper()
    table = PageTable.empty(1, tokens)
    layers = [NSACache(config, table, heads_kv=4, dim=128, dtype=torch.bfloat16) for _ in range(3)]
    shapes = (1, 1, 64, 128), (1, 1, 4, 128), (64, 3, 128)
    q, k, weight = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    with noted_keys(), table.step(1):
        decoding.plan.cache_clear()
        counted = []
        for cache in layers:
            with Operators() as operators:
                nsa_with_cache(q, k, k, cache, gate_proj_weight=weight, backend="cute")
            counted.append(operators.counts)
    decoding.plan.cache_clear()
    new = [sum(count for name, count in counts.items() if name in ("empty", "new_empty")) for counts in counted]
    assert new == [2, 1, 1], counted
    assert counted[2].total() <= 3, "the result, and the flags as numbers, which are a view"

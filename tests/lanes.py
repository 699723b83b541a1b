"""Device functions of cute_kernels run as plain Python on a CPU: one thread for each lane of a warp.

`plain` takes a class or function written for CuTe DSL and gives it back with its own source, undecorated, and Python in
place of the DSL. `Warp.run` calls such a function in all lanes. Shuffles and votes wait for all lanes, which must call
the same ones in the same order. Lanes run in no order between two `sync_warp`, and `Shared` memory raises where one of
them reads or writes what another one writes before the next.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np

LANES = 32


class Warp:
    """The lanes that run now."""

    def __init__(self) -> None:
        self.lane = threading.local()
        self.values: list[Any] = [None] * LANES
        self.barrier = threading.Barrier(LANES)
        self.epoch = 0

    def exchange(self, operation: str, value: Any) -> list[Any]:
        """The values of all lanes."""
        self.values[self.lane.index] = operation, value
        first = self.barrier.wait() == 0
        values = list(self.values)
        self.barrier.wait()
        if first and len({name for name, _ in values}) != 1:
            raise AssertionError(f"lanes diverge: {[name for name, _ in values]}")
        return [value for _, value in values]

    def sync(self) -> None:
        self.exchange("sync", None)
        if self.lane.index == 0:
            self.epoch += 1
        self.exchange("sync", None)

    def run(self, function: Callable[..., Any], *arguments: Any, each: tuple[Any, ...] = ()) -> list[Any]:
        """Call the function in all lanes. Args: `each`, further arguments, with an item for each lane."""
        results: list[Any] = [None] * LANES
        errors: list[BaseException] = []

        def call(index: int) -> None:
            self.lane.index = index
            try:
                results[index] = function(*arguments, *(values[index] for values in each))
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=call, args=(index,)) for index in range(LANES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.epoch += 1
        if errors:
            self.barrier.reset()
            raise errors[0]
        return results


WARP = Warp()


class Shared:
    """Shared or global memory. Places are any index; slices are not made."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values
        self.touched: dict[Any, list[tuple[int, int, bool]]] = {}
        self.lock = threading.Lock()

    def _touch(self, place: Any, *, write: bool) -> None:
        lane, epoch = WARP.lane.index, WARP.epoch
        with self.lock:
            now = [touch for touch in self.touched.get(place, []) if touch[0] == epoch]
            if any(other != lane and (write or wrote) for _, other, wrote in now):
                raise AssertionError(f"lanes race at {place}")
            self.touched[place] = [*now, (epoch, lane, write)]

    def __getitem__(self, place: Any) -> Any:
        self._touch(place, write=False)
        return self.values[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._touch(place, write=True)
        self.values[place] = value


class _Float32(np.float32):
    inf = np.float32(np.inf)


def _ballot(pred: Any) -> int:
    return sum(int(bool(p)) << lane for lane, p in enumerate(WARP.exchange("ballot", pred)))


STAND_INS: dict[str, Any] = {
    "Float32": _Float32,
    "Int32": int,
    "const_expr": bool,
    "range_constexpr": range,
    "cutlass": types.SimpleNamespace(
        range=lambda *bounds, unroll=1: range(*bounds), min=min, max=max, Boolean=bool, Constexpr=dict
    ),
    "cute": types.SimpleNamespace(
        ceil_div=lambda a, b: -(-a // b),
        make_rmem_tensor=lambda size, dtype: np.full(size, -77, np.float32 if dtype is _Float32 else np.int32),
        math=types.SimpleNamespace(fma=lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c))),
        arch=types.SimpleNamespace(
            lane_idx=lambda: WARP.lane.index,
            sync_warp=WARP.sync,
            popc=lambda value: (int(value) & 0xFFFFFFFF).bit_count(),
            shuffle_sync=lambda value, lane: WARP.exchange("shuffle", value)[lane],
            vote_ballot_sync=_ballot,
            vote_any_sync=lambda pred: _ballot(pred) != 0,
        ),
    ),
}


def plain(kernel: Any) -> Any:
    """A class, with its methods, or a function."""
    if isinstance(kernel, type):
        methods = {name: plain(member) for name, member in vars(kernel).items() if hasattr(member, "__wrapped__")}
        return type(kernel.__name__, (kernel,), methods)
    function = kernel.__wrapped__
    names = {name: value for name, value in function.__globals__.items() if name not in STAND_INS}
    called = {name: plain(names[name]) for name in function.__code__.co_names if _is_jitted(names.get(name))}
    namespace = {**names, **STAND_INS, **called}
    return types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)


def _is_jitted(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__")

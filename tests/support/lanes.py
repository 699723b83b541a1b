"""Device functions of cute_kernels run as plain Python on a CPU: one thread for each lane of a warp.

`plain` takes a class or function written for CuTe DSL and gives it back with its own source, undecorated, and Python in
place of the DSL. `Warp.run` calls such a function in all lanes. Shuffles and votes wait for all lanes, which must call
the same ones in the same order. Lanes run in no order between two `sync_warp`, and `Shared` memory raises where one of
them reads or writes what another one writes before the next.

`Cta` runs a whole kernel of 16-bit matrix products (mma.m16n8k16 and ldmatrix by their documented fragments, arithmetic
in fp32); copies with cp.async arrive when they are waited for. Memory there is `Memory`, which holds NaN until written.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np

LANES = 32


HERE = threading.local()
"""The thread: its lane, warp and, in a Cta, what `thread_idx` and so on give."""


class Warp:
    """Lanes that run together."""

    def __init__(self) -> None:
        self.values: list[Any] = [None] * LANES
        self.barrier = threading.Barrier(LANES)
        self.epoch = 0

    def exchange(self, operation: str, value: Any) -> list[Any]:
        """The values of all lanes."""
        self.values[HERE.lane] = operation, value
        first = self.barrier.wait() == 0
        values = list(self.values)
        self.barrier.wait()
        if first and len({name for name, _ in values}) != 1:
            raise AssertionError(f"lanes diverge: {[name for name, _ in values]}")
        return [value for _, value in values]

    def sync(self) -> None:
        self.exchange("sync", None)
        if HERE.lane == 0:
            self.epoch += 1
        self.exchange("sync", None)

    def run(self, function: Callable[..., Any], *arguments: Any, each: tuple[Any, ...] = ()) -> list[Any]:
        """Call the function in all lanes. Args: `each`, further arguments, with an item for each lane."""
        results: list[Any] = [None] * LANES
        errors: list[BaseException] = []

        def call(index: int) -> None:
            HERE.lane, HERE.warp = index, self
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
        lane, epoch = HERE.lane, HERE.warp.epoch
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
    return sum(int(bool(p)) << lane for lane, p in enumerate(HERE.warp.exchange("ballot", pred)))


STAND_INS: dict[str, Any] = {
    "Float32": _Float32,
    "Int32": int,
    "const_expr": lambda value: value,
    "range_constexpr": range,
    "cutlass": types.SimpleNamespace(
        range=lambda *bounds, unroll=1: range(*bounds), min=min, max=max, Boolean=bool, Constexpr=dict
    ),
    "cute": types.SimpleNamespace(
        ceil_div=lambda a, b: -(-a // b),
        make_rmem_tensor=lambda size, dtype: np.full(size, -77, np.float32 if dtype is _Float32 else np.int32),
        math=types.SimpleNamespace(fma=lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c))),
        arch=types.SimpleNamespace(
            lane_idx=lambda: HERE.lane,
            sync_warp=lambda: HERE.warp.sync(),
            popc=lambda value: (int(value) & 0xFFFFFFFF).bit_count(),
            shuffle_sync=lambda value, lane: HERE.warp.exchange("shuffle", value)[lane],
            shuffle_sync_bfly=lambda value, mask: HERE.warp.exchange("butterfly", value)[HERE.lane ^ mask],
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
    code = getattr(function, "_original_code", function.__code__)  # the DSL replaces it when it compiles
    called = {name: plain(names[name]) for name in code.co_names if _is_jitted(names.get(name))}
    namespace = {**names, **STAND_INS, **called}
    return types.FunctionType(code, namespace, function.__name__, function.__defaults__)


def _is_jitted(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__")


# A whole CTA


class Memory:
    """A tensor in shared or global memory, or a part of one."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def _index(self, places: Any) -> Any:
        places = places if isinstance(places, tuple) else (places,)
        if any(place is not None and not 0 <= place < size for place, size in zip(places, self.shape, strict=True)):
            raise AssertionError(f"{places} is not in {self.shape}")
        return tuple(slice(None) if place is None else place for place in places)

    def __getitem__(self, places: Any) -> Any:
        found = self.values[self._index(places)]
        return Memory(found) if isinstance(found, np.ndarray) else found

    def __setitem__(self, places: Any, value: Any) -> None:
        self.values[self._index(places)] = value


class _Fragment:
    """The rows of a left or right operand that a thread's warp multiplies, `[rows, D]`; any index chooses columns."""

    rows: np.ndarray[Any, Any]

    def __getitem__(self, place: Any) -> Any:
        return self if place[1] == 0 else self.rows[:, 16 * place[2] : 16 * place[2] + 16]


class _Source:
    """Shared memory `[rows, D]` or `[rows, D, copies]` that ldmatrix reads."""

    def __init__(self, memory: Memory, part: int | None = None, copy: int | None = None) -> None:
        self.memory, self.part, self.copy = memory, part, copy

    def __getitem__(self, place: Any) -> _Source:
        return _Source(self.memory, place[1], place[3])


class Mma:
    """A TiledMma of warps along the rows, then along the columns, as one thread sees it."""

    def __init__(self, row_warps: int, column_warps: int) -> None:
        self.row_warps, self.column_warps = row_warps, column_warps

    def get_slice(self, thread: int) -> Mma:
        assert thread == HERE.thread
        return self

    def partition_C(self, shape: tuple[int, int]) -> list[tuple[int, int]]:
        warp, lane = HERE.thread // LANES, HERE.thread % LANES
        row = 16 * (warp % self.row_warps) + lane // 4
        column = 8 * (warp // self.row_warps) + lane % 4 * 2
        count = shape[0] // self.row_warps // 16 * 4
        return [(row + 8 * (i // 2 % 2) + 16 * self.row_warps * (i // 4), column + i % 2) for i in range(count)]

    def partition_shape_C(self, shape: tuple[int, int]) -> int:
        return len(self.partition_C(shape))

    def partition_shape_A(self, shape: tuple[int, int]) -> None: ...
    def partition_shape_B(self, shape: tuple[int, int]) -> None: ...

    def make_fragment_A(self, shape: None) -> _Fragment:
        return _Fragment()

    make_fragment_B = make_fragment_A

    # As a tiled copy
    def partition_S(self, memory: Memory) -> _Source:
        return _Source(memory)

    def retile(self, fragment: _Fragment) -> _Fragment:
        return fragment


def _copy(atom: Any, source: Any, destination: Any) -> None:
    if isinstance(atom, Mma):
        memory = source.memory.values
        if source.copy is not None:
            rows = 8 * atom.column_warps
            memory = memory[source.part * rows : (source.part + 1) * rows, :, source.copy]
        destination.rows = memory.copy()
    else:
        assert source.shape == destination.shape == (8,)
        HERE.pending.append((source.values.copy(), destination.values))


def _gemm(mma: Mma, d: Any, a: Any, b: Any, c: Any) -> None:
    rows, columns = np.array(mma.partition_C((len(a), len(b)))).T
    d[:] = c + (a[rows] * b[columns]).sum(1, dtype=np.float32)


def _wait(_: int) -> None:
    for values, place in HERE.pending:
        place[:] = values
    HERE.pending.clear()


class _Allocator:
    def allocate_tensor(self, dtype: Any, shape: Any, alignment: int) -> Memory:
        """The same memory in all threads, which allocate in the same order."""
        HERE.allocated += 1
        with HERE.cta.lock:
            if len(HERE.cta.memory) < HERE.allocated:
                integer = dtype is int
                HERE.cta.memory.append(
                    Memory(np.full(shape, -9 if integer else np.nan, int if integer else np.float32))
                )
            return HERE.cta.memory[HERE.allocated - 1]


class _NamedBarrier:
    """Threads arrive, and some of them wait until as many have arrived as were expected."""

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.phase, self.broken = 0, False
        self.condition = threading.Condition()

    def arrive(self, expected: int, *, wait: bool) -> None:
        with self.condition:
            phase = self.phase
            assert HERE.thread not in self.arrived, "a thread arrives twice before all have"
            self.arrived.add(HERE.thread)
            if len(self.arrived) == expected:
                self.arrived.clear()
                self.phase = phase + 1
                self.condition.notify_all()
            elif wait:
                self.condition.wait_for(lambda: self.phase > phase or self.broken)
            if self.broken:
                raise threading.BrokenBarrierError

    def abort(self) -> None:
        with self.condition:
            self.broken = True
            self.condition.notify_all()


class Cta:
    """Args: threads; number of this CTA, and of all."""

    def __init__(self, threads: int, index: int, count: int) -> None:
        self.threads, self.index, self.count = threads, index, count
        self.warps = [Warp() for _ in range(threads // LANES)]
        self.barrier = threading.Barrier(threads)
        self.named = [_NamedBarrier() for _ in range(16)]
        self.lock = threading.Lock()
        self.memory: list[Memory] = []

    def run(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        errors: list[BaseException] = []

        def call(thread: int) -> None:
            HERE.cta, HERE.thread, HERE.lane, HERE.warp = self, thread, thread % LANES, self.warps[thread // LANES]
            HERE.pending, HERE.allocated = [], 0
            try:
                kernel(*arguments)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                for barrier in (self.barrier, *self.named, *(warp.barrier for warp in self.warps)):
                    barrier.abort()

        threads = [threading.Thread(target=call, args=(thread,)) for thread in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def _domain_offset(offset: tuple[int, ...], memory: Memory) -> Memory:
    return Memory(memory.values[tuple(slice(first, None) for first in offset)])


vars(STAND_INS["cutlass"])["memory"] = types.SimpleNamespace(SmemAllocator=_Allocator)
vars(STAND_INS["cute"]).update(
    copy=_copy,
    gemm=_gemm,
    size=len,
    domain_offset=_domain_offset,
    local_tile=lambda memory, size, at: Memory(memory.values[at[0] * size[0] : (at[0] + 1) * size[0]]),
    make_layout=lambda shape, stride: shape,
    make_identity_tensor=lambda shape: shape,
    make_copy_atom=lambda *_, **__: None,
    make_tiled_copy_A=lambda atom, mma: mma,
    make_tiled_copy_B=lambda atom, mma: mma,
)
vars(STAND_INS["cute"].math)["exp2"] = lambda x, fastmath: np.exp2(np.float32(x))
vars(STAND_INS["cute"].arch).update(
    thread_idx=lambda: (HERE.thread, 0, 0),
    block_idx=lambda: (HERE.cta.index, 0, 0),
    grid_dim=lambda: (HERE.cta.count, 1, 1),
    warp_idx=lambda: HERE.thread // LANES,
    make_warp_uniform=lambda x: x,
    sync_threads=lambda: HERE.cta.barrier.wait(),
    barrier=lambda barrier_id, number_of_threads: HERE.cta.named[barrier_id].arrive(number_of_threads, wait=True),
    barrier_arrive=lambda barrier_id, number_of_threads: HERE.cta.named[barrier_id].arrive(
        number_of_threads, wait=False
    ),
    setmaxregister_increase=lambda _: None,
    setmaxregister_decrease=lambda _: None,
    cp_async_commit_group=lambda: None,
    cp_async_wait_group=_wait,
)

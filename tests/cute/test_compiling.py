"""Kernels that several threads ask for at once: each is compiled once, by one thread at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cute_kernels.runtime import jit
from cute_kernels.runtime.compiling import COMPILING, once

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported

THREADS = 8


def as_kernels(build: Callable[[int], object]) -> Callable[[int], object]:
    """As kernels are compiled."""
    kernel = jit.compiled_once(build)
    return lambda number: kernel(number).compiled


EITHER = pytest.mark.parametrize("remember", [once, as_kernels])


def at_once(function: Callable[[int], object]) -> list[object]:
    """What as many threads get that begin together."""
    start = threading.Barrier(THREADS)

    def work(number: int) -> object:
        start.wait()
        return function(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS)))


@EITHER
def test_one_thread_builds_for_all(remember: Any) -> None:
    running, built = threading.Lock(), []

    @remember
    def build(kind: int) -> object:
        assert running.acquire(blocking=False), "two threads build at once"
        time.sleep(0.01)
        built.append(kind)
        running.release()
        return object()

    results = at_once(lambda number: build(number % 2))
    assert sorted(built) == [0, 1]
    assert len(set(results)) == 2
    assert results[::2] == [build(0)] * (THREADS // 2)


@EITHER
def test_a_failure_is_not_remembered(remember: Any) -> None:
    fails = iter([True, False])

    @remember
    def build(number: int) -> int:
        if next(fails):
            raise ValueError("does not compile")
        return number

    with pytest.raises(ValueError, match="does not compile"):
        build(3)
    assert [build(3), build(3)] == [3, 3]


def test_a_build_may_need_others() -> None:
    @once
    def inner(number: int) -> int:
        return number

    @once
    def outer() -> list[int]:
        return [inner(1), inner(2)]

    assert outer() == [1, 2]


def test_what_is_known_takes_no_lock() -> None:
    @once
    def build(number: int) -> int:
        return number

    build(1)
    with COMPILING, ThreadPoolExecutor(1) as pool:
        assert pool.submit(build, 1).result(timeout=10) == 1


def test_a_forked_child_can_compile() -> None:
    """Also while another thread compiles, whose lock the child would have for good."""

    @once
    def build(number: int) -> int:
        return number

    compiling = threading.Event()

    def compile_for_a_while() -> None:
        with COMPILING:
            compiling.set()
            time.sleep(0.2)

    thread = threading.Thread(target=compile_for_a_while)
    thread.start()
    compiling.wait()
    child = os.fork()
    if child == 0:  # a thread of its own, so that a lock that is held shows
        other = threading.Thread(target=build, args=(1,), daemon=True)
        other.start()
        other.join(timeout=10)
        os._exit(other.is_alive())
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert build(2) == 2

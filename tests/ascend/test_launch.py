"""Launching: what is recorded, what runs, and from which threads; calls without launches; Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from ascend_kernels.launch import Launch, launch, only_recording, recording
from nsa import attention_residual, neighborhood_attention
from tests.support.helpers import ROOT, in_threads


class Kernel:
    """Stands in for a `@triton.jit` function: remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **given: self.calls.append((grid, given))


def test_launches_run_and_are_recorded_as_asked() -> None:
    kernel, x = Kernel(), torch.ones(3)

    def call() -> None:
        launch(kernel, (2, 1), {"p_x": x, "n": 3}, {"SIZE": 4}, num_warps=8)

    call()
    with recording(run=True) as run:
        call()
    with recording(run=False) as only:
        call()
    assert kernel.calls == [((2, 1), {"p_x": x, "n": 3, "SIZE": 4, "num_warps": 8})] * 2
    assert run == only == [Launch(kernel, (2, 1), {"p_x": x, "n": 3}, {"SIZE": 4}, {"num_warps": 8})]
    assert only[0].arguments["p_x"] is x


def test_recordings_nest() -> None:
    """Each sees what is launched within it; nothing runs while one of them only records."""
    kernel, x = Kernel(), torch.zeros(1)
    with recording(run=True) as outer:
        launch(kernel, (2,), {"p_x": x}, {})
        with recording(run=False) as inner:
            assert only_recording()
            launch(kernel, (3,), {"p_x": x}, {})
    assert not only_recording()
    assert [grid for grid, _ in kernel.calls] == [(2,)]
    assert [one.grid for one in outer] == [(2,), (3,)]
    assert inner == outer[1:]


def test_launches_of_other_threads_are_recorded() -> None:
    """Autograd runs backward on a device in a thread of its own."""
    kernel = Kernel()
    with recording(run=False) as launches:
        thread = threading.Thread(target=launch, args=(kernel, (1,), {"p_x": torch.zeros(1)}, {}))
        thread.start()
        thread.join()
    assert [one.grid for one in launches] == [(1,)]
    assert kernel.calls == []


def test_one_launch_at_a_time() -> None:
    """Triton's first launch compiles and loads a kernel, which a second thread would find half done."""
    running, overlapped, start = threading.Lock(), [], threading.Barrier(4)

    class Slow(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(**_: Any) -> None:
                alone = running.acquire(blocking=False)
                overlapped.append(not alone)
                time.sleep(0.02)
                if alone:
                    running.release()

            return run

    def work(_: int) -> None:
        start.wait()
        launch(Slow(), (1,), {"p_x": torch.zeros(1)}, {})

    in_threads(4, work)
    assert overlapped == [False] * 4


@pytest.mark.parametrize("algorithm", ["flash", "band", "residual"])
def test_no_tokens(algorithm: str) -> None:
    """Second derivatives are refused, also where the gradient needs none: else a penalty on it would count nothing."""
    with recording(run=False):
        if algorithm == "residual":
            leaves = [torch.empty(shape, requires_grad=True) for shape in ((3, 1, 0, 8), (8,), (8,))]
            out = attention_residual(*leaves, backend="triton")
        else:
            leaves = [torch.empty(1, 0, h, 16, requires_grad=True) for h in (4, 2, 2)]
            out = neighborhood_attention(*leaves, algorithm=algorithm, backend="ascend")
        gradients = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="has no second derivative"):
            gradients[0].square().sum().backward()
    assert out.shape == (leaves[0].shape[1:] if algorithm == "residual" else leaves[0].shape)
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.interpreted
def test_interpreted() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ascend/interpreted.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

"""Every CUDA kernel of ours with offsets past 2^31 elements, forward and backward: the same results as without.

Cases are those of tests/support/gpu_calls.py. Compact results are held against fp64, far ones against the compact ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.decode.cache import LengthTensors, Pages
from cute_kernels.decode.gather import gather_pages
from cute_kernels.decode.tile_sums import keep_sums, sum_queries
from cute_kernels.decoding import decode
from nsa import NSAConfig
from tests.support import gpu_calls
from tests.support.compile_keys import meta_gpu
from tests.support.cute_cases import assert_same
from tests.support.far_rows import FAR, FarMemory, span
from tests.support.hardware import DETERMINISTIC
from tests.support.kernel_classes import every_form
from tools.sanitize import leave_fa4_out

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported and while it compiles


@dataclass(frozen=True)
class Decoding:
    """A step over pages that lie far apart; on a GPU its compact results are held against fp64 in test_decode.py."""

    config: NSAConfig
    cached: tuple[int, ...]
    queries: int
    deterministic = True

    def run(self, device: str, *, check: bool, place: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return place(torch.randn(shape, generator=generator).to(device, torch.bfloat16))

        def integers(x: Any) -> Tensor:
            return torch.tensor(x, dtype=torch.int32, device=device)

        batch, columns = len(self.cached), -(-(max(self.cached) + self.queries) // 64)
        pages = [normal(batch * columns, slots, 2, 64) for slots in (64, 64, 64 // self.config.stride)]
        memory = Pages(*pages, normal(*pages[2].shape), integers(range(batch * columns)).view(batch, columns))
        overflowed = torch.zeros(batch, dtype=torch.bool, device=device)
        lengths = LengthTensors(integers(self.cached), integers([self.queries] * batch), overflowed)
        q, k, v = (normal(batch, self.queries, heads, 64) for heads in (8, 2, 2))
        results = {"pages of k": memory.k, "pages of v": memory.v, "entries": memory.k_cmp}
        rows, tile = None, self.config.q_tile_size
        if not self.config.token_mode:
            kept = results["sums"] = place(torch.zeros((batch, tile, 8, 64), device=device))
            rows, sums = sum_queries(q, kept, lengths, tile)
        out = decode(q, k, v, memory, lengths, self.config, rows=rows, gates=normal(batch, self.queries, 8, 3))
        if rows is not None:
            keep_sums(sums, kept, lengths, tile)
        if check and not bool(out.isfinite().all()):
            raise ArithmeticError("not finite")
        return {"out": out, **results}


@dataclass(frozen=True)
class Gathering:
    """Keys and values of two sequences out of pages that lie far apart."""

    deterministic = True

    def run(self, device: str, *, check: bool, place: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        pages = [place(torch.randn((5, 64, 2, 64), generator=generator).to(device, torch.bfloat16)) for _ in range(2)]
        table = torch.tensor([[4, 0, -1], [1, 3, 2]], dtype=torch.int32, device=device)
        places = torch.tensor([[0, 100, 250], [0, 10, 0], [100, 150, 0]], dtype=torch.int32, device=device)
        got = gather_pages(*pages, table, places, 250)
        for x, of in zip(got, pages, strict=True) if check else ():
            whole = [of[row[row >= 0].long()].flatten(0, 1) for row in table]
            assert torch.equal(x[0], torch.cat([whole[0][:100], whole[1][10:160]]))
        return dict(zip(("k", "v"), got, strict=True))


CASES: dict[str, gpu_calls.Case | gpu_calls.GivenBlocks | Decoding | Gathering] = {
    **{name: x for name, x in gpu_calls.CASES.items() if isinstance(x, (gpu_calls.Case, gpu_calls.GivenBlocks))},
    "gathering": Gathering(),
    "decoding": Decoding(NSAConfig.paper(num_selected_blocks=6, window_size=200), (0, 31, 1300), queries=2),
    "decoding, tiles": Decoding(gpu_calls.TILES, (0, 31, 1300), queries=2),
}
MOST_BYTES = 24 << 30


@pytest.fixture(scope="module")
def grid() -> FarMemory:
    return FarMemory("cuda")


@pytest.fixture
def far(grid: FarMemory, monkeypatch: pytest.MonkeyPatch) -> FarMemory:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # the grid, again and again
    torch.cuda.reset_peak_memory_stats()
    grid.clear()
    return grid


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=DETERMINISTIC if isinstance(case, gpu_calls.Case) and case.deterministic else ())
        for name, case in CASES.items()
    ],
)
def test_rows_behind_two_billion_elements(name: str, far: FarMemory) -> None:
    case = CASES[name]
    expected = case.run("cuda", check=True)
    with far.allocations():
        got = case.run("cuda", check=False, place=far.put)
    assert set(got) == set(expected)
    for of, x in got.items():
        assert_same(x, expected[of], of, exact=case.deterministic or of.startswith("out"))
    assert torch.cuda.max_memory_allocated() <= MOST_BYTES


# Without a GPU: that every kernel would be given such offsets


@pytest.fixture
def far_arguments(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """By class with a kernel: elements that its arguments span, at most. Nothing is compiled."""
    from cute_kernels.fa4 import interface as fa4

    spans: dict[str, int] = {}

    def noting(name: str) -> Any:
        def run(*arguments: Any) -> None:
            tensors = [x for x in arguments if isinstance(x, Tensor) and x.numel() > 0]
            spans[name] = max([spans.get(name, 0), *map(span, tensors)])

        return lambda *_, **__: SimpleNamespace(run=run, compile_ahead=lambda: None)

    for name in kernels():
        monkeypatch.setattr(f"cute_kernels.{name}.compile", noting(name))
    monkeypatch.setattr(fa4, "attend", fa4.attend)  # put back what the tool replaces
    monkeypatch.setattr(fa4, "differentiate", fa4.differentiate)
    leave_fa4_out()
    with meta_gpu():
        yield spans


def kernels() -> set[str]:
    return {form.partition(" ")[0] for form in every_form()}


@pytest.mark.cuda_extra
def test_every_kernel_is_given_far_rows(far_arguments: dict[str, int]) -> None:
    memory = FarMemory("meta")
    for case in CASES.values():
        memory.clear()
        with memory.allocations():
            case.run("meta", check=False, place=memory.put)
    assert set(far_arguments) == kernels()
    near = {name for name, most in far_arguments.items() if most <= FAR}
    assert near == {"decode.choose.ChooseBlocks"}, "it works on temporary memory alone, parts of one allocation"

"""FlashAttention-4's kernels, as fa4/kernels.py compiles and fa4/interface.py launches them, against FA4's interface.

    arguments and keys     FA4's interface is called with tensors that have no data, and caches that claim to hold every
                           kernel: ours are given the same, and calls that share one of ours share one of FA4's
    machine code           FA4's interface compiles for tensors of an absent GPU: ours is the same, bit for bit

So another version of FA4 that chooses or launches otherwise is noticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4.masks import Mask
from cute_kernels.fa4.rules import NARROW, ONE_TILE, WINDOW_TILE, packs_gqa, window_tile_n
from cute_kernels.lists.query_to_kv import BlockLists
from cute_kernels.runtime.device import compute_capability, multiprocessors
from cute_kernels.runtime.launches import launches_of
from tests.support import cases, kernel_calls
from tests.support.compile_keys import meta_gpu
from tests.support.helpers import run_child

pytestmark = [pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]

STAGES = {
    "_flash_attn_fwd": "forward",
    "_bwd_preprocess": "preprocess",
    "_flash_attn_bwd": "backward",
    "_bwd_postprocess_convert": "round_sums",
    "_compute_tile_cumsum": "count_tiles",
}
"""Functions of FA4's interface that compile: ours."""
UNIMPORTANT = {
    ("_flash_attn_fwd", 90): slice(-9, -8),  # of sm_100's kernel: whether it is persistent
    ("_flash_attn_bwd", 90): slice(-3, -1),  # whether all rows or keys are one tile, which guards checks of strides
    ("_flash_attn_bwd", 100): slice(-5, -3),
}
"""Parts of FA4's keys, by function and architecture, that change no machine code."""
ARCHS = {90: ("sm_90a", "132"), 100: ("sm_100a", "148")}
"""By FA4's number of an architecture: CuTe DSL's name, and how many multiprocessors such a GPU has."""


class Launched(NamedTuple):
    stage: str
    key: Any
    arguments: tuple[Any, ...]


def shown(x: Any) -> Any:
    """An argument as far as it can be told without data: of a tensor its type, shape and strides."""
    if isinstance(x, Tensor):
        return x.dtype, tuple(x.shape), x.stride()
    if isinstance(x, (tuple, list)):
        return tuple(map(shown, x))
    return getattr(x, "value", x)


class Cache:
    """Of compiled kernels: holds all of them, and notes which were asked for and what they were given."""

    def __init__(self, function: str, arch: int, log: list[Launched]) -> None:
        self.stage, self.log = STAGES[function], log
        self.unimportant = UNIMPORTANT.get((function, arch), slice(0, 0))

    def __contains__(self, key: Any) -> bool:
        return True

    def __getitem__(self, key: Any) -> Callable[..., None]:
        parts = list(key)
        del parts[self.unimportant]
        return lambda *given: self.log.append(Launched(self.stage, tuple(parts), shown(given)))


@pytest.fixture(params=ARCHS, ids=lambda arch: f"sm_{arch}")
def by_fa4(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """What FA4's interface launches, as on a GPU of an architecture."""
    from flash_attn.cute import interface

    log: list[Launched] = []
    for function in STAGES:
        monkeypatch.setattr(getattr(interface, function), "compile_cache", Cache(function, request.param, log))
    monkeypatch.setattr(interface, "_get_device_arch", lambda: request.param)
    monkeypatch.setattr(interface, "USE_BLOCKS_TO_BATCH", False)  # tables of documents are enough
    monkeypatch.setattr(Tensor, "is_cuda", True)  # as FA4 wants it, also of meta tensors
    with meta_gpu(*ARCHS[request.param]):
        yield log


# Calls of FA4's interface with what fa4/interface.py is given


def options_of(mask: Mask) -> dict[str, Any]:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    lists, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k) = mask.lists, mask.bounds()
    sparse = None
    if lists is not None:
        sparse = BlockSparseTensorsTorch(*lists.tensors, block_size=(lists.rows, lists.width))
    return {
        "causal": mask.causal,
        "window_size_left": mask.window[0],
        "window_size_right": mask.window[1],
        "mask_mod": None if mask.mask_mod is None else mask.mask_mod.make(*mask.mask_mod.constants),
        "aux_tensors": mask.tensors,
        "aux_scalars": mask.aux().scalars,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "block_sparse_tensors": sparse,
    }


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, lse: bool, into: Any = None) -> Any:
    from flash_attn.cute.interface import _flash_attn_fwd

    window_tiles = into is None and mask.window != (None, None) and packs_gqa(q, k)
    options = {"pack_gqa": window_tiles and mask.documents is None, **options_of(mask)}
    if into is not None:
        options |= {"out": into[0], "lse": into[1]}
    if window_tiles and window_tile_n(q, k, v) == WINDOW_TILE[1]:
        options["tile_mn"] = WINDOW_TILE
    elif mask.lists is not None and mask.lists.width == NARROW and compute_capability(0)[0] == 10:
        options["tile_mn"] = ONE_TILE, NARROW
    return _flash_attn_fwd(q, k, v, softmax_scale=scale, return_lse=lse, **options)[:2]


def differentiate(
    given: fa4.Gradients, mask: Mask, *, scale: float, deterministic: bool = False, statistics: Any = None
) -> None:
    from flash_attn.cute import interface
    from flash_attn.cute.interface import BwdConfig, _flash_attn_bwd

    narrow_tiles = BwdConfig(
        m_block_size=128,
        n_block_size=NARROW,
        num_stages_Q=2,
        num_stages_dO=1,
        num_stages_PdS=1,
        SdP_swapAB=False,
        dKV_swapAB=False,
        dQ_swapAB=False,
        AtomLayoutMSdP=2,
        AtomLayoutNdKV=1,
        AtomLayoutMdQ=2,
    )  # which FA4 itself takes for the widest heads only
    with pytest.MonkeyPatch.context() as patch:
        if mask.lists is not None and mask.lists.width == NARROW:
            patch.setattr(interface, "_tile_size_bwd_sm90", lambda *_, **__: narrow_tiles)
        results = {name: getattr(given, name) for name in ("dq", "dk", "dv")}
        inputs = given.q, given.k, given.v, given.o, given.do, given.lse
        _flash_attn_bwd(*inputs, softmax_scale=scale, deterministic=deterministic, **results, **options_of(mask))


def expanded(name: str) -> None:
    """Windows forward and backward, where all sequences of a tensor are one."""
    q, k, v = kernel_calls.heads_of((2, 300), (2, 300), 2, (64, 64), torch.bfloat16)
    given = {"q": q, "k": k, "v": v, "o": torch.empty_like(q), "do": torch.empty_like(q)}
    given[name] = given[name][:1].expand_as(given[name])
    _, lse = fa4.window(given["q"], given["k"], given["v"], left=100, right=0, scale=0.1)
    gradients = fa4.Gradients(**given, lse=lse, **{f"d{x}": torch.empty_like(given[x]) for x in "qkv"})
    fa4.window_backward(gradients, left=100, right=0, scale=0.1)


def called() -> Iterator[Callable[[], None]]:
    """Calls with every option, some of them with every length."""
    for sizes in itertools.product(kernel_calls.DIMS, (1, 4, 16), kernel_calls.DTYPES):
        yield from kernel_calls.calls(*sizes)
    how: dict[str, Any] = {"dim": 64, "group": 4, "dtype": torch.float16}
    options: list[dict[str, Any]] = [{}, {"documents": 3}, {"causal": False}, kernel_calls.ENTRIES]
    for tokens in (1, 60, 128, 129, 256, 257, 300, 1024):
        for more in options:
            yield partial(kernel_calls.nsa, kernel_calls.TILES, **how, **{**more, "tokens": tokens})
        for more in options[:2]:
            yield partial(kernel_calls.nsa, kernel_calls.PAPER, **how, **more, tokens=tokens)
        if tokens % 100 == 0:
            yield partial(kernel_calls.nsa, kernel_calls.TILES, **how, tokens=tokens, batch=3)
    yield from (partial(expanded, name) for name in ("q", "k", "v", "do"))


def test_arguments_and_keys(by_fa4: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of kernels; calls that share our kernels share FA4's."""
    known: dict[str, Any] = {}
    stages: set[str] = set()

    def beside(theirs: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **how: Any) -> Any:
            both = [x.to_one_dim() if isinstance(x, fa4.Gradients) and x.q.shape != x.o.shape else x for x in given]
            by_fa4.clear()
            theirs(*both, **how)
            ours = launches_of(lambda: own(*both, **{name: x for name, x in how.items() if name != "statistics"}))
            if len(by_fa4) > 2 and by_fa4[-2].stage == "count_tiles":  # which FA4 counts for dk and for dv
                del by_fa4[-2]
            if how.get("statistics") is not None:  # in place of the preprocess
                del by_fa4[0], ours[0]
            arguments = [(x.kernel.build.__name__, shown(x.arguments)) for x in ours]
            assert arguments == [(x.stage, x.arguments) for x in by_fa4]
            for launched, x in zip(by_fa4, ours, strict=True):
                stages.add(launched.stage)
                assert known.setdefault(x.kernel.name, launched.key) == launched.key
            return own(*given, **how)

        return run

    monkeypatch.setattr(fa4, "attend", beside(attend, fa4.attend))
    monkeypatch.setattr(fa4, "differentiate", beside(differentiate, fa4.differentiate))
    for call in called():
        launches_of(call)
    assert stages == {*STAGES.values()}
    assert len({*known.values()}) > 100


# Machine code

CODE = """
import hashlib, os, warnings
from cute_kernels.runtime.launches import launches_of
from tests.cute import test_fa4_kernels as by_fa4
from tests.support import kernel_calls
from tools import compile_all

warnings.simplefilter("ignore")
wanted, (dim, group) = os.environ["CALLS"], map(int, os.environ["SIZES"].split())
calls = kernel_calls.calls(dim, group, kernel_calls.VARIED[dim])
with by_fa4.compiled_by_fa4() as theirs:
    launched = [x.kernel for call in calls if wanted in call.func.__name__ for x in launches_of(call)]
ours = {x for x in launched if getattr(x, "build", by_fa4).__module__ == "cute_kernels.fa4.kernels"}
hashes = [{hashlib.sha256(compile_all.code_of(x)).hexdigest() for x in cubins} for cubins in (
    [x.compiled.__cubin__ for x in ours], theirs
)]
print(len(ours), len(hashes[0] - hashes[1]), *{x.build.__name__ for x in ours})
"""


@contextmanager
def compiled_by_fa4() -> Iterator[list[bytes]]:
    """Cubins of what calls of fa4/interface.py make FA4's interface compile. The calls themselves run, too."""
    import cutlass.utils
    from flash_attn.cute import interface, tile_scheduler
    from torch._subclasses.fake_tensor import FakeTensorMode

    class HardwareInfo:
        def get_device_multiprocessor_count(self) -> int:
            return multiprocessors(torch.device("meta"))

    cubins: list[bytes] = []

    class Kernels(dict[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            return lambda *_: None

        def __setitem__(self, key: Any, kernel: Any) -> None:
            super().__setitem__(key, None)
            cubins.append(kernel.__cubin__)

    def on_gpu(call: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **how: Any) -> Any:
            with FakeTensorMode():

                def like(x: Any) -> Any:
                    if isinstance(x, Tensor):
                        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
                    if isinstance(x, (tuple, list)):
                        return type(x)(*map(like, x)) if hasattr(x, "_fields") else type(x)(map(like, x))
                    if isinstance(x, (fa4.Gradients, BlockLists)):
                        return replace(x, **{name: like(y) for name, y in vars(x).items()})
                    return x

                call(*map(like, arguments), **{n: like(x) for n, x in how.items()})
            return own(*arguments, **how)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for function in STAGES:
            patch.setattr(getattr(interface, function), "compile_cache", Kernels())
        patch.setattr(interface, "is_fake_mode", lambda: True)
        patch.setattr(cutlass.utils, "HardwareInfo", HardwareInfo)
        patch.setattr(tile_scheduler, "HardwareInfo", HardwareInfo)
        patch.setattr(fa4, "attend", on_gpu(attend, fa4.attend))
        patch.setattr(fa4, "differentiate", on_gpu(differentiate, fa4.differentiate))
        yield cubins


FEW = ("sm_90a", "64 4", "neighborhoods")
EVERY = [(arch, sizes, "") for arch in ("sm_90a", "sm_100a") for sizes in ("64 8", "128 8", "128 1")]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "sizes", "calls"), [FEW, *cases.rest(*EVERY)])
def test_machine_code(arch: str, sizes: str, calls: str, tmp_path: Path) -> None:
    """One call, or all of tests/support/kernel_calls.py. Args: sizes: D and G. calls: a function's name, "": all."""
    from tools.compile_all import child_environment

    environment = {**child_environment(arch, str(tmp_path)), "CALLS": calls, "SIZES": sizes}
    count, different, *stages = run_child(CODE, environment).split()
    assert {"forward", "preprocess", "backward", "round_sums"} <= set(stages)
    assert int(count) > 4
    assert different == "0"

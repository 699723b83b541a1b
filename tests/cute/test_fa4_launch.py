"""Calls that go straight to a kernel that FA4 compiled (launch.py), against FA4's own keys, without compiling.

FA4's interface is called with tensors that have no data, and a cache that claims to hold every kernel it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels.runtime.device import TARGET_VARIABLE, compute_capability

pytestmark = [pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]


class Cache:
    """Of compiled kernels: holds all of them, and remembers which one was asked for last."""

    def __init__(self) -> None:
        self.asked: Any = None

    def __contains__(self, key: Any) -> bool:
        self.asked = key
        return True

    def __getitem__(self, key: Any) -> Callable[..., None]:
        return lambda *_: None


class Kernels(NamedTuple):
    signature: Any
    """Ours; None: every call takes FA4's own way."""
    keys: tuple[Any, ...]
    """FA4's, of each of its functions that compile."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kernels]]:
    """Which kernels a call takes on sm_90. Args: `backward`; what is changed of the plain call."""
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cute_kernels.fa4 import launch

    caches = []
    for name in ("_flash_attn_fwd", "_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert"):
        caches.append(Cache())
        monkeypatch.setattr(getattr(interface, name), "compile_cache", caches[-1])
    monkeypatch.setattr(interface, "_get_device_arch", lambda: 90)
    monkeypatch.setenv(TARGET_VARIABLE, "sm_90a")
    monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", "132")
    compute_capability.cache_clear()
    signatures = []
    real = launch._signature

    def spy(*arguments: Any) -> Any:
        signatures.append(real(*arguments))
        return signatures[-1]

    monkeypatch.setattr(launch, "_signature", spy)

    def of(backward: bool, **changes: Any) -> Kernels:
        for cache in caches:
            cache.asked = None
        with FakeTensorMode():
            (differentiate if backward else attend)(Call(**changes))
        return Kernels(signatures[-1], tuple(cache.asked for cache in caches))

    yield of
    compute_capability.cache_clear()


def everything(batch: Any, head: Any, row: Any, key: Any, info: Any, aux: Any) -> Any:
    return key <= row


def nothing_behind(batch: Any, head: Any, row: Any, key: Any, info: Any, aux: Any) -> Any:
    return key < row


class Call(NamedTuple):
    batch: int = 2
    rows: int = 1024
    keys: int = 1024
    heads: int = 4
    kv_heads: int = 2
    dim: int = 128
    v_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    expanded: str = ""
    """Of these of q, k, v and do all batches are one."""
    seen: dict[str, Any] = {}  # noqa: RUF012
    lists: tuple[int, int] | None = None
    """Rows and keys of listed tiles."""
    one_list: bool = False
    """For all heads."""
    documents: int | None = None
    tables: int | None = None
    """Dimensions of a tensor for the mask."""
    lse: bool = True
    into: bool = False
    """Results are written to memory of the caller."""
    scale: float = 0.1

    def tensor(self, name: str, tokens: int, heads: int, dim: int) -> Tensor:
        batch = () if self.documents else (1 if name in self.expanded else self.batch,)
        made = torch.empty((*batch, tokens, heads, dim), dtype=self.dtype, device="cuda")
        return made.expand(self.batch, -1, -1, -1) if name in self.expanded else made

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.tensor("q", self.rows, self.heads, self.dim),
            self.tensor("k", self.keys, self.kv_heads, self.dim),
            self.tensor("v", self.keys, self.kv_heads, self.v_dim),
        )

    def visible(self, backward: bool) -> Any:
        from cute_kernels.fa4.launch import Mask
        from cute_kernels.lists.query_to_kv import BlockLists
        from cute_kernels.pool.documents import Varlen

        def int32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device="cuda")

        more: dict[str, Any] = {}
        if self.lists is not None:
            rows, width = self.lists
            here, there = -(-self.rows // rows), -(-self.keys // width)
            if backward:
                here, there = there, here
            heads = 1 if self.one_list else self.heads
            count, index = int32(self.batch, heads, here), int32(self.batch, heads, here, there)
            parts = [x.expand(-1, self.heads, *x.shape[2:]) for x in (count, index, count, index)]
            more["lists"] = BlockLists(*parts, rows, width)
        if self.documents is not None:
            first = int32(self.documents + 1)
            more["documents"] = Varlen(first, first, int32(self.documents))
        if self.tables is not None:
            more["tensors"] = [int32(*[8] * self.tables)]
        return Mask(**more, **self.seen)


def attend(call: Call) -> None:
    from cute_kernels.fa4 import launch

    into = None
    if call.into:
        lse = torch.empty((call.batch, call.heads, call.rows), dtype=torch.float32, device="cuda")
        into = call.tensor("o", call.rows, call.heads, call.v_dim), lse
    launch.attend(*call.qkv(), call.visible(False), scale=call.scale, lse=call.lse, into=into)


def differentiate(call: Call) -> None:
    from cute_kernels.fa4 import launch

    q, k, v = call.qkv()
    o, do = (call.tensor(name, call.rows, call.heads, call.v_dim) for name in ("o", "do"))
    shape = (call.heads, call.rows) if call.documents else (call.batch, call.heads, call.rows)
    lse = torch.empty(shape, dtype=torch.float32, device="cuda")
    results = (torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in (q, k, v))
    given = launch.Gradients(q, k, v, o, do, lse, *results)
    launch.differentiate(given, call.visible(True), scale=call.scale)


WINDOW = {"seen": {"window": (100, 0)}}
LISTED = {"lists": (128, 128)}
MASKED = {**LISTED, "seen": {"mask_mod": everything}}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dtype": ({}, {"dtype": torch.float16}),
    "D": ({}, {"dim": 64, "v_dim": 64}),
    "heads": ({}, {"heads": 8}),
    "key heads": ({}, {"kv_heads": 1}),
    "causal": ({}, {"seen": {"causal": True}}),
    "a window": ({}, WINDOW),
    "a window without an end": (WINDOW, {"seen": {"window": (100, None)}}),
    "a window without a beginning": (WINDOW, {"seen": {"window": (None, 0)}}),
    "q of one batch": ({}, {"expanded": "q"}),
    "k of one batch": ({}, {"expanded": "k"}),
    "v of one batch": ({}, {"expanded": "v"}),
    "lists": ({}, LISTED),
    "lists of one head": (LISTED, {**LISTED, "one_list": True}),
    "a mask": (LISTED, MASKED),
    "another mask": (MASKED, {**LISTED, "seen": {"mask_mod": nothing_behind}}),
    "a table for the mask": (MASKED, {**MASKED, "tables": 1}),
    "documents": ({"seen": {"causal": True}}, {"seen": {"causal": True}, "documents": 3}),
}
"""What FA4 compiles kernels of their own for: two calls."""
FORWARD = {
    "D_v": ({}, {"v_dim": 64}),
    "no lse": ({}, {"lse": False}),
    "a window, into the caller's memory": (WINDOW, {**WINDOW, "into": True}),
    "rows of a listed tile": (LISTED, {"lists": (256, 128)}),
    "keys of a listed block": (LISTED, {"lists": (128, 64)}),
}
BACKWARD = {
    "few rows": ({}, {"rows": 60}),
    "few keys": ({}, {"keys": 60}),
    "do of one batch": ({}, {"expanded": "do"}),
    "keys of a listed block": (LISTED, {"lists": (128, 64)}),
}
CASES = [(False, case) for case in {**OTHERS, **FORWARD}] + [(True, case) for case in {**OTHERS, **BACKWARD}]


@pytest.mark.parametrize(
    ("backward", "case"), CASES, ids=lambda x: x if isinstance(x, str) else ["forward", "backward"][x]
)
def test_other_kernels_have_another_signature(backward: bool, case: str, kernels: Callable[..., Kernels]) -> None:
    one, other = (kernels(backward, **changes) for changes in {**OTHERS, **(BACKWARD if backward else FORWARD)}[case])
    assert one.keys != other.keys, "FA4 takes the same kernels"
    assert None not in (one.signature, other.signature)
    assert one.signature != other.signature


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("plain", [{}, MASKED, WINDOW], ids=["all", "lists", "window"])
@pytest.mark.parametrize("changes", [{"batch": 1}, {"rows": 5000}, {"keys": 5000}, {"scale": 0.2}], ids=str)
def test_one_signature_serves_all_sizes(
    changes: dict[str, Any], plain: dict[str, Any], backward: bool, kernels: Callable[..., Kernels]
) -> None:
    one, other = kernels(backward, **plain), kernels(backward, **plain, **changes)
    assert one.keys == other.keys
    assert one.signature == other.signature
    assert one.signature is not None

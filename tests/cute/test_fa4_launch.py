"""Calls that go straight to a kernel that FA4 compiled (launch.py), against FA4's own calls, without compiling.

FA4's interface is called with tensors that have no data, and a cache that claims to hold every kernel it asks for. A
signature is enough if, whatever calls differ in, those of one signature ask for the same kernels, and a call that goes
straight to them gives them what FA4 itself would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels.fa4.launch import MaskMod
from cute_kernels.runtime.device import TARGET_VARIABLE, compute_capability
from tests.support.cases import covering

pytestmark = [pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]

IS_STATIC_PERSISTENT = -9
"""Place in the forward's key of what FA4 tells to sm_100's kernel alone."""
ARCHS = {90: ("sm_90a", "132"), 100: ("sm_100a", "148")}
"""FA4's name of an architecture: CuTe DSL's, and how many multiprocessors such a GPU has."""


class Cache:
    """Of compiled kernels: holds all of them, and remembers which were asked for and what they were given."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name, self.calls = name, calls

    def __contains__(self, key: Any) -> bool:
        return True

    def __getitem__(self, key: Any) -> Callable[..., None]:
        return lambda *given: self.calls.append((self.name, key, *map(shown, given)))


def shown(x: Any) -> Any:
    """An argument as far as it can be told without data: of a tensor its type, shape and strides."""
    if isinstance(x, Tensor):
        return x.dtype, tuple(x.shape), x.stride()
    if isinstance(x, (tuple, list)):
        return tuple(map(shown, x))
    return getattr(x, "value", x)


class Notes:
    """In place of fa4/kept.py: of this process's calls, and what they note is all that is on disk."""

    def __init__(self, caches: dict[str, Cache]) -> None:
        self.caches = caches
        self.noted: dict[Any, tuple[Any, Any]] = {}

    def folder(self, cache: Any) -> Path:
        return Path()

    def note(self, call: str, signature: Any, where: Path, *noted: Any) -> None:
        self.noted[call, signature] = noted

    def find(self, call: str, signature: Any) -> Any:
        if (call, signature) not in self.noted:
            return None
        kernels, sizes = self.noted[call, signature]
        return [self.caches[stage][key] for stage, key in kernels], sizes


class Kernels(NamedTuple):
    signature: Any
    """Ours; None: every call takes FA4's own way."""
    calls: list[tuple[Any, ...]]
    """Function of FA4's that compiles, its key, and what the kernel was given."""

    @property
    def keys(self) -> list[tuple[Any, ...]]:
        """Without what changes no kernel."""
        if compute_capability(0)[0] != 9:
            return [call[:2] for call in self.calls]
        persistent = IS_STATIC_PERSISTENT
        return [
            (name, key[:persistent] + key[persistent + 1 :] if name == "_flash_attn_fwd" else key)
            for name, key, *_ in self.calls
        ]


class Host:
    """What launch.py does on a GPU of an architecture."""

    def __init__(self, calls: list[tuple[Any, ...]], signatures: list[Any], notes: Notes) -> None:
        self.calls, self.signatures, self.notes = calls, signatures, notes

    def __call__(self, backward: bool, *, again: bool = False, later: bool = False, **changes: Any) -> Kernels:
        """Args: `again`, with the kernels recorded before; `later`, with those that were noted; what is changed
        of the plain call.
        """
        from cute_kernels.fa4 import launch

        if not again:
            launch._FORWARD.clear()
            launch._BACKWARD.clear()
            if not later:
                self.notes.noted.clear()
        self.calls.clear()
        (differentiate if backward else attend)(Call(**changes))
        return Kernels(self.signatures[-1], [*self.calls])


@pytest.fixture(params=ARCHS, ids=lambda arch: f"sm_{arch}")
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    from flash_attn.cute import interface

    from cute_kernels.fa4 import kept, launch

    host = Host([], [], Notes({}))
    for name in ("_flash_attn_fwd", "_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert"):
        host.notes.caches[name] = Cache(name, host.calls)
        monkeypatch.setattr(getattr(interface, name), "compile_cache", host.notes.caches[name])
    for name in ("folder", "note", "find"):
        monkeypatch.setattr(kept, name, getattr(host.notes, name))
    target, multiprocessors = ARCHS[request.param]
    monkeypatch.setattr(interface, "_get_device_arch", lambda: request.param)
    monkeypatch.setenv(TARGET_VARIABLE, target)
    monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", multiprocessors)
    monkeypatch.setattr(Tensor, "is_cuda", True)  # as FA4 wants it, also of meta tensors
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # there is none
    monkeypatch.setattr(launch, "_FORWARD", {})
    monkeypatch.setattr(launch, "_BACKWARD", {})
    compute_capability.cache_clear()
    real = launch._signature

    def spy(*arguments: Any) -> Any:
        host.signatures.append(real(*arguments))
        return host.signatures[-1]

    monkeypatch.setattr(launch, "_signature", spy)
    yield host
    compute_capability.cache_clear()


@cache
def behind(distance: int) -> Callable[..., Any]:
    """A mask_mod: keys so far behind their row, or farther."""

    def visible(batch: Any, head: Any, row: Any, key: Any, info: Any, aux: Any) -> Any:
        return key + distance <= row

    return visible


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
        """Of strides that no other tensor has, so that it can be told from others of its shape."""
        batch = () if self.documents else (1 if name in self.expanded else self.batch,)
        more = 1 + ["q", "k", "v", "o", "do", "dq", "dk", "dv"].index(name)
        made = torch.empty((*batch, tokens, heads + more, dim), dtype=self.dtype, device="meta")[..., :heads, :]
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
            return torch.empty(shape, dtype=torch.int32, device="meta")

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
            more["documents"] = Varlen(first, int32(self.documents + 1), *(int32(self.documents) for _ in range(2)))
        if self.tables is not None:
            more["tensors"] = [int32(*[8] * self.tables)]
        return Mask(**more, **self.seen)


def attend(call: Call) -> None:
    from cute_kernels.fa4 import launch

    into = None
    if call.into:
        lse = torch.empty((call.batch, call.heads, call.rows), dtype=torch.float32, device="meta")
        into = call.tensor("o", call.rows, call.heads, call.v_dim), lse
    launch.attend(*call.qkv(), call.visible(False), scale=call.scale, lse=call.lse, into=into)


def differentiate(call: Call) -> None:
    from cute_kernels.fa4 import launch

    q, k, v = call.qkv()
    o, do = (call.tensor(name, call.rows, call.heads, call.v_dim) for name in ("o", "do"))
    shape = (call.heads, call.rows) if call.documents else (call.batch, call.heads, call.rows)
    lse = torch.empty(shape, dtype=torch.float32, device="meta")
    results = (call.tensor(name, *x.shape[-3:]) for name, x in (("dq", q), ("dk", k), ("dv", v)))
    given = launch.Gradients(q, k, v, o, do, lse, *results)
    launch.differentiate(given, call.visible(True), scale=call.scale)


WINDOW = {"seen": {"window": (100, 0)}}
LISTED = {"lists": (128, 128)}
MASKED = {**LISTED, "seen": {"mask_mod": MaskMod(behind, (0,))}}
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
    "another mask": (MASKED, {**LISTED, "seen": {"mask_mod": MaskMod(behind, (1,))}}),
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
    "few keys": ({"dim": 64, "v_dim": 64}, {"dim": 64, "v_dim": 64, "keys": 60}),
    "do of one batch": ({}, {"expanded": "do"}),
    "keys of a listed block": (LISTED, {"lists": (128, 64)}),
}
CASES = [(False, case) for case in {**OTHERS, **FORWARD}] + [(True, case) for case in {**OTHERS, **BACKWARD}]


def fitting(changes: dict[str, Any], backward: bool) -> dict[str, Any]:
    """The call with listed tiles that the architecture takes: on sm_100 twice as many rows, in backward keys too."""
    if "lists" not in changes or compute_capability(0)[0] != 10:
        return changes
    rows, width = changes["lists"]
    return {**changes, "lists": (2 * rows, 2 * width if backward else width)}


@pytest.mark.parametrize(
    ("backward", "case"), CASES, ids=lambda x: x if isinstance(x, str) else ["forward", "backward"][x]
)
def test_other_kernels_have_another_signature(backward: bool, case: str, kernels: Host) -> None:
    calls = {**OTHERS, **(BACKWARD if backward else FORWARD)}[case]
    one, other = (kernels(backward, **fitting(changes, backward)) for changes in calls)
    assert one.keys != other.keys, "FA4 takes the same kernels"
    assert None not in (one.signature, other.signature)
    assert one.signature != other.signature


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("plain", [{}, MASKED, WINDOW], ids=["all", "lists", "window"])
@pytest.mark.parametrize("changes", [{"batch": 1}, {"rows": 5000}, {"keys": 5000}, {"scale": 0.2}], ids=str)
def test_one_signature_serves_all_sizes(
    changes: dict[str, Any], plain: dict[str, Any], backward: bool, kernels: Host
) -> None:
    plain = fitting(plain, backward)
    one, other = kernels(backward, **plain), kernels(backward, **plain, **changes)
    assert one.keys == other.keys
    assert one.signature == other.signature
    assert one.signature is not None


SIZES = [1, 60, 128, 129, 256, 257, 300, 1024]
SEEN: list[dict[str, Any]] = [
    {},
    {"seen": {"causal": True}},
    WINDOW,
    {**WINDOW, "into": True},
    {"seen": {"window": (100, None)}},
    {"seen": {"causal": True}, **LISTED},
    {**LISTED, "one_list": True},
    {"lists": (256, 128)},
    {"seen": {"mask_mod": MaskMod(behind, (0,))}, "lists": (128, 64)},
    {**MASKED, "tables": 1},
    {**MASKED, "tables": 4},
    {"seen": {"causal": True}, "documents": 3},
    {**WINDOW, "documents": 3},
]
HEADS = [(4, 4), (4, 2), (16, 1), (12, 1)]
DIMS = [(64, 64), (128, 128), (128, 64)]
AXES = (SIZES, SIZES, HEADS, DIMS)


@cache
def shapes() -> list[Any]:
    """Rows, keys, heads and dims: every three of them together."""
    places = sorted(covering([len(axis) for axis in AXES], 3))
    return [[axis[place] for axis, place in zip(AXES, one, strict=True)] for one in places]


def named(seen: dict[str, Any]) -> str:
    return str({key: value for key, value in {**seen, **seen.get("seen", {})}.items() if key != "seen"})


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("seen", SEEN, ids=named)
def test_calls_of_one_signature_take_the_same_kernels(seen: dict[str, Any], backward: bool, kernels: Host) -> None:
    """Calls as FA4 makes them, and straight: by what was recorded, and by what was noted for later processes."""
    if backward and ("into" in seen or ("documents" in seen and "mask_mod" in seen["seen"])):
        seen = WINDOW
    known: dict[Any, list[tuple[Any, ...]]] = {}
    for rows, keys, (heads, kv_heads), (dim, v_dim) in shapes():
        if "documents" in seen and rows != keys:
            continue
        changes = fitting({"batch": 1 + rows % 2, "lse": keys % 2 == 0, **seen}, backward)
        sizes = {"rows": rows, "keys": keys, "heads": heads, "kv_heads": kv_heads, "dim": dim, "v_dim": v_dim}
        by_fa4 = kernels(backward, **changes, **sizes)
        straight = kernels(backward, again=True, **changes, **sizes)
        assert by_fa4.signature is not None
        assert by_fa4.signature == straight.signature
        assert by_fa4.calls
        new = by_fa4.signature not in known
        assert known.setdefault(by_fa4.signature, by_fa4.keys) == by_fa4.keys, sizes
        assert straight.calls == by_fa4.calls, sizes
        if new:
            by_notes = kernels(backward, later=True, **changes, **sizes)
            assert by_notes == by_fa4, sizes
    assert len(known) > len(DIMS)

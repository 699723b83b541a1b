"""What the tests with drawn calls share: guards around a call, layouts of tensors, and values out of place."""

from __future__ import annotations

import math
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch
from hypothesis import event
from hypothesis import strategies as st
from torch import Tensor

import dispatch
from nsa import NSAConfig
from nsa.inputs import TENSOR_NAMES, NSAInputs

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "250"))
NEW_EACH_TIME = "FUZZ_EXAMPLES" in os.environ
"""Else a change could fail its tests by an example that has nothing to do with it."""
SECONDS_PER_CALL = 60
DOCUMENTED = (TypeError, ValueError, dispatch.BackendError)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [field.name for field in fields(NSAConfig)]
NEIGHBORHOOD_OPTIONS = ["kernel_size", "dilation", "softmax_scale", "boundary", "causal", "algorithm", "backend"]
LAYOUTS = ["plain", "offset", "spread", "reversed", "heads first", "wider", "expanded", "parameter"]

Outcomes = Counter[str]
"""How often each kind of outcome came (the fixture `outcomes`)."""


def note(outcomes: Outcomes, kind: str) -> None:
    outcomes[kind] += 1
    event(kind)


@contextmanager
def guarded(tensors: list[Tensor], seconds: int = SECONDS_PER_CALL) -> Iterator[None]:
    """No hang, and the memory of all inputs bit for bit as before."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"a call took more than {seconds} s")

    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta"]
    before = [bytes_of(storage).clone() for storage in storages]
    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    for storage, bits in zip(storages, before, strict=True):
        assert torch.equal(bytes_of(storage), bits), "an input was changed in place"


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def strided(values: Mapping[str, Any]) -> list[Tensor]:
    flat = [item for value in values.values() for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [value for value in flat if isinstance(value, Tensor) and value.layout == torch.strided]


def assert_documented(error: Exception, names: list[str]) -> None:
    """A documented error whose message names one of these arguments, or, where no backend can run, what there is."""
    assert isinstance(error, DOCUMENTED), f"{type(error).__name__}: {error}"
    message = str(error)
    if isinstance(error, dispatch.BackendError):
        assert re.search(r"no backend can run \w+ on [\w:]+ in \w+:\n  \w+: ", message), message
    else:
        if not set(names).isdisjoint(TENSOR_NAMES):  # a wrong size of one may be named as another's
            names = [*names, *TENSOR_NAMES]
        if not {"compress_block_size", "compress_stride"}.isdisjoint(names):  # which say how many entries there are
            names = [*names, "k_cmp", "v_cmp"]
        assert any(re.search(rf"(?<!\w){name}(?!\w)", message) for name in names), f"none of {names} in: {message}"


def of_call(keywords: Mapping[str, Any]) -> tuple[NSAInputs, NSAConfig]:
    """Inputs and config of a call that was not refused."""
    config = keywords.get("config") or NSAConfig(**{n: keywords[n] for n in OPTIONS if n in keywords})
    return NSAInputs(**{name: keywords.get(name) for name in TENSOR_NAMES}), config


def reach(name: str, at: tuple[int, ...], inputs: NSAInputs, config: NSAConfig) -> Tensor:
    """Tokens and head groups that a value at `at` of a tensor may reach: a mask `[B,N,H_kv]`, packed `[T,H_kv]`."""
    mask = torch.zeros(inputs.k.shape[:-1], dtype=torch.bool, device=inputs.k.device)
    per_query_head = name in ("q", "gates", "gate_proj_weight")
    if name in ("w_k_compress", "w_v_compress", "gate_proj_weight"):
        mask[..., at[0] // (inputs.group_size if per_query_head else 1)] = True
        return mask
    head = at[-2] // (inputs.group_size if per_query_head else 1)
    if inputs.cu_seqlens is None:
        mask[at[0], :, head] = True
        return mask
    entry = 0
    bounds = inputs.cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        last = entry + config.num_compressed(stop - start)
        if entry <= at[0] < last if name in ("k_cmp", "v_cmp") else start <= at[0] < stop:
            mask[start:stop, head] = True
        entry = last
    return mask


@st.composite
def placed(draw: st.DrawFn, tensor: Tensor, layouts: Sequence[str] = LAYOUTS) -> Tensor:
    """The same values (repeated along one dim, where expanded) in another layout, in a buffer filled with NaN."""
    shape, dims = tensor.shape, tensor.dim()
    empty: Any = math.nan if tensor.is_floating_point() else 77
    kind = draw(st.sampled_from(layouts))
    if kind == "offset":
        view = tensor.new_full((tensor.numel() + 7,), empty)[3 : 3 + tensor.numel()].view(shape)
    elif kind == "spread":
        view = tensor.new_full((*shape, 3), empty)[..., 1]
    elif kind == "reversed":
        view = tensor.new_full(shape[::-1], empty).permute(*reversed(range(dims)))
    elif kind == "heads first" and dims >= 3:
        view = tensor.new_full((*shape[:-3], shape[-2], shape[-3], shape[-1]), empty).transpose(-3, -2)
    elif kind == "wider":
        view = tensor.new_full((*shape[:-1], shape[-1] + 3), empty)[..., 1 : shape[-1] + 1]
    elif kind == "expanded" and tensor.is_floating_point() and tensor.numel() > 0:
        dim = draw(st.integers(0, dims - 1))
        return tensor.narrow(dim, 0, 1).expand(shape)
    elif kind == "parameter" and tensor.is_floating_point():
        return torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    else:
        return tensor
    return view.copy_(tensor)


class Odd:
    """An object of a class that nothing knows."""

    def __repr__(self) -> str:
        return "Odd()"


@st.composite
def spoiled(draw: st.DrawFn, tensor: Tensor) -> Any:
    """Something else in a tensor's place: another type, dtype, device, layout or shape, or values out of place."""
    kind = draw(st.sampled_from(["object", "dtype", "device", "layout", "dims", "size"]))
    if kind == "object":
        return draw(st.sampled_from([None, 0.5, "q", [1.0], tensor.tolist(), Odd()]))
    if kind == "dtype":
        return tensor.to(draw(st.sampled_from([*DTYPES, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])))
    if kind == "device":
        return tensor.to("meta")
    if kind == "layout":
        return tensor.detach().to_sparse()
    if kind == "dims":
        return tensor[None] if draw(st.booleans()) or tensor.dim() == 0 else tensor.sum(0, dtype=tensor.dtype)
    dim = draw(st.integers(0, tensor.dim() - 1))
    size = draw(st.sampled_from([0, 1, tensor.shape[dim] - 1, tensor.shape[dim] + 1]))
    shape = list(tensor.shape)
    shape[dim] = max(0, size)
    return tensor.new_zeros(shape)


def wrong_shape(blocks: Tensor) -> Tensor:
    return blocks


def no_tensor(blocks: Tensor) -> None:
    return None

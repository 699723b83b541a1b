"""Inputs of the benchmarks: random numbers, random numbers with an attention sink, or a text that every machine has.

Seeds are fixed. On CUDA random numbers are made in place, and differ from those of other devices; anything else is made
on the CPU in float32, so that every device and dtype starts from the same values.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nsa.inputs import NSAInputs

EMBEDDING = 256  # Width of the text's embeddings
CONTEXT = 4
"""Bytes mixed into one token's embedding: itself and those before it, so that a token says more than one letter."""
ROPE_BASE = 10_000.0
KINDS = ("random", "sink", "text")
SINK_TOKENS = 64  # Tokens at the start that all queries of a sink input are drawn to
SINK_LOGIT = 3.0
"""Distance of their scaled logits above those of other tokens (which vary by 1): e^3 = 20 times the weight. Means over
a block and a tile vary far less than 1, so the block with these tokens has every tile's best score."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one attention problem; see NSA's tensor layout `[B,N,heads,D]`."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Neighborhood:
    """Sizes and window of one problem of neighborhood attention; as text "B,H,S,D,k", or "B,H,S,D,k,dilation"."""

    batch: int
    heads: int
    tokens: int
    dim: int
    kernel_size: int
    dilation: int = 1

    @classmethod
    def read(cls, text: str) -> Neighborhood:
        """Raises ValueError or TypeError."""
        return cls(*map(natural, text.split(",")))

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.batch, self.tokens, self.heads, self.heads, self.dim)

    @property
    def left(self) -> int:
        """Neighbors on the left, in steps of `dilation`; an even window's extra one is here."""
        return self.kernel_size // 2

    @property
    def right(self) -> int:
        return self.kernel_size - 1 - self.left

    def __str__(self) -> str:
        sizes = (self.batch, self.heads, self.tokens, self.dim, self.kernel_size)
        return ",".join(map(str, sizes if self.dilation == 1 else (*sizes, self.dilation)))


@dataclass(frozen=True)
class Residual:
    """Sizes of one problem of attention residual; as text "L,B,T,D", or "L,B,T,D,list" where `listed`."""

    blocks: int
    batch: int
    tokens: int
    dim: int
    listed: bool = False  # The blocks are tensors of their own

    @classmethod
    def read(cls, text: str) -> Residual:
        """Raises ValueError or TypeError."""
        blocks, batch, tokens, dim = map(natural, text.removesuffix(",list").split(","))
        return cls(blocks, batch, tokens, dim, listed=text.endswith(",list"))

    def __str__(self) -> str:
        sizes = f"{self.blocks},{self.batch},{self.tokens},{self.dim}"
        return f"{sizes},list" if self.listed else sizes


def natural(text: str) -> int:
    """A number above 0 in plain digits. Raises ValueError."""
    if not text.isdigit() or int(text) == 0:
        raise ValueError(text)
    return int(text)


def make_problem(
    kind: str,
    sizes: Sizes,
    *,
    device: torch.device,
    dtype: torch.dtype,
    gated: bool = True,
    requires_grad: bool = False,
    portable: bool | None = None,
) -> NSAInputs:
    """q, k, v and, if `gated`, the gate's weights for `kind`, one of KINDS.

    Args:
        portable: make random numbers on the CPU in float32. False: on the device and in the dtype they are for, which
            takes no memory but theirs. None: False on CUDA.
    """
    if portable is None:
        portable = device.type != "cuda"
    maker, made = (torch.device("cpu"), torch.float32) if portable or kind == "text" else (device, dtype)
    generator = torch.Generator(maker).manual_seed(0)
    if kind == "text":
        q, k, v = _project_text(sizes, generator)
    else:
        heads = sizes.heads, sizes.kv_heads, sizes.kv_heads
        q, k, v = (_normal(generator, sizes.batch, sizes.tokens, of, sizes.dim, dtype=made) for of in heads)
    if kind == "sink":  # the first dim: all queries point there, and no keys but the first SINK_TOKENS
        q[..., 0] = length = math.sqrt(SINK_LOGIT * math.sqrt(sizes.dim))
        k[..., 0] = 0
        k[:, :SINK_TOKENS, :, 0] = length
    gate = _normal(generator, sizes.heads, 3, sizes.dim, dtype=made) / math.sqrt(sizes.dim) if gated else None

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype).requires_grad_(requires_grad)

    return NSAInputs(place(q), place(k), place(v), gate_proj_weight=None if gate is None else place(gate))


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


# Text


@cache
def standard_library_text() -> bytes:
    """The sources of Python's standard library, module after module: some 10 MB of real text."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in folder.glob("*.py") if path.is_file())
    paths += sorted(path for path in folder.glob("*/*.py") if "site-packages" not in path.parts)
    return b"\n".join(path.read_bytes() for path in paths)


def _project_text(sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Bytes of the text, embedded with the few bytes before them, normalised, projected, rotated by position."""
    text = standard_library_text()
    wanted = sizes.batch * sizes.tokens
    text *= -(-wanted // len(text))
    tokens = torch.frombuffer(bytearray(text[:wanted]), dtype=torch.uint8).long().reshape(sizes.batch, sizes.tokens)
    tables = _normal(generator, CONTEXT, 256, EMBEDDING)
    embedded = tables[0][tokens]
    for back in range(1, min(CONTEXT, sizes.tokens)):
        embedded[:, back:] += tables[back][tokens[:, :-back]] / (back + 1)
    embedded *= embedded.square().mean(-1, keepdim=True).rsqrt()

    def project(heads: int) -> Tensor:
        weight = _normal(generator, EMBEDDING, heads * sizes.dim) / math.sqrt(EMBEDDING)
        return (embedded @ weight).reshape(sizes.batch, sizes.tokens, heads, sizes.dim)

    q, k, v = project(sizes.heads), project(sizes.kv_heads), project(sizes.kv_heads)
    return _rotate(q), _rotate(k), v


def _rotate(tensor: Tensor) -> Tensor:
    """Rotary position embedding of `[B,N,heads,D]`, on the first even number of dims."""
    half = tensor.shape[-1] // 2
    positions = torch.arange(tensor.shape[1], dtype=torch.float64)[:, None, None]
    angles = positions * ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b, rest = tensor.split((half, half, tensor.shape[-1] - 2 * half), dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

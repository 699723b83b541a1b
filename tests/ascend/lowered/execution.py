"""Runs a lowered kernel on the tensors of its launch, in a child process, and returns the results to those tensors.

Each argument gets a region of guarded memory, from its first to its last element; those that share elements share one.
Bytes of a region that belong to no argument hold NaN there and must come back as they were.
"""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascend_kernels.launch import Launch
from tests.ascend.lowered.children import Child, Crash, ProofError, how_it_ended
from tests.ascend.lowered.native import Native

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GAP = 0xFF
PLACEMENTS = {1: "before a guard page", 2: "after a guard page"}


class MemoryFault(ProofError):
    """The kernel touched memory outside its tensors."""


@dataclass
class Region:
    start: int
    end: int
    views: dict[str, Tensor] = field(default_factory=dict)

    def view_of(self, name: str, content: Tensor) -> Tensor:
        """The argument's elements within `content`, bytes of this region; expanded dims once."""
        tensor = without_expanded_dims(self.views[name])
        first = tensor.data_ptr() - self.start
        if first % tensor.element_size():
            raise ValueError(f"{name} is not aligned to its elements within the storage that it shares")
        whole = content[: len(content) // tensor.element_size() * tensor.element_size()]
        integers = whole.view(INTEGERS[tensor.element_size()])
        return integers.as_strided(tensor.shape, tensor.stride(), first // tensor.element_size())


def without_expanded_dims(tensor: Tensor) -> Tensor:
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def raw(tensor: Tensor) -> Tensor:
    """The same memory as integers, unknown to autograd: NaN compare equal, and saved tensors keep their version."""
    return tensor.data.view(INTEGERS[tensor.element_size()])


def extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def regions_of(tensors: dict[str, Tensor]) -> list[Region]:
    """Regions in the order of addresses. Views that interleave without sharing an element are kept apart."""
    merged = regions_of_overlapping_extents(tensors)
    return [part for region in merged for part in (split(region) if are_disjoint(region) else [region])]


def are_disjoint(region: Region) -> bool:
    covered = torch.zeros(region.end - region.start, dtype=torch.uint8)
    for name, tensor in region.views.items():
        if tensor.numel():
            region.view_of(name, covered).fill_(-1)
    distinct = sum(without_expanded_dims(tensor).nbytes for tensor in region.views.values())
    return int(covered.count_nonzero()) == distinct


def split(region: Region) -> list[Region]:
    return [
        Region(tensor.data_ptr(), tensor.data_ptr() + extent(tensor), {name: tensor})
        for name, tensor in region.views.items()
    ]


def regions_of_overlapping_extents(tensors: dict[str, Tensor]) -> list[Region]:
    regions: list[Region] = []
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        start = tensor.data_ptr()
        end = start + extent(tensor)
        if not regions or start >= regions[-1].end:
            regions.append(Region(start, end))
        regions[-1].end = max(regions[-1].end, end)
        regions[-1].views[name] = tensor
    return regions


def run(launch: Launch, native: Native, parameters: tuple[str, ...], what: str, child: Child) -> None:
    """Run every program of the grid, under both placements of guard pages; results replace the tensors' contents.

    Args:
        child: `children.guarded()`, which may have run other launches before.

    Raises:
        MemoryFault: an access outside the tensors, read or written; ProofError: any other death, or no end.
    """
    regions = regions_of({name: x for name in parameters if isinstance(x := launch.arguments[name], Tensor)})
    place = {name: index for index, region in enumerate(regions) for name in region.views}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"region{index}" for index in range(len(regions))]
        contents = [before(region) for region in regions]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content.numpy().tobytes())
        progress = Path(folder) / "progress"
        progress.write_bytes(bytes((5 + len(regions)) * 8))
        arguments: list[dict[str, Any]] = []
        for name in parameters:
            value = launch.arguments[name]
            if name in place:
                offset = value.data_ptr() - regions[place[name]].start
                elements = extent(value) // value.element_size()
                arguments.append({"region": place[name], "offset": offset, "elements": elements})
            else:
                arguments.append({"value": value})
        request = {
            "library": str(native.library),
            "function": native.function,
            "kinds": native.kinds,
            "grid": launch.grid,
            "regions": [str(path) for path in paths],
            "arguments": arguments,
            "progress": str(progress),
        }
        try:
            answer = child.ask("execute", what, request)
        except Crash as crash:
            raise MemoryFault(f"execute {what}: {fault(crash.status, progress, regions)}") from crash
        if answer:
            names = ", ".join(regions[answer["region"]].views)
            raise MemoryFault(f"execute {what}: {answer['outside']} ({names})")
        for region, path, content in zip(regions, paths, contents, strict=True):
            take_back(region, content, bytes_tensor(path.with_suffix(".out").read_bytes()), what)


def bytes_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def before(region: Region) -> Tensor:
    """The region's bytes: its tensors, and NaN between them."""
    memory = bytes_tensor(ctypes.string_at(region.start, region.end - region.start))
    content = torch.full_like(memory, GAP)
    for name, tensor in region.views.items():
        if tensor.numel():
            region.view_of(name, content).copy_(region.view_of(name, memory))
    return content


def take_back(region: Region, content: Tensor, after: Tensor, what: str) -> None:
    """Copy what changed into the tensors, past autograd; nothing else may have changed."""
    expected = content.clone()
    for name, tensor in region.views.items():
        if tensor.numel() == 0:
            continue
        result = region.view_of(name, after)
        region.view_of(name, expected).copy_(result)
        own = raw(without_expanded_dims(tensor))
        if not torch.equal(own, result):
            own.copy_(result)
    if not torch.equal(expected, after):
        raise MemoryFault(f"execute {what}: wrote between the elements of {', '.join(region.views)}")


def fault(status: int, progress: Path, regions: list[Region]) -> str:
    noted = torch.frombuffer(bytearray(progress.read_bytes()), dtype=torch.int64).tolist()
    (x, y, z, address, placement), starts = noted[:5], noted[5:]
    if not placement:
        return how_it_ended(status)
    story = f"{how_it_ended(status)} in program {(x, y, z)}, tensors {PLACEMENTS[placement]}"
    near = []
    for start, region in zip(starts, regions, strict=True):
        end = start + region.end - region.start
        distance, side = (address - end, "past the end") if address >= end else (start - address, "before the start")
        near.append((abs(distance), f"{abs(distance)} bytes {side} of {', '.join(region.views)}"))
    return f"{story}: {min(near)[1]}" if address and near else story

"""The host side of a compiled kernel, interpreted: from its IR and torch tensors to the launches it asks for.

    operations of the host function, one after the other -> values: numbers, tuples, layouts, views of memory
    cuda.launch_ex -> a Launch: grid, parameters as bytes, tensor maps

Where a type has no '?', the value of an operation of the `cute` dialect is its type; whatever is computed must agree
with its type. What is not known here raises NotImplementedError; what the host prints as an error, and what does not
fit its type, ValueError.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.ptx.ir import (
    FIXED,
    Atom,
    Basis,
    Composed,
    Coordinates,
    Dynamic,
    Layout,
    Module,
    Operation,
    View,
    dynamic,
    fill,
    layout_of,
    leaves,
    split,
    template,
)
from tests.ptx.launch import Launch, TensorMap
from tests.ptx.parameters import packed

ITEMS = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i32": torch.int32,
    "i64": torch.int64,
    "i8": torch.int8,
}
"""Elements of tensors, as the IR names them."""


@lru_cache(64)
def _module(ir: str) -> Module:
    return Module(ir)


def launches_of(ir: str, arguments: Sequence[Any]) -> list[Launch]:
    """What a compiled function launches when it is called.

    Args:
        ir: as CuTe DSL keeps it.
        arguments: torch tensors, numbers, and tuples of them, without the stream; None is left out.
    """
    return Host(_module(ir)).run([*flat(arguments)])


def flat(arguments: Any) -> Iterator[Any]:
    """As the DSL flattens arguments."""
    for x in arguments:
        if isinstance(x, (tuple, list)):
            yield from flat(x)
        elif x is not None:
            yield x


class Host:
    """A call of a host function."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.values: dict[str, Any] = {}
        self.launches: list[Launch] = []

    def run(self, given: list[Any]) -> list[Launch]:
        taken = [(name, of) for name, of in self.module.arguments if of != "!cuda.stream"]
        if len(taken) != len(given):
            raise ValueError(f"the host takes {[of for _, of in taken]}, got {len(given)} arguments")
        for name, of in self.module.arguments:
            self.values[name] = None if of == "!cuda.stream" else argument(of, given.pop(0))
        self.block(self.module.operations)
        return self.launches

    def block(self, operations: list[Operation]) -> list[Any]:
        """Returns what it yields."""
        for operation in operations:
            values = [self.values[name] for name in operation.operands]
            if operation.name in ("scf.yield", "return"):
                return values
            types = operation.result_types
            if operation.has_fixed_results:
                results = [template(of) for of in types]
            else:
                results = self.execute(operation, values)
                for of, value in zip(types, results, strict=bool(types)):
                    check(of, value)
            self.values.update(zip(operation.results, results, strict=True))
        return []

    def execute(self, operation: Operation, values: list[Any]) -> list[Any]:
        if operation.name in CONTROL:
            return CONTROL[operation.name](self, operation, values)
        if operation.name not in OPERATIONS:
            raise NotImplementedError(f"{operation.name} on a host: {operation.text} : {operation.types}")
        result = OPERATIONS[operation.name](operation, *values)
        return result if isinstance(result, list) else [result]


def check(type_: str, value: Any) -> None:
    """Raises ValueError unless the value is of its type."""
    if FIXED.match(type_) or type_.startswith(("!cute.memref", "!cute.coord_tensor", "!cute.i")):
        for _ in dynamic(template(type_), value):
            pass


def argument(type_: str, given: Any) -> Any:
    """An argument of the host function, checked against its type."""
    if type_.startswith("!cute.memref"):
        item = split(type_.partition("<")[2], ",")[0]
        alignment = re.search(r"align<(\d+)>", type_)
        if not isinstance(given, Tensor) or given.dtype != ITEMS[item]:
            raise ValueError(f"{shown(given)} where the host takes {type_}")
        view = View(given.data_ptr(), Layout(tuple(given.shape), tuple(given.stride())))
        try:
            check(type_, view)
        except ValueError as problem:
            raise ValueError(f"{shown(given)} where the host takes {type_}: {problem}") from problem
        if view.address % int(alignment[1] if alignment else given.element_size()):
            raise ValueError(f"a tensor at {view.address:#x} where the host takes {type_}")
        return view
    number = getattr(given, "value", given)
    if type_ != "f32" and not re.fullmatch(r"i\d+", type_):
        raise NotImplementedError(f"an argument of type {type_}, given {shown(given)}")
    if not isinstance(number, (int, float) if type_ == "f32" else int):
        raise ValueError(f"{shown(given)} where the host takes {type_}")
    return float(np.float32(number)) if type_ == "f32" else next(dynamic(template(type_), int(number)))[0]


def shown(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}" if isinstance(x, Tensor) else repr(x)


# Control


def _if(host: Host, operation: Operation, values: list[Any]) -> list[Any]:
    regions = [*operation.regions, []]
    return host.block(regions[0] if values[0] else regions[1])


def _for(host: Host, operation: Operation, values: list[Any]) -> list[Any]:
    names = re.match(r"(%\w+) = (%\w+) to (%\w+) step (%\w+) (?:iter_args\((.*?)\))?", operation.text)
    if names is None:
        raise NotImplementedError(f"scf.for {operation.text}")
    counter, *bounds = names.groups()[:4]
    carried = [x.split(" = ") for x in split(names[5] or "", ",")]
    state = [host.values[start] for _, start in carried]
    for i in range(*(host.values[x] for x in bounds)):
        host.values[counter] = i
        host.values.update(zip((name for name, _ in carried), state, strict=True))
        state = host.block(operation.regions[0])
    return state


def _configure(host: Host, operation: Operation, values: list[Any]) -> list[Any]:
    """cuda.launch_cfg.create."""

    def named(name: str) -> Any:
        found = re.search(rf"{name} = (?:\(([^)]*)\)|(%\w+))", operation.text)
        if found is None:
            raise NotImplementedError(f"a launch without {name}: {operation.text}")
        several, one = found.groups()
        return host.values[one] if one else tuple(host.values[x.strip()] for x in several.split(","))

    return [{name: named(name) for name in ("blockDim", "gridDim", "dynamicSmemBytes")} | {"cluster": (1, 1, 1)}]


def _in_clusters(host: Host, operation: Operation, values: list[Any]) -> list[Any]:
    """cuda.launch_cfg.cluster_dim."""
    values[0]["cluster"] = tuple(values[1:])
    return []


def _cooperative(host: Host, operation: Operation, values: list[Any]) -> list[Any]:
    if values[1] != 0:
        raise NotImplementedError("a cooperative launch")
    return []


def _launch(host: Host, operation: Operation, values: list[Any]) -> list[Any]:
    """cuda.launch_ex."""
    kernel = re.match(r"@kernels::@(\w+)<", operation.text)
    configuration, *given = values
    if kernel is None:
        raise NotImplementedError(f"cuda.launch_ex{operation.text}")
    maps: list[TensorMap] = []
    parameters = [packed(of, x, maps) for of, x in zip(operation.operand_types[1:], given, strict=True)]
    arguments = [parameter.data for parameter in parameters if parameter is not None]
    grid, block, cluster, size = (configuration[x] for x in ("gridDim", "blockDim", "cluster", "dynamicSmemBytes"))
    host.launches.append(Launch(kernel[1], arguments, grid, block, cluster, size, maps))
    return [0]


def _print(host: Host, operation: Operation, values: list[Any]) -> list[Any]:
    if "Error" in operation.text:
        raise ValueError(f"the host says {operation.text.strip()} with {values}")
    raise NotImplementedError(f"cute.print{operation.text}")


CONTROL: dict[str, Callable[[Host, Operation, list[Any]], list[Any]]] = {
    "scf.if": _if,
    "scf.for": _for,
    "cuda.launch_cfg.create": _configure,
    "cuda.launch_cfg.cluster_dim": _in_clusters,
    "cuda.launch_cfg.cooperative": _cooperative,
    # Whether it may begin before the launch in front of it has ended; it need not
    "cuda.launch_cfg.programmatic_stream_serialization_allowed": lambda host, operation, values: [],
    "cuda.launch_ex": _launch,
    "cuda.return_if_error": lambda host, operation, values: [],
    "cute.kernel_smem_size": lambda host, operation, values: [
        host.module.shared_bytes(operation.text.rpartition("@")[2].strip())
    ],
    "cute.print": _print,
}


# Values of one operation


def _filled(operation: Operation, *values: Any) -> Any:
    """A tuple or layout of its type, with the operands' leaves where it is dynamic."""
    (of,) = operation.result_types
    numbers = [x for value in values for x in leaves(value) if isinstance(x, int)]
    pattern = template(of)
    wanted = sum(isinstance(leaf, Dynamic) for leaf in leaves(pattern))
    if wanted != len(numbers):
        raise ValueError(f"{operation.name}{operation.text} : {operation.types} of {values}")
    return fill(pattern, iter(numbers))


def _select(operation: Operation, x: Any) -> Any:
    modes = [int(mode) for mode in re.match(r"<\[(.*?)\]>", operation.text)[1].split(",")]  # type: ignore[index]
    chosen = lambda of: tuple(of[mode] for mode in modes)  # noqa: E731
    if isinstance(x, Composed):
        return x._replace(layout=Layout(*map(chosen, x.layout)))
    return Layout(*map(chosen, x)) if isinstance(x, Layout) else chosen(x)


def _get(operation: Operation, x: Any) -> Any:
    modes = [int(mode) for mode in re.search(r"mode = \[(.*?)\]", operation.text)[1].split(",")]  # type: ignore[index]

    def part(of: Any) -> Any:
        for mode in modes:
            of = of[mode]
        return of

    return Layout(*map(part, x)) if isinstance(x, Layout) else part(x)


def _slice(operation: Operation, x: Any, at: Any) -> Any:
    """The modes of a layout that '_' keeps."""
    if isinstance(x, Composed):
        return x._replace(layout=_slice(operation, x.layout, at))
    if not isinstance(x, Layout) or not isinstance(at, tuple) or any(isinstance(part, tuple) for part in at):
        raise NotImplementedError(f"cute.slice on a host: {operation.types}")
    kept = [i for i, part in enumerate(at) if part is None]
    return Layout(*(tuple(of[i] for i in kept) for of in x))


def _group(operation: Operation, x: Any) -> Any:
    """cute.group_modes: modes from <a, b> on become one, a up to but without b."""
    bounds = re.search(r"<(\d+), (\d+)>", operation.text)
    if bounds is None:
        raise NotImplementedError(f"cute.group_modes{operation.text}")
    first, end = map(int, bounds.groups())
    if isinstance(x, View):
        return x._replace(layout=_group(operation, x.layout))
    if not isinstance(x, Layout):
        raise NotImplementedError(f"cute.group_modes : {operation.types}")
    return Layout(*((*of[:first], of[first:end], *of[end:]) for of in x))


def _offset(operation: Operation, at: Any, layout: Layout) -> int:
    """cute.crd2idx, '_' being the first coordinate."""
    if not isinstance(at, tuple) or any(isinstance(x, tuple) for x in (*at, *layout.shape)):
        raise NotImplementedError(f"cute.crd2idx : {operation.types}")
    return sum((i or 0) * stride for i, stride in zip(at, layout.stride, strict=True))


def _ceil_div(operation: Operation, x: Any, by: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_ceil_div(operation, *parts) for parts in zip(x, by, strict=True))
    return -(-x // math.prod(leaves(by.shape if isinstance(by, Layout) else by)))


def _elementwise(compute: Callable[[int, int], int]) -> Callable[..., Any]:
    def of(operation: Operation, x: Any, y: Any) -> Any:
        if isinstance(x, tuple) or isinstance(y, tuple):
            return tuple(of(operation, *parts) for parts in zip(x, y, strict=True))
        return compute(x, y)

    return of


def _natural(compute: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """Division, whose rounding of negative numbers is not asked for."""

    def of(x: int, y: int) -> int:
        if x < 0 or y <= 0:
            raise NotImplementedError(f"{x} divided by {y} on a host")
        return compute(x, y)

    return of


def _size(operation: Operation, x: Any) -> int:
    x = x.layout if isinstance(x, (View, Coordinates)) else x
    return math.prod(leaves(x.shape if isinstance(x, Layout) else x))


def _copy_atom(operation: Operation, view: View, shared: Any, tiles: Any) -> list[Any]:
    """cute_nvgpu.atom.make_non_exec_tiled_tma_load and _store: a tensor map, and the tensor of its coordinates."""
    of_atom, of_tensor = operation.result_types
    of_view, of_shared, _ = operation.operand_types
    multicast = re.search(r"num_multicast = (\d+)", operation.text)
    if multicast and multicast[1] != "1":
        raise NotImplementedError(f"TMA to {multicast[1]} CTAs")
    item = split(of_view.partition("<")[2], ",")[0]
    size = ITEMS[item].itemsize
    basis = layout_of(re.search(r'tma_gbasis = <"(.*?)">', of_atom)[1])  # type: ignore[index]
    box, sizes, strides = [*leaves(basis.shape)], [], []
    for step in leaves(basis.stride):
        if not isinstance(step, Basis) or step.factor != 1:
            raise NotImplementedError(f"a tensor map along {step}: {of_atom}")
        length, stride = view.layout
        for mode in reversed(step.modes):
            length, stride = length[mode], stride[mode]
        sizes.append(length)
        strides.append(stride * size)
    several = any(isinstance(x, tuple) and len([*leaves(x)]) > 1 for x in basis.shape)
    if several or any(isinstance(x, tuple) for x in (*sizes, *strides)):
        raise NotImplementedError(f"a tensor map of {view.layout}: {of_atom}")
    bits = re.search(r"copy_bits = (\d+)", of_atom)
    if bits is None or int(bits[1]) != 8 * size * math.prod(box):
        raise NotImplementedError(f"TMA of other bits than {box}: {of_atom}")
    made = TensorMap(view.address, size, item, tuple(sizes), tuple(strides), tuple(box), _swizzle(of_shared))
    made.check()
    first, layout = template(of_tensor)
    return [made, Coordinates(first, Layout(view.layout.shape, layout.stride))]


def _swizzle(type_: str) -> int:
    """Bytes, of a layout of shared memory: S<3,4,3> changes bits 4 to 6 by bits 7 to 9 of addresses."""
    if type_.startswith("!cute.layout"):
        return 0
    swizzle = re.match(r'!cute\.composed_layout<"S<(\d),4,3> o 0 o ', type_)
    if swizzle is None:
        raise NotImplementedError(f"TMA to shared memory as {type_}")
    return (16 << int(swizzle[1])) if swizzle[1] != "0" else 0


def _constant(operation: Operation) -> Any:
    text = operation.text.strip()
    if text in ("true", "false"):
        return int(text == "true")
    if dense := re.fullmatch(r"dense<(-?\d+)>", text):
        count = re.match(r"vector<(\d+)x", operation.types)
        return (int(dense[1]),) * int(count[1])  # type: ignore[index]
    if operation.types == "f32":
        bits = text.startswith("0x")
        return struct.unpack("<f", int(text, 16).to_bytes(4, "little"))[0] if bits else float(np.float32(float(text)))
    if re.fullmatch(r"(i\d+|index)", operation.types):
        return int(text)
    raise NotImplementedError(f"arith.constant {text} : {operation.types}")


def _wrapped(value: int, type_: str) -> int:
    """As a signed number of so many bits, i1 and index as they are."""
    if type_ == "i1":
        return value & 1
    bits = 64 if type_ == "index" else int(type_[1:])
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def _integers(compute: Callable[..., int]) -> Callable[..., int]:
    return lambda operation, *x: _wrapped(compute(*x), operation.types.split(" to ")[-1])


def _floats(compute: Callable[..., Any]) -> Callable[..., float]:
    def of(operation: Operation, *x: float) -> float:
        if operation.types != "f32":
            raise NotImplementedError(f"{operation.name} : {operation.types}")
        return float(compute(*map(np.float32, x)))

    return of


def _bits(value: int, type_: str) -> int:
    return value & (1 << int(type_[1:])) - 1


def _truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _compare(operation: Operation, x: int, y: int) -> int:
    match = re.match(r"(\w+),", operation.text)
    which = match[1] if match else ""
    if which[:1] == "u":
        x, y = _bits(x, operation.types), _bits(y, operation.types)
    compare = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}
    return int(compare[which[-2:]])


def _shift_pointer(operation: Operation, address: int, by: Any) -> int:
    item = re.match(r"!cute\.ptr<(\w+), gmem", operation.result_types[0])
    if item is None or not isinstance(by, int):
        raise NotImplementedError(f"cute.add_offset on a host: {operation.types}")
    return address + by * ITEMS[item[1]].itemsize


SAME = ("cuda.cast", "cute.assume", "cute.to_int_tuple", "cute.make_tiled_copy", "cute.make_tiled_mma")
FILLED = ("int_tuple", "shape", "stride", "coord", "tile")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*SAME, "cute.fast_divmod.create_divisor"), lambda operation, x: x),
    **dict.fromkeys((f"cute.make_{x}" for x in FILLED), _filled),
    "arith.constant": _constant,
    "arith.addi": _integers(lambda x, y: x + y),
    "arith.subi": _integers(lambda x, y: x - y),
    "arith.muli": _integers(lambda x, y: x * y),
    "arith.divsi": _integers(_truncated),
    "arith.remsi": _integers(lambda x, y: x - y * _truncated(x, y)),
    "arith.floordivsi": _integers(lambda x, y: x // y),
    "arith.ceildivsi": _integers(lambda x, y: -(-x // y)),
    "arith.minsi": _integers(min),
    "arith.maxsi": _integers(max),
    "arith.andi": _integers(lambda x, y: x & y),
    "arith.ori": _integers(lambda x, y: x | y),
    "arith.xori": _integers(lambda x, y: x ^ y),
    "arith.shli": _integers(lambda x, y: x << y),
    "arith.extsi": _integers(lambda x: x),
    "arith.trunci": _integers(lambda x: x),
    "arith.extui": lambda operation, x: _bits(x, operation.types.split(" to ")[0]),
    "arith.cmpi": _compare,
    "arith.select": lambda operation, which, x, y: x if which else y,
    "arith.mulf": _floats(np.multiply),
    "arith.addf": _floats(np.add),
    "arith.subf": _floats(np.subtract),
    "arith.divf": _floats(np.divide),
    "cute.make_atom": lambda operation, *values: Atom(values, operation.operand_types),
    "cute.make_layout": lambda operation, shape, stride: Layout(shape, stride),
    # Whose strides are static
    "cute.make_identity_layout": lambda operation, shape: template(operation.result_types[0])._replace(shape=shape),
    "cute.make_view": lambda operation, *x: (Coordinates if operation.types.startswith("!cute.coord") else View)(*x),
    "cute.get_iter": lambda operation, x: x[0],
    "cute.group_modes": _group,
    "cute.crd2idx": _offset,
    "cute.add_offset": _shift_pointer,
    "cute.get_layout": lambda operation, x: x.layout,
    "cute.get_shape": lambda operation, layout: layout.shape,
    "cute.get_stride": lambda operation, layout: layout.stride,
    "cute.get_leaves": lambda operation, x: [*leaves(x)],
    "cute.get_scalars": lambda operation, x: [number for number, _ in dynamic(template(operation.types), x)],
    "cute.get": _get,
    "cute.select": _select,
    "cute.slice": _slice,
    "cute.size": _size,
    "cute.ceil_div": _ceil_div,
    "cute.tuple_add": _elementwise(lambda x, y: x + y),
    "cute.tuple_sub": _elementwise(lambda x, y: x - y),
    "cute.tuple_mul": _elementwise(lambda x, y: x * y),
    "cute.tuple_div": _elementwise(_natural(lambda x, y: x // y)),
    "cute.tuple_mod": _elementwise(_natural(lambda x, y: x % y)),
    "cute_nvgpu.atom.make_non_exec_tiled_tma_load": _copy_atom,
    "cute_nvgpu.atom.make_non_exec_tiled_tma_store": _copy_atom,
}

"""The host side of launches, interpreted (tests/ptx/host.py), of small IR that is written here."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ptx import Launch, Program, TensorMap, launches_of
from tests.ptx.launch import blob
from tests.ptx.parameters import divisor

TENSOR = '!cute.memref<bf16, gmem, align<16>, "(?,?,64):(?{i64 div=8},?{i64 div=8},1)">'
ALLOCATION = '%smem = cute.memref.alloca() {smem.partition_id = 1 : i32} : !cute.memref<i8, smem, align<16>, "96:1">'
ONE = '!cute.int_tuple<"?">'
ARGUMENTS = "%arg0: !tensor, %arg1: f32, %arg2: i32, %arg3: !cuda.stream"
GRID = """
    %lay = cute.get_layout(%arg0) : !tensor
    %0 = cute.get_shape(%lay) : (!cute.layout<"(?,?,64):(?{i64 div=8},?{i64 div=8},1)">) -> !cute.shape<"(?,?,64)">
    %e0, %e1, %e2 = cute.get_leaves(%0) : !cute.shape<"(?,?,64)">
    %itup = cute.to_int_tuple(%e1) : !cute.shape<"?"> to !cute.int_tuple<"?">
    %tile = cute.make_tile() : () -> !cute.tile<"32:1">
    %shp = cute.ceil_div(%itup, %tile) : !cute.int_tuple<"?">, !cute.tile<"32:1">
    %x = cute.get_scalars(%shp) : !cute.int_tuple<"?">
"""


def module(body: str, parameters: str = "%arg0, %arg1", types: str = "!tensor, f32", kernel: str = ALLOCATION) -> str:
    """IR of a function of a tensor, an fp32 number and an int32 number that launches one kernel with %x CTAs."""
    return f"""!tensor = {TENSOR}
module attributes {{gpu.container_module}} {{
  gpu.module @kernels {{
    cuda.kernel @scale(%arg0: !tensor, %arg1: f32) attributes {{cute.kernel}} {{
      {kernel}
    }}
  }}
  func.func @cutlass___call___scale({ARGUMENTS}) -> i32 attributes {{llvm.emit_c_interface}} {{
    %c1_i32 = arith.constant 1 : i32
    %c128_i32 = arith.constant 128 : i32
    %c0_i32 = arith.constant 0 : i32
{body}
    %s = cute.kernel_smem_size @kernels::@scale : i64
    %cfg = cuda.launch_cfg.create<max_attrs = 17 : i32> (blockDim = (%c128_i32, %c1_i32, %c1_i32), \
dynamicSmemBytes = %s, gridDim = (%x, %c1_i32, %c1_i32), stream = %arg3) : i32, i32, i32, i64, i32, i32, i32, \
!cuda.stream -> !cuda.launch_cfg<max_attrs = 17>
    %r = cuda.launch_ex @kernels::@scale<%cfg> ({parameters}) {{assume = true}} : \
!cuda.launch_cfg<max_attrs = 17>, ({types}) -> !cuda.result
    %c = cuda.cast %r : !cuda.result -> i32
    cuda.return_if_error %c : i32
    return %c0_i32 : i32
  }}
}}
"""


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape or (2, 70, 64), dtype=dtype)


def launch(body: str, *arguments: Any, **more: str) -> Launch:
    (only,) = launches_of(module(body, **more), arguments or (some(), 0.5, 3))
    return only


def test_a_launch_is_what_the_host_computes() -> None:
    x = some(2, 70, 128)[..., :64]
    ir = module(GRID)
    (got,) = launches_of(ir, [x, 0.5, None, 3])
    expected = [struct.pack("<Qiiqq", x.data_ptr(), 2, 70, 70 * 128, 128), struct.pack("<f", 0.5)]
    assert got == Launch("scale", expected, (3, 1, 1), (128, 1, 1), (1, 1, 1), 96, [])
    assert launches_of(ir, [x, (0.5, (3,))]) == [got]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((some(), 0.5), "got 2 arguments"),
        ((some(), 0.5, 3, 4), "got 4 arguments"),
        ((some(dtype=torch.float16), 0.5, 3), "torch.float16"),
        ((some(2, 70, 32), 0.5, 3), "32 where 64 is compiled in"),
        ((some(2, 70, 64).transpose(0, 2), 0.5, 3), "where"),
        ((some(70, 64), 0.5, 3), "is not"),
        ((some(2, 70, 68)[..., :64], 0.5, 3), "68 is not a multiple of 8"),
        ((some(2, 70, 72)[..., 4:68], 0.5, 3), "a tensor at"),
        ((0.5, some(), 3), "0.5 where the host takes"),
        ((some(), 0.5, 3.5), "3.5 where the host takes i32"),
        ((some(), some(), 3), "where the host takes f32"),
        ((some(), 0.5, 1 << 31), "does not fit 32 bits"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arguments_that_do_not_fit_are_refused(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        launches_of(module(GRID), arguments)


@pytest.mark.parametrize(
    ("line", "error", "problem"),
    [
        ("%y = cute.weave(%arg0) : !tensor -> i32", NotImplementedError, "cute.weave"),
        ("%y = arith.divui %arg2, %c1_i32 : i32", NotImplementedError, "arith.divui"),
        ("%y = arith.mulf %arg1, %arg1 : f64", NotImplementedError, "f64"),
        ('cute.print("Error: too much", %arg2) : i32', ValueError, "too much"),
        ("%y = cute.assume(%arg2) : (i32) -> !cute.i32<divby 2>", ValueError, "3 is not a multiple of 2"),
        (
            f"%i = cute.make_int_tuple(%arg2) : (i32) -> {ONE}\n"
            f'    %y = cute.tuple_mul(%i, %i) : ({ONE}, {ONE}) -> !cute.int_tuple<"(?,?)">',
            ValueError,
            "9 is not",
        ),
        (
            "%m = arith.subi %c0_i32, %arg2 : i32\n"
            f"    %i = cute.make_int_tuple(%m) : (i32) -> {ONE}\n"
            f"    %y = cute.tuple_div(%i, %i) : ({ONE}, {ONE}) -> {ONE}",
            NotImplementedError,
            "-3 divided by -3",
        ),
    ],
    ids=["operation", "arithmetic", "type", "error of the host", "divisibility", "structure", "rounding"],
)
def test_nothing_is_guessed(line: str, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        launch(f"{GRID}    {line}")


@pytest.mark.parametrize(
    ("operation", "x", "y", "expected"),
    [
        ("divsi", -7, 2, -3),
        ("remsi", -7, 2, -1),
        ("floordivsi", -7, 2, -4),
        ("ceildivsi", -7, 2, -3),
        ("muli", 1 << 20, 1 << 12, 0),
        ("addi", (1 << 31) - 1, 1, -(1 << 31)),
        ("shli", 3, 31, -(1 << 31)),
        ("minsi", -1, 2, -1),
        ("maxsi", -1, 2, 2),
    ],
)
def test_integers_are_of_32_bits(operation: str, x: int, y: int, expected: int) -> None:
    body = f"""
    %a = arith.constant {x} : i32
    %b = arith.constant {y} : i32
    %y = arith.{operation} %a, %b : i32
    %x = arith.constant 1 : i32"""
    got = launch(body, parameters="%y", types="i32").arguments
    assert got == [struct.pack("<i", expected)]


def test_parameters_are_structs() -> None:
    """A layout of 32 and 64 bits, a divisor, what is static, an atom's operands, and a number that is rounded."""
    body = f"""{GRID}
    %d = cute.fast_divmod.create_divisor(%arg2) : i32 -> !cute.fast_divmod_divisor<32>
    %false = arith.constant false
    %cst = arith.constant dense<0> : vector<4xi32>
    %static = cute.static : !cute.layout<"(8,64):(64,1)">
    %atom = cute.make_atom(%false, %cst) : (i1, vector<4xi32>) -> !cute_nvgpu.sm100.mma<128x64x16>
    %mma = cute.make_tiled_mma(%atom) : !cute.tiled_mma<!cute_nvgpu.sm100.mma<128x64x16>>
    %log2e = arith.constant 1.44269502 : f32
    %f = arith.mulf %arg1, %log2e : f32"""
    layout = '!cute.layout<"(?,?,64):(?{i64 div=8},?{i64 div=8},1)">'
    types = (
        f"{layout}, !cute.fast_divmod_divisor<32>, "
        '!cute.layout<"(8,64):(64,1)">, !cute.tiled_mma<!cute_nvgpu.sm100.mma<128x64x16>>, f32'
    )
    got = launch(body, parameters="%lay, %d, %static, %mma, %f", types=types).arguments
    rounded = torch.tensor(0.5) * torch.tensor(1.44269502)
    assert got == [struct.pack("<iiqq", 2, 70, 4480, 64), divisor(3).data, bytes(32), struct.pack("<f", rounded)]


@pytest.mark.parametrize("number", [1, 2, 3, 5, 7, 8, 128, 384, 641, (1 << 31) - 1])
def test_divisors_divide(number: int) -> None:
    """As kernels do with them: 32 bits, unsigned."""
    of, multiplier, first, second = struct.unpack("<iIBBxx", divisor(number).data)
    assert of == number
    draw = random.Random(number)
    for n in [0, 1, number - 1, number, (1 << 31) - 1, *(draw.randrange(1 << 31) for _ in range(1000))]:
        high = n * multiplier >> 32
        assert high + ((n - high) >> first) >> second == n // number


def test_shared_memory_has_partitions() -> None:
    def allocations(*facts: tuple[int, int, int]) -> str:
        return "\n".join(
            f"      %smem_{i} = cute.memref.alloca() {{smem.partition_id = {partition} : i32}} : "
            f'!cute.memref<i8, smem, align<{alignment}>, "{size}:1">'
            for i, (partition, alignment, size) in enumerate(facts)
        )

    assert launch(GRID, kernel="").shared_bytes == 0
    assert launch(GRID, kernel=allocations((1, 1024, 2048), (0, 8, 16), (1, 16, 48))).shared_bytes == 1024 + 2096
    with pytest.raises(NotImplementedError, match="aligned to 1024 bytes behind 16"):
        launch(GRID, kernel=allocations((1, 16, 16), (1, 1024, 1024)))


# Tensor maps


def copying(
    box: str = '"(64,32,1):(1@2,1@1,1@0)"', bits: int = 32 * 64 * 16, swizzle: str = "S<3,4,3> o 0 o ", how: str = ""
) -> str:
    kind = "composed_layout" if swizzle else "layout"
    shared = f'!cute.{kind}<"{swizzle}(32,64):(64,1)">'
    atom = f"!cute_nvgpu.atom.non_exec_tiled_tma_load<sm_90, bf16, copy_bits = {bits}, tma_gbasis = <{box}>>"
    return f"""{GRID}
    %layout = cute.static : {shared}
    %tiles = cute.static : !cute.layout<"(32,64):(1@1,1@2)">
    %atom, %coords = cute_nvgpu.atom.make_non_exec_tiled_tma_load(%arg0, %layout, %tiles) <{{kind = <sm_90> \
num_multicast = {how or 1}}}> : (!tensor, {shared}, !cute.layout<"(32,64):(1@1,1@2)">) -> \
({atom}, !cute.coord_tensor<"(0,0,0)", "(?,?,64):(1@2,1@1,1@0)">)"""


COPIED = {
    "parameters": "%atom, %coords",
    "types": '!cute_nvgpu.atom.non_exec_tiled_tma_load<sm_90>, !cute.coord_tensor<"(0,0,0)", "(?,?,64):(1@2,1@1,1@0)">',
}


@pytest.mark.parametrize(("swizzle", "size"), [("S<3,4,3> o 0 o ", 128), ("", 0)])
def test_a_copy_atom_is_a_tensor_map(swizzle: str, size: int) -> None:
    x = some(2, 70, 128)[..., :64]
    got = launch(copying(swizzle=swizzle), x, 0.5, 3, **COPIED)
    strides = 2, 2 * 128, 2 * 70 * 128
    assert got.tensor_maps == [TensorMap(x.data_ptr(), 2, "bf16", (64, 70, 2), strides, (64, 32, 1), size)]
    assert got.arguments == [blob(0), struct.pack("<ii", 2, 70)]


@pytest.mark.parametrize(
    ("how", "error", "problem"),
    [
        ({"how": "2"}, NotImplementedError, "TMA to 2 CTAs"),
        ({"bits": 1}, NotImplementedError, "other bits"),
        ({"box": '"(64,32,1):(1@2,2@1,1@0)"'}, NotImplementedError, "along"),
        ({"swizzle": "S<3,3,3> o 0 o "}, NotImplementedError, "shared memory as"),
        ({"swizzle": "S<2,4,3> o 0 o "}, ValueError, "swizzle of 64"),
    ],
    ids=["multicast", "bits", "steps", "unknown swizzle", "narrow swizzle"],
)
def test_other_copies_are_refused(how: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        launch(copying(**how), **COPIED)


# Against PTX

PTX = """.visible .entry scale(
	.param .align 8 .b8 scale_param_0[32],
	.param .f32 scale_param_1
)
.reqntid 128, 1, 1
{
	ret;
}
"""


def test_a_launch_fits_its_kernel() -> None:
    Program(PTX).check(launch(GRID))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kernel": "other"}, "a launch of other"),
        ({"arguments": [bytes(32), bytes(8)]}, r"\[32, 8\] bytes"),
        ({"arguments": [bytes(32)]}, r"\[32\] bytes"),
        ({"block": (64, 1, 1)}, "a block of"),
        ({"shared_bytes": 1 << 18}, "shared_bytes is 262144"),
        ({"cluster": (2, 1, 1)}, "in clusters of"),
        ({"grid": (0, 1, 1)}, "a grid of"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_launches_that_do_not_fit_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Program(PTX).check(launch(GRID)._replace(**changes))

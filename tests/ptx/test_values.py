"""The interpreter of PTX (tests/ptx/), and the BLAS that its sums must not depend on."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

from tests import ptx

pytestmark = pytest.mark.blas

SAME_KERNELS = {"Zen": "Haswell", "Prescott": "Katmai"}
"""CPUs for which OpenBLAS takes another one's. It takes this machine's for a name that it does not know."""


def test_the_blas_is_the_one_that_was_asked_for() -> None:
    """Or tests marked `blas` would show nothing: OPENBLAS_CORETYPE names the kernels of NumPy's own OpenBLAS."""
    asked = os.environ.get("OPENBLAS_CORETYPE")
    if asked is None:
        return
    (library,) = (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_*")
    name = ctypes.CDLL(str(library)).scipy_openblas_get_corename64_
    name.restype = ctypes.c_char_p
    assert name().decode() == SAME_KERNELS.get(asked, asked)


def bf16(*shape: int) -> np.ndarray:
    values = np.random.default_rng(1).normal(size=shape).astype("f4")
    return ptx.bf16_numbers(ptx.bf16_bits(values)).reshape(shape)


def test_products_are_summed_in_order() -> None:
    """Bit for bit, of a warp's tiles and of a warpgroup's."""
    for left, right in ((bf16(2, 16, 16), bf16(2, 16, 8)), (bf16(4, 16, 16), bf16(64, 16).T)):
        got = ptx.product(left, right)
        for place in np.ndindex(*got.shape):
            *batch, i, j = place
            column = right[(*batch, slice(None), j)] if right.ndim == 3 else right[:, j]
            total = np.float32(0)
            for x, y in zip(left[(*batch, i)], column, strict=True):
                total = np.float32(total + x * y)
            assert got[place] == total


def test_products_of_a_row_are_the_same_bits_wherever_it_lies() -> None:
    left, right = bf16(4, 16, 16), bf16(128, 16).T
    whole = ptx.product(left, right)
    assert np.array_equal(ptx.product(left[:, ::-1], right), whole[:, ::-1])
    assert np.array_equal(ptx.product(left[1:2, 3:4], right[:, 5:6]), whole[1:2, 3:4, 5:6])

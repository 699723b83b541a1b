"""The backward from probabilities: launches of the public function, lowered by triton-ascend, executed, gated."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ascend_kernels.launch import recording
from ascend_kernels.neighborhood import dense_backward
from dispatch import neighborhood_attention_backward
from tests.ascend.lowered import proof
from tests.ascend.lowered.neighborhood_gates import DTYPES, executed
from tests.ascend.lowered.neighborhood_launches import BACKWARD, PATHS
from tests.support import backward_cases, cases


@pytest.mark.ascend
@pytest.mark.parametrize(("case", "path", "dtype"), cases.product(BACKWARD, PATHS, DTYPES), ids=str)
def test_cases(case: str, path: str, dtype: torch.dtype) -> None:
    inputs, window = backward_cases.make(dtype=dtype, **BACKWARD[case])
    call = partial(neighborhood_attention_backward, *inputs, **window, path=path, backend="ascend")
    backward_cases.assert_gradients(executed(call), inputs, window, case)


@pytest.mark.ascend
def test_plain_and_persistent_give_the_same_bits() -> None:
    inputs, window = backward_cases.make(150, dim=80, heads=8, kv_heads=4, batch=2, dtype=torch.bfloat16, dense=True)
    results = []
    for persistent in (False, True):
        with recording(run=False) as launches:
            results.append(dense_backward.backward(*inputs, **window, backend="ascend", persistent=persistent))
        assert [one.grid for one in launches] == ([(20,)] * 3 if persistent else [(48,), (48,), (48,)])
        proof.execute(launches)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, *cases.rest(torch.float16, torch.bfloat16)], ids=str)
def test_compiles_for_sm_90(dtype: torch.dtype) -> None:
    inputs, window = backward_cases.make(200, dim=128, dtype=dtype, dense=True)
    with recording(run=False) as launches:
        neighborhood_attention_backward(*inputs, **window, path="dense", backend="triton")
    assert len(launches) == 3
    proof.assert_compiles(launches)

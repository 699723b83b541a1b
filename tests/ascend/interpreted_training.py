"""Training through Triton's interpreter; test_neighborhood_module.py runs this file in a process of its own, since
TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

from tests.support.neighborhood_training import WINDOWS, assert_same_curve


def test_trains_like_plain_pytorch() -> None:
    """Fewer steps than elsewhere, of one sequence: the interpreter takes about a tenth of a second for each launch."""
    curve = assert_same_curve("triton", steps=20, batch=1, **WINDOWS["causal, dilated"])
    assert curve[-5:].mean() < 0.8 * curve[:5].mean()

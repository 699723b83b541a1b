"""Functions that torch.compile calls as they are instead of tracing them, at the price of a break in its graph.

Imported where a graph meets one of them: `torch.compiler.disable` imports Dynamo, which takes long.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import dispatch
from nsa.common.operators import break_graph
from nsa.inputs import NSAAux

nsa_forward_aux: Callable[..., tuple[Tensor, NSAAux]] = break_graph(getattr(dispatch, "nsa_forward_aux"))  # noqa: B009 (mypy would go in a circle)

"""Run a function eagerly when torch.compile traces its caller, at the cost of a graph break.

Imported lazily, because `torch.compiler.disable` imports Dynamo, which is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa.common.operators import break_graph


@break_graph
def call_as_is(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` without tracing it."""
    return function(*args, **kwargs)

"""Call a function as it is where torch.compile traces its caller, at the price of a break in the graph.

Imported where a graph meets such a call: `torch.compiler.disable` imports Dynamo, which takes long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa.common.operators import break_graph


@break_graph
def call_as_is(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, which Dynamo does not trace."""
    return function(*args, **kwargs)

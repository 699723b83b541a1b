"""Functions that torch.compile calls as they are instead of tracing them, at the price of a break in its graph.

Imported where a graph meets one of them: `torch.compiler.disable` imports Dynamo, which takes long.
"""

from __future__ import annotations

from nsa import api
from nsa.common.operators import break_graph

nsa_forward_aux = break_graph(api.nsa_forward_aux)

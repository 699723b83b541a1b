"""NSA fields of a model's config: the options, the source of gates, and the initial gates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from nsa.config import NSAConfig

BRANCHES = ("compressed", "selected", "window")

GATES = ("hidden", "query", "learned")
"""Source of a converted layer's gates: the hidden states, the rotated queries, or one number per head."""

GATE_INIT = (0.05, 0.9, 0.05)
"""Initial gates of the compressed, selected and window branch, close to dense attention: for texts of up to k·l' tokens
the selected branch alone is dense attention."""


LEFT_OUT = ("compress", "causal")
"""Options with a fixed value in a language model."""


def options_dict(config: NSAConfig) -> dict[str, Any]:
    """Convert the options to a dict for JSON.

    Raises:
        ValueError: for options that a causal model's config cannot hold.
    """
    if not config.causal:
        raise ValueError("causal must be True in a language model, got False")
    if config.compress != "mean":
        raise ValueError(f"compress must be 'mean': a config holds no functions, got {config.compress!r}")
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in LEFT_OUT}


def options_of(config: Any) -> NSAConfig:
    """Options in a model's config; `NSAConfig.paper()` if there are none.

    Raises:
        TypeError, ValueError: as NSAConfig, for invalid options in `nsa_config`.
    """
    given = getattr(config, "nsa_config", None)
    if given is None:
        return NSAConfig.paper()
    if isinstance(given, NSAConfig):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"nsa_config must be a dict of NSAConfig's options, got {type(given).__name__}")
    return NSAConfig(**given)


def check_gates(gates: Any) -> str:
    """Return the source of gates, or raise ValueError if it is unknown."""
    if gates not in GATES:
        raise ValueError(f"gates must be one of {', '.join(map(repr, GATES))}, got {gates!r}")
    return str(gates)


def check_gate_init(values: Any) -> list[float]:
    """Check and return the initial gates of the three branches.

    Raises:
        TypeError, ValueError: naming them and what was expected.
    """
    values = GATE_INIT if values is None else values
    if not isinstance(values, Sequence) or not all(isinstance(value, (int, float)) for value in values):
        raise TypeError(f"gate_init must be three numbers, got {values!r}")
    if len(values) != len(BRANCHES) or not all(0 < value < 1 for value in values):
        raise ValueError(f"gate_init must be three numbers between 0 and 1, for {', '.join(BRANCHES)}, got {values!r}")
    return [float(value) for value in values]


def logit(gate: float) -> float:
    """Inverse sigmoid."""
    return math.log(gate / (1 - gate))

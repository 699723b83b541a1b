"""Keyword arguments of public functions: written-out signatures, and errors for keywords of other libraries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import update_wrapper, wraps
from typing import Any, TypeVar, cast

from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])

PACK = "pack documents with cu_seqlens instead of padding them"
ONE_BY_ONE = "attend to each document in a separate call instead of padding them"

NO_MASK = "there is no attention mask"
NO_WEIGHTS = "there are no attention weights to return"
NO_DROPOUT = "there is no dropout of attention weights"
_SCALE = "the factor of the logits is the option softmax_scale"
FOREIGN = {
    "attention_mask": NO_MASK,
    "attn_mask": NO_MASK,
    "key_padding_mask": NO_MASK,
    "need_weights": NO_WEIGHTS,
    "output_attentions": NO_WEIGHTS,
    "dropout": NO_DROPOUT,
    "dropout_p": NO_DROPOUT,
    "scale": _SCALE,
    "scaling": _SCALE,
    "sm_scale": _SCALE,
    "is_causal": "the option is causal",
    "enable_gqa": "H may be any multiple of H_kv without it",
}
"""Keywords of PyTorch's, Hugging Face's and FlashAttention's attention with no counterpart or another name here."""


def advice(name: str, instead_of_mask: str) -> str:
    """Reason why a keyword in FOREIGN is not supported, and its replacement."""
    return f"{FOREIGN[name]}, {instead_of_mask}" if FOREIGN[name] == NO_MASK else FOREIGN[name]


def unknown_keywords(unknown: Sequence[str], known: Sequence[str], instead_of_mask: str) -> TypeError:
    """Error for unknown keywords, with their replacement or a similar name."""
    hints = [advice(name, instead_of_mask) for name in unknown if name in FOREIGN]
    misspelt = [] if is_compiling() else [name for name in unknown if name not in FOREIGN]  # not traceable
    matches = [match for name in misspelt for match in get_close_matches(name, known, 1)]
    if matches:
        hints.append(f"did you mean {', '.join(matches)}?")
    suffix = f": {'; '.join(dict.fromkeys(hints))}" if hints else ""
    return TypeError(f"unknown keyword argument {', '.join(unknown)}{suffix}")


def explain_keywords(instead_of_mask: str) -> Callable[[F], F]:
    """Make a function raise `unknown_keywords` instead of Python's own TypeError."""

    def decorate(function: F) -> F:
        names = tuple(inspect.signature(function).parameters)

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            unknown = [name for name in keywords if name not in names]
            if unknown:
                raise unknown_keywords(unknown, names, instead_of_mask)
            return function(*arguments, **keywords)

        return cast(F, call)

    return decorate


def signature_of(run: Callable[..., Any]) -> Callable[[F], F]:
    """Give `run` the name, signature and docstring of the decorated function, whose body never runs.

    The signature is written out for help(), editors, type checkers and the documentation. `run` has **keywords, to
    distinguish options that were given from defaults.
    """

    def decorate(declared: F) -> F:
        return cast(F, update_wrapper(run, declared))

    return decorate

"""Docstrings of the public names: complete by themselves, with examples that run on the CPU."""

from __future__ import annotations

import doctest
import inspect
import re
from typing import Any

import pytest
import torch

import dispatch
import nsa
import nsa.distributed
import nsa.neighborhood
import nsa.residual
from nsa.distributed import ContextParallel

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (nsa, dispatch, nsa.distributed, nsa.neighborhood, nsa.residual)
    for name in module.__all__
}
SHARDING = ("shard", "unshard", "positions", "shard_labels", "cross_entropy", "sum", "nsa", "neighborhood_attention")
METHODS = {
    f"{name}.{method}": getattr(owner, method)
    for name, owner in PUBLIC.items()
    for method in ("forward", "forward_aux", "per_tile", "paper", *(SHARDING if owner is ContextParallel else ()))
    if inspect.isclass(owner) and method in vars(owner)
}
NOT_CALLED = {"dispatch.BackendError"}
"""Public names that users catch and do not call."""


def sections(documented: Any) -> dict[str, str]:
    """The sections of a Google-style docstring by title; the text before the first has the title ""."""
    parts = re.split(r"^(Args|Attributes|Returns|Raises|Example):\n", inspect.getdoc(documented) or "", flags=re.M)
    return dict(zip(["", *parts[1::2]], parts[0::2], strict=True))


def described(section: str) -> set[str]:
    """The names that an Args section explains."""
    return set(re.findall(r"^    (\w+): \S", section, flags=re.M))


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_every_argument_is_explained(name: str) -> None:
    documented = {**PUBLIC, **METHODS}[name]
    parameters = set() if name in NOT_CALLED else set(inspect.signature(documented).parameters) - {"self"}
    found = sections(documented)
    assert found[""].strip()
    assert described(found.get("Args", found.get("Attributes", ""))) == parameters


@pytest.mark.parametrize("name", [name for name, item in {**PUBLIC, **METHODS}.items() if not inspect.isclass(item)])
def test_every_result_is_explained(name: str) -> None:
    assert sections({**PUBLIC, **METHODS}[name]).get("Returns", "").strip()


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSA_KERNELS_BACKEND", raising=False)
    torch.manual_seed(0)
    assert ">>>" in sections(PUBLIC[name]).get("Example", ""), "no example"
    run_examples(name, PUBLIC[name])


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if ">>>" in (method.__doc__ or "")])
def test_examples_of_methods_run(name: str) -> None:
    run_examples(name, METHODS[name], NSAConfig=nsa.NSAConfig)


def run_examples(name: str, documented: Any, **names: Any) -> None:
    """Run a docstring's examples; the failure shows what they printed."""
    text = inspect.getdoc(documented) or ""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    shown: list[str] = []
    outcome = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=shown.append)
    assert outcome.attempted > 0
    assert outcome.failed == 0, "".join(shown)


def test_one_option_has_one_default() -> None:
    """Signatures are written out, for `help` and editors, so the same options stand at several functions."""
    own = inspect.signature(nsa.neighborhood_attention).parameters
    for other in (
        nsa.neighborhood.neighborhood_attention_forward,
        nsa.NeighborhoodAttention,
        ContextParallel.neighborhood_attention,
    ):
        shared = {name: p for name, p in inspect.signature(other).parameters.items() if name in own}
        assert shared.keys() >= {
            "kernel_size",
            "dilation",
            "softmax_scale",
            "boundary",
            "causal",
            "algorithm",
            "backend",
        }
        for name, parameter in shared.items():
            assert (parameter.default, parameter.annotation) == (own[name].default, own[name].annotation), name


def test_functions_of_nsa_explain_every_option() -> None:
    """`help` of one function alone: options are documented once, at NSAConfig, and shown at each function."""
    options = described(sections(nsa.NSAConfig)["Args"])
    for function in (nsa.nsa, nsa.nsa_forward, nsa.nsa_forward_aux):
        assert options <= described(sections(function)["Args"])

"""Docstrings of the public names: complete by themselves, with examples that run on the CPU."""

from __future__ import annotations

import doctest
import importlib
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
from nsa.distributed.context import REFUSED
from nsa.integrations import fla

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (nsa, dispatch, nsa.distributed, nsa.neighborhood, nsa.residual)
    for name in module.__all__
} | {f"{fla.__name__}.{function.__name__}": function for function in (fla.fla_config, fla.layer_from_fla)}
CALLED_HERE = {
    "NSACache": {"append", "check_truncation", "copy_pages", "cut", "entry_rows", "grown", "take_rows"},
    "NSAConfig": {"num_compressed", "scale", "seed"},
    "NeighborhoodCache": {"followed_by", "keep"},
    "PageTable": {"add_layer", "check_new_layer", "load", "rows"},
    "Impl": {"load", "load_training", "refusal"},
    "BackwardCache": {"gradients"},
}
"""Methods of public classes that the package calls and users do not."""


def methods_for_users(owner: Any) -> set[str]:
    public = {name: getattr(owner, name) for name in vars(owner) if not name.startswith("_")}
    own = {name for name, value in public.items() if inspect.isfunction(value) or inspect.ismethod(value)}
    own -= {"extra_repr"}  # of torch.nn
    assert CALLED_HERE.get(owner.__name__, set()) <= own
    return own - CALLED_HERE.get(owner.__name__, set())


METHODS = {
    f"{name}.{method}": getattr(owner, method)
    for name, owner in PUBLIC.items()
    if inspect.isclass(owner)
    for method in sorted(methods_for_users(owner))
}


NOT_CALLED = {"dispatch.BackendError"}
"""Public names that users catch and do not call."""


def sections(documented: Any) -> dict[str, str]:
    """The sections of a Google-style docstring by title; the text before the first has the title ""."""
    parts = re.split(r"^(Args|Attributes|Returns|Raises|Examples):\n", inspect.getdoc(documented) or "", flags=re.M)
    return dict(zip(["", *parts[1::2]], parts[0::2], strict=True))


def described(section: str) -> set[str]:
    """The names that an Args section explains."""
    return set(re.findall(r"^    (\w+): \S", section, flags=re.M))


AS_NSA = "rguments are those of `nsa`."
"""In the docstrings of functions that explain only their other arguments."""


def assert_explained(documented: Any, parameters: set[str]) -> None:
    found = sections(documented)
    assert found[""].strip()
    explained = described(found.get("Args", found.get("Attributes", "")))
    if AS_NSA in found[""]:
        explained |= parameters & described(sections(nsa.nsa)["Args"])
    assert explained == parameters
    if not inspect.isclass(documented) and inspect.signature(documented).return_annotation not in (None, "None"):
        assert found.get("Returns", "").strip()


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_arguments_and_results_are_explained(name: str) -> None:
    documented = {**PUBLIC, **METHODS}[name]
    parameters = set() if name in NOT_CALLED else set(inspect.signature(documented).parameters) - {"self"}
    assert_explained(documented, parameters)


WITH_EXAMPLES = [*PUBLIC, *(name for name, method in METHODS.items() if ">>>" in (method.__doc__ or ""))]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSA_KERNELS_BACKEND", raising=False)
    torch.manual_seed(0)
    names = {"NSAConfig": nsa.NSAConfig} if name in METHODS else {}
    run_examples(name, {**PUBLIC, **METHODS}[name], **names)


def run_examples(name: str, documented: Any, **names: Any) -> None:
    """Run a docstring's examples; the failure shows what they printed."""
    text = inspect.getdoc(documented) or ""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    shown: list[str] = []
    outcome = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=shown.append)
    assert outcome.attempted > 0
    assert outcome.failed == 0, "".join(shown)


@pytest.mark.hf_extra
@pytest.mark.parametrize("name", ["transformers.convert", "minimax_m3.register"])
def test_functions_for_transformers_are_explained(name: str) -> None:
    module, _, function = name.partition(".")
    documented = getattr(importlib.import_module(f"nsa.integrations.{module}"), function)
    assert_explained(documented, set(inspect.signature(documented).parameters))
    run_examples(name, documented)


def test_options_of_nsa_are_those_of_its_config() -> None:
    """Written out at each function, so here held equal: defaults, types, order, and what `nsa` says of each."""
    own = inspect.signature(nsa.nsa).parameters
    options = list(inspect.signature(nsa.NSAConfig).parameters.values())
    assert [(p.name, p.default, p.annotation) for p in list(own.values())[3 : 3 + len(options)]] == [
        (p.name, p.default, p.annotation) for p in options
    ]
    assert sections(nsa.NSAConfig)["Args"].strip() in sections(nsa.nsa)["Args"]
    assert inspect.signature(nsa.nsa_forward) == inspect.signature(nsa.nsa)
    assert inspect.signature(nsa.nsa_forward_aux).parameters == own
    of_ranks = dict(inspect.signature(nsa.distributed.ContextParallel.nsa).parameters)
    del of_ranks["self"]
    assert list(of_ranks.items()) == [(name, p) for name, p in own.items() if name not in REFUSED]

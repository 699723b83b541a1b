"""Every test: fixed seeds, uninitialised memory filled with NaN, no skip but for absent hardware, toolchain, extra."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from cute_kernels.runtime.device import TARGET_VARIABLE, compute_capability
from dispatch.device import CUDA_EXTRA, PACKAGES, version_of
from tests.support.hardware import out_of_memory, refused, without_cute, without_sm_90
from tests.support.poison import has_gpu, poison

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,  # the same examples in every run; FUZZ_EXAMPLES draws others
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("default")

os.environ.setdefault("NSA_KERNELS_JIT_CACHE", "0")  # of this process and its children: not the user's own

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker would start a thread per core; they would wait for each other in busy loops and slow compilers down.
    torch.set_num_threads(1)

UNMEASURED = re.compile(r"right_or_refused|a_bad_value_stays")
"""In names of tests of drawn calls that cover nothing that others do not, and run slower measured."""
HARDWARE = {"cuda": torch.cuda.is_available}
EXTRAS = {
    "cuda": {
        package.distribution: package.module.partition(".")[0] for package in PACKAGES if package.extra == CUDA_EXTRA
    },
    "hf": {name: name for name in ("transformers", "accelerate", "peft")},
}
"""Extras that tests may need: distributions, and the modules that they bring."""
MAY_SKIP = {*HARDWARE, "ascend", *(f"{extra}_extra" for extra in EXTRAS)}
"""`ascend`: tests/ascend/lowered/conftest.py skips these without their toolchain; `.ci/run` has it."""


@pytest.fixture(autouse=True)
def _seeded_and_poisoned() -> Iterator[None]:
    # Without a GPU torch.manual_seed keeps, of each call, what to seed once there is one, with the stack at the time
    (torch.manual_seed if has_gpu() else torch.default_generator.manual_seed)(20502)
    poison(True)
    yield
    poison(False)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["frames"]:
        dynamo.reset()  # else what one test compiles counts against the recompilations that another may need
        dynamo.utils.counters.clear()


@pytest.fixture(scope="module", autouse=True)
def _without_what_stays() -> None:
    """Modules and tests, a million objects, stay until the end: the collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU with everything installed, as far as dispatch's checks can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("dispatch.impl.package_problem", lambda module, device_type: None)
    monkeypatch.setenv(TARGET_VARIABLE, "sm_90a")
    compute_capability.cache_clear()
    yield
    compute_capability.cache_clear()


@pytest.fixture
def outcomes(record_property: Callable[[str, object], None]) -> Iterator[Counter[str]]:
    """How often each kind of outcome of a drawn call came; tests/support/fuzz_report.py writes them down."""
    counts: Counter[str] = Counter()
    yield counts
    record_property("outcomes", dict(counts))


def pytest_addoption(parser: pytest.Parser) -> None:
    for extra in EXTRAS:
        parser.addoption(
            f"--require-{extra}-extra",
            action="store_true",
            help=f"fail, not skip, what needs packages of the `{extra}` extra that are not installed",
        )
    parser.addoption("--full", action="store_true", help="run the tests marked `full`, too: `make test-full`")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or nanobind takes what stays for leaks


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        # Of tests that run others in a child process
        os.environ["PYTEST_ADDOPTS"] = f"{os.environ.get('PYTEST_ADDOPTS', '')} --full".lstrip()


def without_extra(config: pytest.Config, extra: str) -> str | None:
    """Why tests that need an extra may skip here, or None: they must run."""
    if extra == "hf" and sys.version_info < (3, 11):
        return "needs Python 3.11, as transformers 5.23 does"
    absent = [distribution for distribution in EXTRAS[extra] if version_of(distribution) is None]
    if config.getoption(f"--require-{extra}-extra") or not absent:
        return None
    return f'needs {", ".join(absent)}, not installed here: pip install -e ".[{extra}]"'


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A module of tests that cannot be imported without an extra skips as a whole."""
    report = yield
    error = report.call.excinfo.value.__cause__ if report.failed else None
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        for extra, modules in EXTRAS.items():
            reason = without_extra(collector.config, extra) if missing in modules.values() else None
            if reason is not None:
                report.outcome, report.longrepr = "skipped", (str(collector.path), None, f"Skipped: {reason}")
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    if config.pluginmanager.hasplugin("_cov"):
        for item in items:
            if UNMEASURED.search(item.nodeid):
                item.add_marker("no_cover")
    reasons = {extra: without_extra(config, extra) for extra in EXTRAS}
    for item in items:
        for extra, reason in reasons.items():
            if reason is not None and item.get_closest_marker(f"{extra}_extra"):
                item.add_marker(pytest.mark.skip(reason=reason))
        for marker, present in HARDWARE.items():
            if item.get_closest_marker(marker) and not present():
                item.add_marker(pytest.mark.skip(reason=f"needs {marker} hardware, this machine has none"))
        of_cute = item.get_closest_marker("cuda") and item.get_closest_marker("cuda_extra")
        reason = (without_cute() if of_cute else None) or without_sm_90([*item.iter_markers("sm_90")])
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Any other skip is a failure: a check that looks green must have run."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    error = call.excinfo.value if call.excinfo and item.get_closest_marker("cuda") else None
    reason = None if error is None else out_of_memory(error) or refused(item, error)
    if reason is not None:
        report.outcome, report.longrepr = "skipped", (str(item.path), None, f"Skipped: {reason}")
    if report.skipped and not any(item.get_closest_marker(marker) for marker in MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} was skipped, but only tests marked {sorted(MAY_SKIP)} may skip: {report.longrepr}"
        )

"""Routing: the rule, its reasons, and importing with packages absent or broken."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import dispatch
import nsa
from dispatch import BackendError, Call, Impl, explain, registry, resolve
from dispatch.__main__ import main, summary
from dispatch.device import PACKAGES, absence, device_types, package_states, triton_clash
from dispatch.table import ROWS

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# Rows of a made-up op; each names functions of this module.
def fast(*_: Any) -> str:
    return "fast"


def slow(*_: Any) -> str:
    return "slow"


def needs_cuda(call: Call) -> str | None:
    return None if call.device_type == "cuda" else f"needs a CUDA tensor, got one on {call.device}"


def takes_named(call: Call) -> str | None:
    return None if call.device_type == "cpu" or call.named else "runs only when named"


HERE = __name__
MADE_UP = (
    Impl("op", "fast", f"{HERE}:fast", f"{HERE}:needs_cuda"),
    Impl("op", "broken", "no_such_module_here:run", f"{HERE}:takes_named"),
    Impl("op", "slow", f"{HERE}:slow", f"{HERE}:takes_named"),
)


def call(device: torch.device = CPU) -> Call:
    return Call("op", device, torch.float32)


def test_first_row_that_can_run_wins_and_missing_packages_of_a_better_one_are_told_once() -> None:
    registry._warn_once.cache_clear()
    assert resolve(call(CUDA), rows=MADE_UP).load()() == "fast"
    assert resolve(call(CPU), "slow", MADE_UP).backend == "slow"  # a backend that is named says nothing
    with pytest.warns(RuntimeWarning, match="op runs on slow, not on broken: importing no_such_module_here failed"):
        assert resolve(call(CPU), rows=MADE_UP).backend == "slow"  # past one refused and one that cannot be imported
    assert resolve(call(CPU), rows=MADE_UP).backend == "slow"


def test_every_refusal_has_a_reason() -> None:
    reasons = {verdict.impl.backend: verdict.reason for verdict in explain(call(), rows=MADE_UP)}
    assert reasons == {
        "fast": "needs a CUDA tensor, got one on cpu",
        "broken": "importing no_such_module_here failed: ModuleNotFoundError: No module named 'no_such_module_here'",
        "slow": None,
    }


@pytest.mark.parametrize("by_environment", [False, True], ids=["argument", "environment"])
def test_a_named_backend_never_falls_back(by_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_environment:
        monkeypatch.setenv("NSA_KERNELS_BACKEND", "fast")
    source = "NSA_KERNELS_BACKEND" if by_environment else "backend"
    name = None if by_environment else "fast"
    with pytest.raises(BackendError) as caught:
        resolve(call(CPU), name, MADE_UP)
    assert str(caught.value).splitlines() == [
        "no backend can run op on cpu in float32:",
        "  fast: needs a CUDA tensor, got one on cpu",
        f"  broken: not asked for: {source} names 'fast'",
        f"  slow: not asked for: {source} names 'fast'",
    ]


def test_argument_goes_before_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_KERNELS_BACKEND", "fast")
    assert resolve(call(CPU), "slow", MADE_UP).backend == "slow"
    monkeypatch.setenv("NSA_KERNELS_BACKEND", "")
    assert resolve(call(CPU), None, MADE_UP[::2]).backend == "slow"


def test_naming_is_what_lets_the_reference_run_on_a_device() -> None:
    assert resolve(call(CUDA), "slow", MADE_UP).backend == "slow"
    with pytest.raises(BackendError, match="slow: runs only when named"):
        resolve(call(CUDA), rows=MADE_UP[1:])


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="op must be one of op, got 'nothing'"):
        resolve(Call("nothing", CPU, torch.float32), rows=MADE_UP)
    with pytest.raises(ValueError, match="backend must be one of fast, broken, slow for op, got 'quick'"):
        explain(call(), "quick", MADE_UP)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dispatch.nothing


@pytest.mark.parametrize("impl", ROWS, ids=lambda impl: f"{impl.op}-{impl.backend}")
def test_rows_name_things_that_exist(impl: Impl) -> None:
    module, _, name = impl.check.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    if impl.backend == "reference":
        assert callable(impl.load())


def test_every_op_is_reached_through_dispatch_and_has_a_cpu_row() -> None:
    assert set(dispatch.OPS) == {impl.op for impl in ROWS}
    for op in dispatch.OPS:
        assert callable(getattr(dispatch, op))
        assert op in dir(dispatch)
        assert getattr(nsa, op, getattr(dispatch, op)) is getattr(dispatch, op), "a module of this name is in its place"
        assert resolve(Call(op, CPU, torch.float32)).backend == "reference"


def test_type_checkers_see_every_function() -> None:
    """They do not run `__getattr__`, and would take what it gives for Any."""
    tree = ast.parse(Path(dispatch.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {(alias.name, alias.asname, f"{node.module}:{alias.name}") for node in imports for alias in node.names} == {
        (name, name, target) for name, target in dispatch.FUNCTIONS.items()
    }


def test_deterministic_backward_on_a_device_is_refused_with_the_reason() -> None:
    asked = Call("nsa", CUDA, torch.float32, backward=True, options={"deterministic": True})
    with pytest.raises(BackendError, match="sums with atomics"):
        resolve(asked, "reference")


NEAR, MIX = "neighborhood_attention", "attention_residual"
F16, F64 = torch.float16, torch.float64
WIDE = {"kernel_size": 1 << 30}
TOO_WIDE = "supports bands of up to 536870912 slots, got kernel_size 1073741824"
REFUSALS: list[tuple[str, str, str, torch.dtype, dict[str, Any], str | None]] = [
    *((op, "triton", "cuda", F16, {}, None) for op in (NEAR, MIX)),
    *((op, "triton", "cuda", F64, {}, "float16, bfloat16 and float32, got float64") for op in (NEAR, MIX)),
    *((op, "ascend", "cuda", F16, {}, "runs on Ascend NPUs, got cuda") for op in (NEAR, MIX)),
    *((op, "ascend", "npu", F16, {}, "no Ascend NPU is visible") for op in (NEAR, MIX)),
    (NEAR, "triton", "cuda", F16, {"shape": (1, 9, 1, 257)}, "supports D up to 256, got 257"),
    (NEAR, "triton", "cuda", F16, {"shape": (1, 1 << 30, 1, 16)}, "supports N up to 536870912, got 1073741824"),
    (NEAR, "triton", "cuda", F16, {"shape": (1, (1 << 24) + 1, 32, 16)}, "all heads and sequences, got 536870944"),
    (NEAR, "triton", "cuda", F16, {"band": True, "kernel_size": 9}, None),
    (NEAR, "triton", "cuda", F16, {"algorithm": "flash", **WIDE}, None),
    (NEAR, "triton", "cuda", F16, {"algorithm": "band", **WIDE}, TOO_WIDE),
    (NEAR, "triton", "cuda", F16, {"algorithm": "dense", **WIDE}, TOO_WIDE),
    (NEAR, "triton", "cuda", F16, {"band": True, **WIDE}, TOO_WIDE),
    (NEAR, "triton", "cuda", F16, {"shape": (1, 20, 4, 16), "first_token": 12}, "needs as many queries as keys (cute"),
    (MIX, "triton", "cuda", F16, {"blocks": 64, "shape": (1, 70000, 8192)}, None),
    (MIX, "triton", "cuda", F16, {"blocks": 65}, "supports up to 64 blocks, got 65"),
    (MIX, "triton", "cuda", F16, {"shape": (1, 1, 1 << 21)}, "supports D up to 1048576, got 2097152"),
    (MIX, "triton", "cuda", F16, {"blocks": 16, "shape": (2, (1 << 25) + 1, 8)}, "sequences, got 1073741856"),
    (MIX, "triton", "npu", F16, {}, "runs on CUDA devices, got npu"),
    (MIX, "reference", "cuda", F16, {}, "only when named"),
    (MIX, "reference", "cpu", F64, {"blocks": 100}, None),
]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("op", "backend", "device", "dtype", "options", "reason"), REFUSALS)
def test_refusals_of_kernels(
    op: str, backend: str, device: str, dtype: torch.dtype, options: dict[str, Any], reason: str | None
) -> None:
    call = Call(op, device, dtype, options=options)
    found = {verdict.impl.backend: verdict.reason for verdict in explain(call)}[backend]  # of its last row
    assert found is None if reason is None else reason in str(found)


# Packages absent, broken, or in each other's way


def test_a_foreign_package_of_the_same_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "cute_kernels").mkdir()
    (tmp_path / "cute_kernels" / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import nsa"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "nsa-kernels needs its own package 'cute_kernels'" in done.stderr
    assert str(tmp_path / "cute_kernels" / "__init__.py") in done.stderr


def versions_of(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    def version(distribution: str) -> str:
        if distribution in installed:
            return "1.0"
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "version", version)


def test_the_two_tritons_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    versions_of(monkeypatch, "triton")
    assert triton_clash() is None
    versions_of(monkeypatch, "triton-ascend", "triton")
    for devices, advice in ((["cpu"], "triton (without triton-ascend)"), (["npu", "cpu"], "triton-ascend (without tr")):
        monkeypatch.setattr("dispatch.device.device_types", lambda devices=devices: devices)
        assert f"pip install {advice}" in str(triton_clash())


def test_package_states_report_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions_of(monkeypatch, "triton-ascend")

    def import_module(name: str) -> None:
        missing = {"cutlass.cute": "cutlass", "flash_attn.cute": "quack"}.get(name)
        if missing is not None:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(importlib, "import_module", import_module)
    states = {package.module: package for package in package_states()}
    assert len(states) == len(PACKAGES)
    assert (states["triton"].distribution, states["triton"].version) == ("triton-ascend", "1.0")
    assert states["triton"].problem == '1.0 is installed, not ==3.2.0: pip install "triton-ascend==3.2.0"'
    assert states["cutlass.cute"].problem == 'not installed: pip install "nsa-kernels[cuda]"'
    assert (
        states["flash_attn.cute"].problem == "broken: No module named 'quack': pip install \"flash-attn-4==4.0.0b36\""
    )


def test_npu_install_line_names_the_python_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatch.device.NPU_PYTHON_BEFORE", (3, 0))
    state = next(package for package in package_states() if package.module == "torch_npu")
    assert "on Python 3.9 to 3.11 (this is 3." in str(state.problem)


class Npu:
    """torch.npu with one device."""

    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda: "Ascend910B")


def test_absent_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, reason in ((None, "this torch is built without CUDA"), ("13.0", "no NVIDIA GPU is visible")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert absence("cuda") == reason
    assert absence("npu") == "torch_npu is not imported"
    assert device_types() == ["cpu"]
    monkeypatch.setattr(torch, "npu", Npu, raising=False)
    assert device_types() == ["npu", "cpu"]
    monkeypatch.setattr(Npu, "is_available", lambda: False)
    assert absence("npu") == "no Ascend NPU is visible"


def test_a_line_for_each_op_and_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main([])
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    shown = {(op, device): backend for op, device, backend in lines}
    assert len(lines) == len(shown) == 3 * len(dispatch.OPS)
    for op in dispatch.OPS:
        assert shown[op, "cpu"] == "reference"
        assert shown[op, "cuda"] == f"none: {absence('cuda')}"
        assert shown[op, "npu"] == f"none: {absence('npu')}"


def test_a_device_that_is_there_and_that_no_backend_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    verdicts = [verdict for verdict in explain(call(CUDA), rows=MADE_UP) if verdict.impl.backend != "fast"]
    broken, slow = verdicts
    assert summary("cuda", [broken, slow, slow]) == f"none: broken: {broken.reason}; slow: {slow.reason}"
    assert summary("cuda", explain(call(CUDA), rows=MADE_UP)) == "fast"


def test_the_table_is_whole_where_ops_lack_the_backend_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cute", "triton", "misspelt"):
        monkeypatch.setenv("NSA_KERNELS_BACKEND", name)
        main([])
        told = capsys.readouterr().out
        assert all(f"  {op} " in told for op in {impl.op for impl in ROWS})
        refusal = f"NSA_KERNELS_BACKEND must be one of triton, ascend, reference for attention_residual, got {name!r}"
        assert (refusal in told) == (name != "triton")

"""Command lines of scripts: `--help` needs no kernel language; wrong options are refused before any work."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "examples", "tools")
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
SCRIPTS = [file for file in FILES if '\nif __name__ == "__main__":\n' in (ROOT / file).read_text(encoding="utf-8")]
COMMANDS = [*SCRIPTS, "-m dispatch"]
ABSENT = ("cutlass", "flash_attn", "triton", "torch_npu", "quack", "fla", "liger_kernel", "matplotlib", "transformers")

CHILD = """
import contextlib, io, json, runpy, sys
from importlib.abc import MetaPathFinder

ABSENT, COMMANDS, ROOT = json.loads(sys.argv[1])

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def run(command, *arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if command.startswith("-m "):
                sys.argv = [command[3:], *arguments]
                runpy.run_module(command[3:], run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = f"{ROOT}/{command}".rpartition("/")[0]
                sys.argv = [command, *arguments]
                runpy.run_path(f"{ROOT}/{command}", run_name="__main__")
            status = "came to its end"
        except SystemExit as left:
            status = left.code
        except Exception as error:
            status = repr(error)
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}

sys.dont_write_bytecode = True
sys.meta_path.insert(0, Absent())
found = {command: [run(command, "--help"), run(command, "--no-such-option")] for command in COMMANDS}
print(json.dumps(found))
"""
"""Runs each command twice in one process, which imports torch once."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """To `--help`, and to an option that does not exist."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([ABSENT, COMMANDS, str(ROOT)])],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_help_helps_and_unknown_options_are_refused(command: str, answers: dict[str, list[dict[str, Any]]]) -> None:
    helped, refused = answers[command]
    assert helped["status"] == 0, helped["err"]
    assert helped["out"].startswith("usage: ")
    assert len(helped["out"].splitlines()) > 4, "says what the script is for"
    assert refused["status"] == 2, refused
    assert "unrecognized arguments: --no-such-option" in refused["err"]
    assert refused["out"] == ""


def test_an_ascii_stdout_ends_no_script() -> None:
    """Importing `bench`, as all that print other characters do, has them printed as "?"."""
    code = "import bench; print('1.2 ± 0.1, N²')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1.2 ? 0.1, N?\n"), done.stderr


TINY_TEXT = "--device=cpu --heads=2 --kv-heads=1 --width=32 --context=64 --block-size=8 --k=3 --w=8 --q-tile=16"
REFUSED: dict[str, dict[str, str]] = {
    "bench.bench_sparse_attn_e2e --device=cpu": {
        "--seqlens=4K,x": "must be a positive integer such as 4096 or 4K, got 'x'",
        "--modes=graph": "--modes must be among eager for this device and pass, got graph",
        "--preset=paper --num-cmp=16": "num_cmp_selected_blocks",
        "--recompute": "--recompute goes with --backward",
        "--backend=cute": "cute: runs on CUDA devices, got cpu",
    },
    "bench.bench_paper --device=cpu": {
        "--block-sizes=32,64": "takes one combination of options, got 2",
    },
    "bench.probe_max_seqlen --device=cpu": {
        "--backend=cute": "cute: runs on CUDA devices, got cpu",
        "--memory-limit=2GB": "must be a number above 0, got '2GB'",
    },
    "bench.bench_neighborhood_attention --device=cpu": {
        "--shapes 1,2,3": "must be tiny, liger, long or B,H,S,D,k[,dilation], got '1,2,3'",
        "--backend=triton": "triton (any window): runs on CUDA devices",
    },
    "bench.bench_attention_residual --device=cpu": {
        "--shapes 8,1,64": "must be tiny, stacked, lists or L,B,T,D[,list], got '8,1,64'"
    },
    "bench.bench_decode": {
        "--heads=4:1": "argument --heads: must be query/key heads such as 64/4, got '4:1'",
        "--backend=foo": "--backend must be one of cute, reference for nsa_with_cache, got 'foo'",
    },
    "bench.bench_context_parallel --device=cpu": {
        "--sizes=per_tile:600:4/2 --ranks=4": "every rank tokens, got [88, 256, 0, 256]"
    },
    "bench.soak": {"--steps=0": "--steps", "--minutes=nan": "--minutes", "--device=tpu": "--device"},
    f"examples.train_text {TINY_TEXT}": {
        "--variants=nsa,sparse": "must be among dense, nsa, window, no-compressed, no-selected, no-window",
        "--width=34 --heads=4": "--width must be a multiple of 2 * --heads, got 34 and 4",
        "--preset=paper --block-size=6": "--block-size must be a multiple of 4 with --preset paper, got 6",
        "--k=8": "--context must hold more than --k blocks of --block-size, or nothing is left to select",
        "--variants=dense --save-indices=x": "--save-indices needs variant nsa, got ['dense']",
        "--context-parallel=2": "must be the number of processes that torchrun starts, 1 here, got 2",
        "--context-parallel=1 --variants=dense,nsa": "--variants with dense does not go with --context-parallel",
        "--context-parallel=1 --cuda-graph": "--cuda-graph does not go with --context-parallel",
        "--cuda-graph": "--cuda-graph needs a CUDA device, got cpu",
        "--out=/dev/null/x": "--out: /dev/null/x.json cannot be written: ",
        "--backend=cute": "cute: runs on CUDA devices, got cpu",
    },
    "examples.needle --device=cpu --context=160 --block-size=8 --w=8 --needles=8 --questions=4 --layers=2": {
        "--questions=9": "--questions must be at most --needles, got 9 and 8",
        "--needles=13": "--context 160 has 12 slots for --needles before 4 windows of --w 8 and 4 --questions",
        "--layers=4": "--layers must be below 4, or windows upon windows reach the needles, got 4",
    },
    "examples.train_residual --device=cpu": {"--variants=sum,product": "must be among sum, attention, got 'product'"},
    "examples.convert_llama": {"--context=1": "--context must be at least 2, or no byte is predicted, got 1"},
    "tools.package_links": {
        "http://example.org": "must be an address that begins with https://, got 'http://example.org'"
    },
}
"""By script and usual options: options of which one is wrong, and what is told before any work."""


def refused() -> list[Any]:
    return [
        pytest.param(
            script, options, message, marks=[pytest.mark.hf_extra] * ("llama" in script), id=f"{name} {options}"
        )
        for script, of_script in REFUSED.items()
        for options, message in of_script.items()
        for name in [script.partition(" ")[0]]
    ]


@pytest.mark.parametrize(("script", "options", "message"), refused())
def test_wrong_options_are_named(
    script: str, options: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")  # as torchrun sets it
    module, *usual = script.split()
    with pytest.raises(SystemExit) as left:
        importlib.import_module(module).main([*usual, *options.split()])
    assert left.value.code not in (0, None)
    assert message in " ".join(f"{capsys.readouterr().err} {left.value}".split())

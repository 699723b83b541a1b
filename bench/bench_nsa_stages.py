"""Where the time of NSA's forward on an NVIDIA GPU goes: each stage beside its floor, and gating and host time alone.

A stage's floor is the larger of its bytes over the copy bandwidth measured here and its operations over the peak.
Writes OUT.json: {device, versions, commit, copy_tbs, peak_tflops, rows: [{n, num_cmp, stage, ms, floor_ms, share}]}.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.common import positive
from bench.inputs import Sizes, make_problem
from bench.report import LOCAL_RESULTS, command_line, environment, write_json
from bench.roofline import Peaks, attention_flops, choose_peaks, mean_keys, score_flops
from bench.timing import GIB, capture, measure, peak_memory
from cute_kernels import forward
from cute_kernels.compress import tile_means
from cute_kernels.gate import gated_sum
from cute_kernels.score import top_blocks
from nsa import NSAConfig, nsa_forward
from nsa.tensors import NSAInputs

HEADS, KV_HEADS, DIM = 8, 2, 128
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Row:
    n: int
    num_cmp: int | None
    stage: str
    ms: float
    floor_ms: float
    share: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", default="8K,32K,128K,1M", help="default: %(default)s")
    parser.add_argument("--peak-tflops", type=float, help="of the device; default: known of H100 and H200")
    parser.add_argument("--out", default=str(LOCAL_RESULTS / "stages"), help="results, without suffix")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    facts = environment(DEVICE)
    peaks: Peaks | None = choose_peaks(facts["device"], args.peak_tflops, None)
    if peaks is None:
        parser.error(f"--peak-tflops: not known of {facts['device']}")
    copy_tbs = copy_bandwidth()
    print(f"copy: {copy_tbs:.2f} TB/s")
    rows: list[Row] = []
    for n in map(positive, args.seqlens.split(",")):
        for num_cmp in (None, 16):
            some = stages(n, NSAConfig(num_cmp_selected_blocks=num_cmp), copy_tbs, peaks.tflops)
            rows += some
            for row in some:
                share = f"{row.share:6.0%}" if row.floor_ms else ""
                print(f"{n:>8} {num_cmp!s:>5} {row.stage:<12}{row.ms:9.4f} ms  floor {row.floor_ms:8.4f} {share}")
    content = {
        **facts,
        "copy_tbs": copy_tbs,
        "peak_tflops": peaks.tflops,
        "gating": gating(copy_tbs),
        "host_us": host_time(),
        "score_extra_mib_at_3m": score_memory(3 << 20),
        "command": command_line(),
        "rows": [asdict(row) for row in rows],
    }
    for name in ("gating", "host_us", "score_extra_mib_at_3m"):
        print(name, content[name])
    write_json(Path(args.out).with_suffix(".json"), content)


def milliseconds(call: Callable[[], Any]) -> float:
    """Median GPU time of a captured graph's replays: no host time in it."""
    call()
    return measure(capture(call, DEVICE).replay, DEVICE, seconds=0.5, most=10).ms_p50


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy, read and written bytes counted; as a graph's node it would be slower."""
    source = torch.empty(GIB, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * GIB / measure(lambda: target.copy_(source), DEVICE, seconds=0.1).ms_p50 / 1e9


def random_inputs(n: int, batch: int = 1, heads: int = HEADS, kv_heads: int = KV_HEADS) -> NSAInputs:
    sizes = Sizes(batch, n, heads, kv_heads, DIM)
    problem = make_problem("random", sizes, device=DEVICE, dtype=torch.bfloat16)
    return NSAInputs(problem.q, problem.k, problem.v, gate_proj_weight=problem.gate_proj_weight)


def stages(n: int, config: NSAConfig, copy_tbs: float, tflops: float) -> list[Row]:
    """Each stage's time and floor for B=1, 8 heads over 2, D=128."""
    inputs, sizes = random_inputs(n), Sizes(1, n, HEADS, KV_HEADS, DIM)
    q, k, v, out = inputs.q, inputs.k, inputs.v, torch.empty_like(inputs.q)
    call = forward.prepare(inputs, config)
    plan, k_cmp, v_cmp, entries = call.plan, call.k_cmp, call.v_cmp, call.k_cmp.shape[1]
    means = tile_means(q, plan.tile)
    indices, cmp_indices = forward.select(plan, q, k_cmp, 0, n)
    part = forward.attend(call, 0, n, lse=False)

    def choose(blocks: Any) -> Callable[[], Tensor]:
        return lambda: top_blocks(means, k_cmp, blocks, keys=plan.entry, tile=plan.tile, tokens=n)

    def lists() -> Any:
        return forward.token_lists(plan, q, k, indices, 0), forward.entry_lists(plan, q, k_cmp, cmp_indices, 0)

    def attention(most: int, keys: int = n) -> float:
        return attention_flops(sizes, mean_keys(keys, most))

    row_bytes = n * HEADS * DIM * 2  # of q, or of an output
    scoring = score_flops(sizes, config)
    seen = entries if config.num_cmp_selected_blocks is None else config.num_cmp_selected_blocks * config.n_block_size
    work: list[tuple[str, Callable[[], Any], float, float]] = [  # name, call, bytes, operations
        ("compress", lambda: forward.compress(inputs, config), 2 * n * KV_HEADS * DIM * 2 * (1 + 1 / 64), 0),
        ("tile means", lambda: tile_means(q, plan.tile), row_bytes, 0),
        ("score", choose(plan.select), 0, scoring),
        *([] if plan.choose is None else [("score, cmp", choose(plan.choose), 0, scoring)]),
        ("lists", lists, 0, 0),
        (
            "compressed",
            lambda: forward.attend_compressed(plan, q, k_cmp, v_cmp, cmp_indices, 0, False),
            2 * row_bytes,
            attention(seen, entries),
        ),
        (
            "selected",
            lambda: forward.attend_selected(plan, q, k, v, indices, 0, False),
            2 * row_bytes,
            attention(config.num_selected_blocks * config.select_size),
        ),
        (
            "window",
            lambda: forward.attend_window(plan, q, k, v, 0, False),
            2 * row_bytes,
            attention(config.window_size),
        ),
        ("gate", lambda: forward.gate(call, part, 0, n, out), 5 * row_bytes, 0),
        ("all", lambda: nsa_forward(q, k, v, gate_proj_weight=inputs.gate_proj_weight, config=config), 0, 0),
    ]
    rows = []
    for name, stage, moved, operations in work:
        floor = max(moved / copy_tbs / 1e9, operations / tflops / 1e9)
        ms = milliseconds(stage)
        rows.append(Row(n, config.num_cmp_selected_blocks, name, ms, floor, floor / ms))
    return rows


def gating(copy_tbs: float) -> list[dict[str, float]]:
    """The gate alone at B=2, 32 heads of 128, beside the same in PyTorch."""
    results = []
    for n in (4 << 10, 16 << 10):
        inputs = random_inputs(n, batch=2, heads=32, kv_heads=8)
        q, weight = inputs.q, inputs.gate_proj_weight
        o_cmp, o_slc, o_win = (torch.randn_like(q) for _ in range(3))
        out = torch.empty_like(q)

        def in_torch() -> Tensor:
            gates = torch.sigmoid(torch.einsum("bnhd,hgd->bnhg", q, weight))  # noqa: B023 (called at once)
            return gates[..., 0:1] * o_cmp + gates[..., 1:2] * o_slc + gates[..., 2:3] * o_win  # noqa: B023

        ours = milliseconds(lambda: gated_sum(o_cmp, o_slc, o_win, out, q=q, gate_proj_weight=weight))  # noqa: B023
        floor = 5 * q.numel() * 2 / copy_tbs / 1e9
        results.append({"n": n, "ms": ours, "torch_ms": milliseconds(in_torch), "floor_ms": floor})
    return results


def host_time(n: int = 8 << 10, calls: int = 200) -> dict[str, float]:
    """Microseconds of host time per nsa_forward, and per call where calls follow each other, at a small N."""
    inputs = random_inputs(n)
    config = NSAConfig()

    def call() -> Tensor:
        return nsa_forward(inputs.q, inputs.k, inputs.v, gate_proj_weight=inputs.gate_proj_weight, config=config)

    call()
    torch.cuda.synchronize()
    times = []
    for i in range(calls):
        if i % 4 == 0:  # an empty queue, so that no launch waits for the GPU
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return {"p20": sorted(times)[calls // 5], "p50": statistics.median(times),
            "sustained": (time.perf_counter() - begin) / calls * 1e6}  # fmt: skip


def score_memory(n: int) -> float:
    """MiB that means, scoring and both selections need beyond their inputs."""
    inputs = random_inputs(n)
    config = NSAConfig(num_cmp_selected_blocks=16)
    call = forward.prepare(inputs, config)
    gib = peak_memory(lambda: forward.select(call.plan, inputs.q, call.k_cmp, 0, n), DEVICE)
    return (gib or 0.0) * 1024


if __name__ == "__main__":
    main()

"""The plan of a call of NSA: which kernels run it, or why none can.

    plan      all choices among kernels; call.py asks before a call runs
    refusal   its limits; support.py asks before a call is accepted

Both follow from options, sizes and the device; no value of a tensor is read. Needs torch alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor

from cute_kernels.fa4 import rules as fa4
from cute_kernels.limits import (
    MAX_BLOCKS,
    MAX_COMBINED_PARTIALS,
    MAX_COMBINED_SLOTS,
    MAX_COMBINED_WINDOW,
    MAX_ENTRIES,
    MAX_FORCED_KEYS,
    MAX_QUERY_OUTER_SLOTS,
    MAX_SIZE,
    MIN_QUERY_OUTER_GROUP,
    SELECT_UNIT,
    TILE,
    WINDOW_COMBINE_GROUPS,
    query_outer_tokens,
)
from cute_kernels.refusals import (
    continues_tile,
    pack_sizes,
    refusal_of_documents,
    refusal_of_grid,
    refusal_of_heads,
    refusal_of_scale,
    refusal_of_selection,
    refusal_of_token_mode,
    runs_as_pack,
    tile_rows,
)
from cute_kernels.runtime.device import has_warpgroups

SPLIT_PAIRS = 1 << 31
"""Pairs of a query row of a head and a compressed entry up to which backward runs attend/compressed_backward.py where
it can: its seven products, without phases, are then faster than FlashAttention-4's five."""

PHASES_FROM = 16 << 10
"""Tokens from which phases pay off although each sequence of a batch is a call of its own."""


@dataclass(frozen=True)
class Plan:
    """The kernels of a call. "fa4" are those of FlashAttention-4, others those of attend/."""

    rules: fa4.Rules
    tile: int
    """Query rows that select together; in token mode, rows of a tile of packed documents."""
    as_pack: bool
    """True if the call runs the steps of packed documents."""
    first_row: int
    """The token that row 0 is, where queries continue sequences that are no pack."""
    selects_entries: bool
    """True if the compressed branch attends to selected blocks of entries; False: to all entries."""

    # Forward
    selected: Literal["fa4", "kv_outer", "query_outer"]
    """fa4 in tile mode; kv_outer and query_outer per token."""
    forced: tuple[int, int]
    """With kv_outer: initial and local blocks that are attended to in one pass, apart from the lists (forced.py)."""
    window: Literal["fa4", "combine"]
    """combine: the selected branch's last kernel attends to the window, too (window_combine.py)."""
    gate: Literal["kernel", "combine"]
    """kernel: gate/forward.py; combine: the selected branch's last kernel gates."""

    # Backward
    deterministic: bool
    """True if it adds up in a fixed order."""
    compressed_backward: Literal["fa4", "phases", "split", "blocks"]
    """phases: fa4, dense, for each phase of the stride; split: compressed_backward.py; blocks: selected_backward.py."""
    selected_backward: Literal["fa4", "split", "kv_outer"]
    """split: selected_backward.py, which adds up in a fixed order."""
    window_backward: Literal["fa4", "split"]
    """split: window_backward.py."""
    local_with_window: bool
    """True if the window's backward does the selected branch's local blocks, which are inside the window."""
    window_dq: Literal["window", "combine"]
    """combine: the selected branch's last kernel computes the dq of window and local blocks (window_dq_combine.py)."""


def plan(
    inputs: Any,
    config: Any,
    *,
    training: bool = False,
    deterministic: bool = False,
    as_pack: bool | None = None,
    atomic_free: bool = True,
    query_outer: bool | None = None,
) -> Plan:
    """The plan of a call that these kernels can run.

    Args:
        inputs, config: nsa.inputs.NSAInputs and nsa.config.NSAConfig.
        training: for a forward that saves, and for its backward.
        deterministic: backward is bitwise repeatable.
        as_pack: see Plan; None: as `runs_as_pack` says.
        atomic_free: False: backward runs FlashAttention-4's kernels for every branch, for comparisons. It has no effect
            on the selected branch of `deterministic` calls.
        query_outer: token mode: True or False in place of the rule in `per_token`.
    """
    rules = cast("fa4.Rules", fa4.rules(inputs.q.device))
    if as_pack is None:
        as_pack = runs_as_pack(inputs, config, training=training)
    (*_, heads, dim), (*_, kv_heads, v_dim) = inputs.q.shape, inputs.v.shape
    group, size, slots = heads // max(kv_heads, 1), config.select_size, config.num_selected_blocks
    first_row = 0 if as_pack else inputs.first_token
    entries = None if as_pack else config.num_compressed(inputs.k.shape[1])
    shares_keys = inputs.k_slc is None and inputs.k_win is None
    local_keys = config.num_local_blocks * size
    one_dim, has_local = dim == v_dim, 0 < local_keys <= config.window_size

    # Forward
    selected = per_token(group, slots, query_outer) if config.token_mode else "fa4"
    window_along = (
        selected == "kv_outer" and has_warpgroups(inputs.q.device) and inputs.q.numel() > 0
        and one_dim and shares_keys and has_local and config.window_size <= MAX_COMBINED_WINDOW
        and group in WINDOW_COMBINE_GROUPS and slots <= MAX_COMBINED_SLOTS
    )  # fmt: skip
    forced: tuple[int, int] = (config.num_init_blocks, config.num_local_blocks) if selected == "kv_outer" else (0, 0)
    gates_along = selected == "kv_outer" and one_dim and slots > 0 and not as_pack

    # Backward
    atomic_free = atomic_free and has_atomic_free_backward(rules, dim, v_dim)
    causal = config.causal
    compressed_backward: Any = "fa4"
    selects = selects_entries(inputs, config, as_pack=as_pack)
    if selects:
        compressed_backward = "blocks" if atomic_free else "fa4"
    elif causal and entries is not None:
        batch, rows = inputs.q.shape[:2]
        if atomic_free and batch * rows * heads * entries <= SPLIT_PAIRS:
            compressed_backward = "split"
        elif config.compress_block_size % config.stride == first_row % config.stride == 0 and (
            batch == 1 or rows >= PHASES_FROM or deterministic
        ):
            compressed_backward = "phases"
    selected_backward: Any = "split" if deterministic or atomic_free else "fa4"
    splits_window = atomic_free and causal and not as_pack and first_row % TILE == 0
    # Given gates weigh do for each branch
    local_with_window = (
        config.token_mode and slots > 0 and has_local and splits_window and shares_keys and inputs.gates is None
    )
    return Plan(
        rules=rules,
        tile=tile_rows(config, rules),
        as_pack=as_pack,
        first_row=first_row,
        selects_entries=selects,
        selected=selected,
        forced=forced if window_along else forced_in_one_pass(*forced, size),
        window="combine" if window_along else "fa4",
        gate="combine" if gates_along else "kernel",
        deterministic=deterministic,
        compressed_backward=compressed_backward,
        selected_backward="kv_outer" if config.token_mode else selected_backward,
        window_backward="split" if splits_window else "fa4",
        local_with_window=local_with_window,
        window_dq="combine" if local_with_window and slots * (size // TILE) <= MAX_COMBINED_PARTIALS else "window",
    )


def selects_entries(inputs: Any, config: Any, *, as_pack: bool) -> bool:
    """True if the compressed branch attends to selected blocks of entries: it has more of them than it may select.

    In a pack each document has its own number of entries, so blocks are always selected.
    """
    count = config.num_cmp_selected_blocks
    if count is None or as_pack:
        return count is not None
    return bool(count * config.n_block_size < config.num_compressed(inputs.k.shape[1]))


def per_token(group: int, slots: int, query_outer: bool | None = None) -> Literal["kv_outer", "query_outer"]:
    """The kernel of attention to blocks that each token selects, by shapes alone.

    Deciding by the selections would be better, but then the bits of a token would depend on the choices of later
    tokens.

    Args:
        group: G. slots: n.
        query_outer: in place of the rule, where the kernel has room; True is faster if neighbors select alike.
    """
    has_room = query_outer_tokens(group) * slots <= MAX_QUERY_OUTER_SLOTS and query_outer_tokens(group) > 0
    wanted = group >= MIN_QUERY_OUTER_GROUP if query_outer is None else query_outer
    return "query_outer" if has_room and wanted else "kv_outer"


def forced_in_one_pass(init: int, local: int, size: int) -> tuple[int, int]:
    """Initial and local blocks of `size` tokens, if attend/forced.py has room for them, or (0, 0)."""
    return (init, local) if (init + local) * size <= MAX_FORCED_KEYS else (0, 0)


def has_atomic_free_backward(rules: fa4.Rules, dim: int, v_dim: int) -> bool:
    """True if backward has kernels without atomics: attend/selected_, window_ and compressed_backward.py."""
    return SELECT_UNIT in rules.backward_widths and dim == v_dim


# Refusals


def refusal(inputs: Any, config: Any, *, training: bool = False, deterministic: bool = False) -> str | None:
    """Why these kernels cannot run a call, in words that follow the backend's name, or None. Args: see `plan`."""
    rules = fa4.rules(inputs.q.device)
    if rules is None:
        return "has no block lists for this device"
    reason = fa4.refusal(inputs.q.dtype, inputs.q.shape[-1], inputs.v.shape[-1])
    reason = reason or _refusal(inputs, config, rules, training)
    if reason is None and training:
        reason = _refusal_of_backward(inputs, config, rules)
        if reason is None and deterministic:
            reason = _refusal_of_determinism(inputs, config, rules)
    return reason


def _refusal(inputs: Any, config: Any, rules: fa4.Rules, training: bool) -> str | None:
    """Limits of both directions."""
    sizes = {
        "q_tile_size": config.q_tile_size,
        "compress_block_size": config.compress_block_size,
        "select_block_size": config.select_size,
    }
    for name, size in sizes.items():
        if size > MAX_SIZE:
            return f"takes {name} up to 2^30, got {size}"
    sequences = 1 if runs_as_pack(inputs, config, training=training) else inputs.q.shape[0]
    reason = refusal_of_grid(sequences, inputs.q.shape[-2]) or refusal_of_scale(config.scale(inputs.q.shape[-1]))
    if reason is not None:
        return reason
    if config.token_mode:
        reason = refusal_of_token_mode(inputs, config, tile_rows(config, rules)) or refusal_of_heads(inputs)
        return reason or refusal_of_selection(inputs, config)
    if config.q_tile_size % rules.rows:
        return f"takes q_tile_size in multiples of {rules.rows} on this device, got {config.q_tile_size}"
    if config.select_size % SELECT_UNIT:
        return f"takes select_block_size in multiples of {SELECT_UNIT}, got {config.select_size}"
    if config.num_cmp_selected_blocks is not None and config.n_block_size not in rules.backward_widths:
        widths = " or ".join(map(str, sorted(rules.backward_widths)))
        return f"takes n_block_size {widths} on this device, got {config.n_block_size}"
    count = max(config.num_selected_blocks, config.num_cmp_selected_blocks or 0)
    if count > MAX_BLOCKS:
        return f"chooses at most {MAX_BLOCKS} blocks per tile, got {count}"
    # One step of the scoring kernel must cover one block's compressed entries
    entries = -(-(config.select_size + config.compress_block_size - 1) // config.stride) + 1
    if entries > MAX_ENTRIES:
        return (
            f"takes at most {MAX_ENTRIES} compressed blocks over one select block, got {entries} "
            f"(compress_block_size={config.compress_block_size}, stride={config.stride}, l'={config.select_size})"
        )
    if not runs_as_pack(inputs, config, training=training):
        return None
    if not config.causal:
        return "takes cu_seqlens with causal=True only, got causal=False"
    if config.q_tile_size % config.select_size:
        return (
            "takes cu_seqlens, a tensor q_start, and backward from inside a tile, with q_tile_size in multiples of "
            f"select_block_size only, got {config.q_tile_size} and {config.select_size}"
        )
    return refusal_of_documents(inputs, config.stride, tile_rows(config, rules))


def _refusal_of_backward(inputs: Any, config: Any, rules: fa4.Rules) -> str | None:
    """FlashAttention-4 counts a head's fp32 sums of dq, dk and dv with 32 bits."""
    rows, tile = max(inputs.q.shape[-3], inputs.k.shape[-3]), tile_rows(config, rules)
    if runs_as_pack(inputs, config, training=True):
        queries, tokens, docs = pack_sizes(inputs)
        rows = max(queries, tokens) + 2 * docs * tile
    dim = max(inputs.q.shape[-1], inputs.v.shape[-1])
    if (rows + tile) * dim >= 1 << 31:
        return f"takes fewer than 2^31 elements of one head in backward, got {rows} rows of {dim}"
    return None


def _refusal_of_determinism(inputs: Any, config: Any, rules: fa4.Rules) -> str | None:
    """FlashAttention-4 adds up in a fixed order only without block lists; with them only our atomic-free backward does.

    Its deterministic backward was never compiled for Blackwell, where the compressed branch and the window need it.
    """
    dims = inputs.q.shape[-1], inputs.v.shape[-1]
    got = None
    if SELECT_UNIT not in rules.backward_widths:
        got = "Blackwell's tiles"
    elif not (config.token_mode or has_atomic_free_backward(rules, *dims)):
        got = f"D={dims[0]}, D_v={dims[1]}"
    elif inputs.cu_seqlens is not None:
        got = "cu_seqlens"
    elif isinstance(inputs.q_start, Tensor):
        got = "q_start as a tensor"
    elif continues_tile(inputs, config):
        got = f"q_start={inputs.first_token}, q_tile_size={config.q_tile_size}"
    elif inputs.first_token % config.stride:
        got = f"q_start={inputs.first_token}, stride={config.stride}"
    elif config.compress_block_size % config.stride:
        got = f"compress_block_size={config.compress_block_size}, stride={config.stride}"
    if got is None:
        return None
    return (
        "takes deterministic=True in backward only on Hopper, with D = D_v, without cu_seqlens and tensors q_start, "
        "with a stride that divides compress_block_size and q_start, and in tile mode a "
        f"q_tile_size that divides q_start, got {got}"
    )

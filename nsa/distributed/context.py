"""ContextParallel: sequences divided among the ranks of a process group, and attention over the whole sequence."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dispatch.registry import ENVIRONMENT_VARIABLE, short_name
from nsa.api import cast_arguments
from nsa.common.autocast import autocast_off, cast_inputs
from nsa.common.checks import check_bool, check_choice, check_dtype, check_integer, check_tensor
from nsa.common.derivatives import needs_grad, refuse_transforms
from nsa.common.keywords import ONE_BY_ONE, explain_keywords, signature_of
from nsa.common.operators import break_graph
from nsa.common.replace import replace
from nsa.config import LARGEST_OPTION, OPTION_NAMES, Compress, NSAConfig
from nsa.distributed.attention import NAMES, WEIGHT_NAMES, Plan, ShardedNSA, attend, check_calls, heads_per_pass
from nsa.distributed.comm import Comm
from nsa.distributed.halo import compressed_shard, sharded_neighborhood_attention
from nsa.distributed.layout import LAYOUTS, Layout, make_layout
from nsa.inputs import KEY_NAMES, NSAInputs, check_bounds
from nsa.neighborhood.operators import ALGORITHMS, Window, check_tensors
from nsa.operators import options_of

REFUSED = {
    "k_cmp": "entries are pooled from the keys of all ranks; pass `compress` or w_k_compress",
    "v_cmp": "entries are pooled from the values of all ranks; pass `compress` or w_v_compress",
    "cu_seqlens_k": "every rank has as many queries as keys, and cu_seqlens are the bounds of the whole pack",
    "q_start": "the layout determines the positions of a rank's queries",
    "q_sum": "ranks begin at tile boundaries",
}
"""Keywords of `nsa` that are not supported for divided sequences, with the reason."""

LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class ContextParallel:
    """A sequence divided among ranks: the tokens of each rank, and attention of its queries to the keys of all.

    Queries stay on their rank and keys are gathered, for some key/value heads at a time (docs/distributed.md has the
    volumes). All ranks of the group create the object with equal arguments and call its methods with tensors of the
    same dtypes and sizes, even a rank that has no tokens. Calls and backwards must have the same order on all ranks;
    differences raise errors that name them on all ranks.

    Every rank's loss is its share: gradients of replicated tensors, such as weights, are shares that sum over ranks to
    those of one process.

    `cu_seqlens` is read on the host if it is not the tensor of the last call, or has changed since by PyTorch's version
    counter. Changes that PyTorch does not count are not noticed: writes through `Tensor.data`, by NumPy through the
    memory of `torch.from_numpy`, by the replay of a CUDA graph, and by other libraries. Inference tensors have no
    counters, so they are always read.

    Args:
        mesh: a DeviceMesh of one dimension, such as `mesh["cp"]`, or a process group.
        layout: "zigzag": rank r of R holds chunks r and 2R - 1 - r of 2R, which balances the work of causal attention.
            "contiguous": rank r holds chunk r of R. Default: "zigzag".
        tile: chunks begin at multiples of it (in packs, within their document). Must be a multiple of the `q_tile_size`
            of every config; 1 divides most evenly, in token mode. Default: 256.
        kv_heads_per_pass: key/value heads that are gathered at a time. Default: None, which means as many as keep
            gathered keys and shares of gradients below 1 GiB, at least one.
        timeout: how long a rank waits for the others when they compare calls, equal in all objects of a group. Default:
            None, which means the group's timeout.

    Raises:
        TypeError: naming an argument of the wrong type.
        ValueError: naming an argument out of range, or a mesh of several dimensions.
        RuntimeError: if another rank does not create the object within the timeout.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from nsa import NSAConfig
        >>> from nsa.distributed import ContextParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = ContextParallel(dist.group.WORLD, tile=1)
        >>> q, k, v = (cp.shard(torch.randn(1, 100, heads, 16)) for heads in (4, 2, 2))
        >>> cp.unshard(cp.nsa(q, k, v, config=NSAConfig.paper())).shape
        torch.Size([1, 100, 4, 16])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        mesh: DeviceMesh | dist.ProcessGroup,
        layout: str = "zigzag",
        tile: int = 256,
        *,
        kv_heads_per_pass: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        check_choice("layout", layout, LAYOUTS)
        check_integer("tile", tile, 1, LARGEST_OPTION)
        if kv_heads_per_pass is not None:
            check_integer("kv_heads_per_pass", kv_heads_per_pass, 1)
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(f"mesh must have one dimension, such as mesh['cp'], got {mesh.mesh_dim_names or mesh}")
            group = mesh.get_group()
        elif isinstance(mesh, dist.ProcessGroup):
            group = mesh
        else:
            raise TypeError(f"mesh must be a DeviceMesh or a process group, got {type(mesh).__name__}")
        self.layout, self.tile, self.kv_heads_per_pass = layout, tile, kv_heads_per_pass
        self._comm = Comm(group, timeout)
        self._last_bounds: tuple[weakref.ref[Tensor], int, tuple[int, ...]] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the ranks. Raises RuntimeError if it has been destroyed."""
        return self._comm.group

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """R, number of ranks of the group."""
        return self._comm.size

    def __repr__(self) -> str:
        return f"ContextParallel(rank={self.rank}, size={self.size}, layout={self.layout!r}, tile={self.tile})"

    def __deepcopy__(self, _: Any) -> ContextParallel:
        return self  # copies of a layer communicate over the same group

    # Tokens of a rank

    def shard(self, x: Tensor, dim: int | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Slice this rank's rows of a tensor that every rank has whole, without communication.

        Args:
            x: any tensor with one row per token, such as `[B,N,...]`, or packed `[T,...]` with `cu_seqlens`.
            dim: dimension of the tokens. Default: None, which means 0 with `cu_seqlens` and 1 without.
            cu_seqlens: bounds of packed documents, int32 `[B+1]`, on any device; read on the host. Default: None.

        Returns:
            The rows; their number may differ between ranks. The gradient of x is zero in the rows of other ranks.

        Raises:
            TypeError, ValueError: naming x, dim or cu_seqlens.
        """
        dim = token_dim("x", x, dim, cu_seqlens)
        layout = self._layout(x.shape[dim], cu_seqlens)
        parts = [x.narrow(dim, start, stop - start) for start, stop in layout.ranges[self.rank]]
        return torch.cat([x.narrow(dim, 0, 0), *parts], dim)

    @break_graph
    def unshard(self, x: Tensor, dim: int | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Concatenate the shards of all ranks, on every rank.

        Args:
            x: this rank's rows.
            dim: as in `shard`. Default: None.
            cu_seqlens: as in `shard`. Default: None.

        Returns:
            All rows in order. The gradient of x is the sum of the gradients on all ranks, in fp32, rounded once.

        Raises:
            TypeError, ValueError: on all ranks, if ranks disagree, naming rank and argument.
        """

        def facts() -> tuple[dict[str, object], int]:
            tokens = token_dim("x", x, dim, cu_seqlens)
            sizes = [*x.shape[:tokens], *x.shape[tokens + 1 :]]
            own = {"x": _text(x, sizes), "dim": tokens, "cu_seqlens": self._bounds_text(cu_seqlens)}
            return {**self._facts(), **own}, x.shape[tokens]

        lengths = self._comm.agree("ContextParallel.unshard", facts)
        layout = self._agreed_layout(lengths, cu_seqlens, "x")
        everyone = [[(0, layout.tokens)]] * self.size
        dim = token_dim("x", x, dim, cu_seqlens)
        return self._comm.fetch(x.movedim(dim, 0), layout.ranges, everyone).movedim(0, dim)

    def positions(
        self, tokens: int, *, cu_seqlens: Tensor | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Positions of this rank's tokens in their sequence or document, for rotary embeddings.

        Args:
            tokens: N, number of tokens of the sequence or pack.
            cu_seqlens: as in `shard`; rows after the last document count from its end. Default: None.
            device: device of the result. Default: None, which means the CPU.

        Returns:
            int64 `[n]`.
        """
        check_integer("tokens", tokens, 0)
        layout = self._layout(tokens, cu_seqlens)
        device = "cpu" if device is None else device
        parts = [torch.arange(0, device=device)]
        for start, stop in layout.ranges[self.rank]:
            pieces = layout.pieces((start, stop))
            parts += [torch.arange(piece.start, piece.stop, device=device) for piece in pieces]
            end = layout.bounds[-1]
            if stop > end:
                parts.append(torch.arange(max(start, end) - end, stop - end, device=device))
        return torch.cat(parts)

    # Labels and losses

    def shard_labels(
        self, input_ids: Tensor, dim: int | None = None, *, cu_seqlens: Tensor | None = None, ignore_index: int = -100
    ) -> Tensor:
        """Label each of this rank's tokens with the next token of its sequence or document.

        Args:
            input_ids: ids of all tokens, on every rank, of any integer dtype.
            dim: as in `shard`. Default: None.
            cu_seqlens: as in `shard`. Default: None.
            ignore_index: label of last tokens and of rows after the last document. Default: -100.

        Returns:
            This rank's labels, in the dtype of `input_ids`.

        Raises:
            TypeError, ValueError: naming input_ids, dim, cu_seqlens or an ignore_index that the dtype does not hold.
        """
        dim = token_dim("input_ids", input_ids, dim, cu_seqlens)
        check_label_dtype("input_ids", input_ids)
        check_ignore_index(ignore_index, input_ids.dtype)
        layout = self._layout(input_ids.shape[dim], cu_seqlens)
        labels = torch.full_like(input_ids, ignore_index)
        rows, ids = labels.movedim(dim, 0), input_ids.movedim(dim, 0)
        last = [stop - 1 for start, stop in zip(layout.bounds, layout.bounds[1:], strict=False) if start < stop]
        rows[: max(0, layout.bounds[-1] - 1)] = ids[1 : max(1, layout.bounds[-1])]
        rows[torch.tensor(last, dtype=torch.int64, device=ids.device)] = ignore_index
        return self.shard(labels, dim, cu_seqlens=cu_seqlens)

    def cross_entropy(self, logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
        """Return this rank's share of the mean loss: the sum of its losses over the number of labels on all ranks.

        Call backward on it on every rank; `sum` of it is the mean loss.

        Ranks first compare 16 bytes each on the host, and sum their numbers of labels.

        Args:
            logits: `[...,classes]`, with equally many classes on every rank.
            labels: `[...]` of any integer dtype on logits' device, classes or `ignore_index`. Values are checked on the
                CPU. On a GPU, a value out of range triggers a device-side assertion on this rank only; its CUDA context
                is lost and other ranks raise RuntimeError within the group's timeout.
            ignore_index: label that is ignored. Default: -100.

        Returns:
            fp32 (fp64 for fp64 logits), 0-dim.

        Raises:
            TypeError, ValueError: on all ranks, for an invalid argument on one or if ranks disagree, naming rank and
                argument.
        """
        count = self._count_labels(logits, labels, ignore_index)
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).to(wide),
            labels.reshape(-1).long(),
            ignore_index=ignore_index,
            reduction="sum",
        )
        share: Tensor = total / count.clamp(min=1)
        return share

    @break_graph
    def _count_labels(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """Number of labels on all ranks that are not ignored, after every rank has checked its own."""

        def facts() -> tuple[dict[str, object], int]:
            check_labels(logits, labels, ignore_index)
            return {"logits": _text(logits.detach(), ["...", logits.shape[-1]]), "ignore_index": ignore_index}, 0

        self._comm.agree("ContextParallel.cross_entropy", facts)
        return self._comm.sum((labels.long() != ignore_index).sum())

    @break_graph
    def sum(self, x: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in rank order; not differentiable.

        Args:
            x: tensor of the same shape and dtype on every rank; not bool.

        Returns:
            The sum, on every rank, in x's dtype: integers wrap around as PyTorch's do.

        Raises:
            TypeError, ValueError: on all ranks, if ranks disagree, naming rank and argument.
        """

        def facts() -> tuple[dict[str, object], int]:
            check_tensor("x", x)
            if x.dtype == torch.bool:
                raise TypeError("x must be numbers, got bool: count them as x.int()")
            return {"x": _text(x, x.shape)}, 0

        self._comm.agree("ContextParallel.sum", facts)
        return self._comm.sum(x)

    # Attention

    def _nsa(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        refuse_transforms("ContextParallel.nsa")
        read: list[_NSACall] = []

        def facts() -> tuple[dict[str, object], int]:
            call = self._read_nsa(q, k, v, keywords)
            read.append(call)
            return {**self._facts(), **call.facts()}, call.inputs.q.shape[-3]

        lengths = self._comm.agree("ContextParallel.nsa", facts)
        call = read[0]
        inputs, config = call.inputs, call.config
        layout = self._agreed_layout(lengths, keywords.get("cu_seqlens"), "q")
        call.dtensors.check(layout)
        with autocast_off(inputs.q.device.type):
            if config.compress != "mean":
                k_cmp, v_cmp = compressed_shard(self._comm, layout, inputs, config)
                given: dict[str, Any] = {"k_cmp": k_cmp, "v_cmp": v_cmp, "w_k_compress": None, "w_v_compress": None}
                inputs, config = replace(inputs, **given), replace(config, compress="mean")
            tensors = {name: x for name in NAMES if (x := getattr(inputs, name)) is not None}
            plan = self._plan(layout, config, tensors, call.flags, packed=inputs.packed)
            saving = needs_grad(*tensors.values())  # on all ranks or on none, as facts and compressed_shard ensure
            check_calls(plan, tensors, needs_grad=saving)
            if saving:
                out: Tensor = ShardedNSA.apply(plan, *(tensors.get(name) for name in NAMES))
            else:
                out, _ = attend(plan, tensors, saving=False)
        return call.dtensors.wrap(out)

    @break_graph
    @signature_of(_nsa)
    def nsa(  # type: ignore[empty-body]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        compress_block_size: int = 64,
        compress_stride: int | None = None,
        select_block_size: int | None = None,
        num_selected_blocks: int = 16,
        window_size: int = 512,
        q_tile_size: int = 256,
        share_heads_in_group: bool = False,
        num_init_blocks: int = 0,
        num_local_blocks: int = 0,
        num_cmp_selected_blocks: int | None = None,
        n_block_size: int = 128,
        compress: Compress = "mean",
        causal: bool = True,
        softmax_scale: float | None = None,
        debug: bool = False,
        w_k_compress: Tensor | None = None,
        w_v_compress: Tensor | None = None,
        k_slc: Tensor | None = None,
        v_slc: Tensor | None = None,
        k_win: Tensor | None = None,
        v_win: Tensor | None = None,
        gate_proj_weight: Tensor | None = None,
        gates: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        deterministic: bool = False,
        recompute: bool = False,
        config: NSAConfig | None = None,
        backend: str | None = None,
    ) -> Tensor:
        """`nsa` of the whole sequence, returning out of this rank's tokens; differentiable.

        Under torch.compile it is a graph break.

        All other arguments are those of `nsa`. `k_slc`, `v_slc`, `k_win`, `v_win` and `gates` are this rank's, weights
        are replicated, and `cu_seqlens` holds the bounds of the whole pack, on the host or on q's device, and is read
        once. `causal=False`, and `k_cmp`, `v_cmp`, `cu_seqlens_k`, `q_start` and `q_sum` of `nsa`, are not supported.

        Args:
            q: this rank's queries `[B,n,H,D]`, packed `[n,H,D]` with `cu_seqlens`, as returned by `shard`; a DTensor is
                accepted if it is sharded on tokens over this group and its even split equals the layout.
            k: this rank's keys `[B,n,H_kv,D]`.
            v: this rank's values `[B,n,H_kv,D_v]`.

        Returns:
            `[B,n,H,D_v]`, packed `[n,H,D_v]`: these rows of `nsa` of the whole sequence, in q's dtype; a DTensor if q
            is one.

        Raises:
            TypeError, ValueError: as `nsa`, or if ranks disagree; on all ranks, naming rank and argument.
            dispatch.BackendError: if no backend supports the call, on all ranks.
            RuntimeError: on all ranks, in forward or backward: if they run different calls or orders of backwards,
                naming ranks and calls; within the timeout if a rank has exited or is late.
        """

    @break_graph
    @explain_keywords(ONE_BY_ONE)
    def neighborhood_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        kernel_size: int = 7,
        dilation: int = 1,
        softmax_scale: float | None = None,
        boundary: str = "truncate",
        causal: bool = False,
        algorithm: str = "auto",
        backend: str | None = None,
    ) -> Tensor:
        """`neighborhood_attention` of the whole sequence, returning out of this rank's tokens; differentiable.

        Only tokens of other ranks that windows reach are sent.

        Args:
            q: this rank's queries `[B,n,H,D]`, as in `nsa`.
            k: this rank's keys `[B,n,H_kv,D]`.
            v: as k.
            kernel_size: as in `neighborhood_attention`, and so are all other arguments. Default: 7.
            dilation: distance between neighbors in tokens. Default: 1.
            softmax_scale: factor of the logits. Default: None, which means 1/sqrt(D).
            boundary: "truncate" or "shift". Default: "truncate".
            causal: keys up to the token itself only. Default: False.
            algorithm: "auto", "flash", "band" or "dense". Default: "auto".
            backend: as in `neighborhood_attention`. Default: None.

        Returns:
            `[B,n,H,D]` in q's dtype.

        Raises:
            TypeError, ValueError, RuntimeError, dispatch.BackendError: as `nsa`.
        """
        refuse_transforms("ContextParallel.neighborhood_attention")
        read: list[tuple[Mapping[str, Tensor], dict[str, Any]]] = []
        dtensors = _DTensors(self.group, ("q", "k", "v"), 1)

        def facts() -> tuple[dict[str, object], int]:
            local = cast_inputs(dtensors.local({"q": q, "k": k, "v": v}))
            window = Window(kernel_size, dilation, softmax_scale, boundary, causal)
            check_choice("algorithm", algorithm, ALGORITHMS)
            check_tensors(local["q"], local["k"], local["v"])
            check_same_rows(local)
            options = {**asdict(window), "algorithm": algorithm, "backend": backend}
            read.append((local, options))
            texts = {name: _row_text(x) for name, x in local.items()}
            return {**self._facts(), **texts, **options, "backend": _backend(backend)}, local["q"].shape[1]

        lengths = self._comm.agree("ContextParallel.neighborhood_attention", facts)
        layout = self._agreed_layout(lengths, None, "q")
        dtensors.check(layout)
        local, options = read[0]
        with autocast_off(local["q"].device.type):
            out = sharded_neighborhood_attention(self._comm, layout, local["q"], local["k"], local["v"], options)
        return dtensors.wrap(out)

    # Layouts

    def _layout(self, tokens: int, cu_seqlens: Tensor | None) -> Layout:
        bounds = self._bounds(cu_seqlens)
        if bounds is not None:
            check_bounds("cu_seqlens", list(bounds), tokens)
        return make_layout(tokens, bounds, self.size, self.layout, self.tile)

    def _agreed_layout(self, lengths: list[int], cu_seqlens: Tensor | None, name: str) -> Layout:
        """The layout of shards of these lengths. Its errors are raised on all ranks."""
        layout = self._layout(sum(lengths), cu_seqlens)
        if lengths != layout.lengths:
            raise ValueError(
                f"{name} must hold {layout.lengths} tokens on ranks 0 to {self.size - 1}, as `shard` gives "
                f"them of {layout.tokens} (layout={self.layout!r}, tile={self.tile}), got {lengths}"
            )
        return layout

    def _bounds(self, cu_seqlens: Tensor | None) -> tuple[int, ...] | None:
        """The values of cu_seqlens; those of the last tensor are cached, so that layers do not synchronize."""
        if cu_seqlens is None:
            return None
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
            got = short_name(cu_seqlens.dtype) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
            raise TypeError(f"cu_seqlens must be an int32 tensor or None, got {got}")
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
            raise ValueError(f"cu_seqlens must have the shape [B+1], got shape {list(cu_seqlens.shape)}")
        if cu_seqlens.is_inference():  # no version counter
            return tuple(cu_seqlens.tolist())
        last = self._last_bounds
        if last is not None and last[0]() is cu_seqlens and last[1] == cu_seqlens._version:
            return last[2]
        bounds = tuple(cu_seqlens.tolist())
        self._last_bounds = weakref.ref(cu_seqlens), cu_seqlens._version, bounds
        return bounds

    def _bounds_text(self, cu_seqlens: Tensor | None) -> str:
        bounds = self._bounds(cu_seqlens)
        if bounds is None:
            return "None"
        digest = hashlib.blake2b(repr(bounds).encode(), digest_size=4).hexdigest()
        return f"{len(bounds) - 1} documents of {bounds[-1]} tokens (digest of all bounds {digest})"

    # Facts of a call

    def _facts(self) -> dict[str, object]:
        return {"layout": self.layout, "tile": self.tile, "kv_heads_per_pass": self.kv_heads_per_pass}

    def _read_nsa(self, q: Tensor, k: Tensor, v: Tensor, keywords: Mapping[str, Any]) -> _NSACall:
        """Check and return the arguments of this rank."""
        for name, reason in REFUSED.items():
            if keywords.get(name) is not None:
                raise ValueError(f"{name} is not supported by ContextParallel.nsa: {reason}")
        options = options_of(keywords)
        config = keywords.get("config") or NSAConfig(**options)
        if not config.causal:
            raise ValueError("causal must be True: queries of a rank continue a sequence, got causal=False")
        if self.tile % config.q_tile_size != 0:
            raise ValueError(
                f"q_tile_size must divide tile={self.tile}, where ranks begin, got q_tile_size={config.q_tile_size}"
            )
        cu_seqlens = keywords.get("cu_seqlens")
        self._bounds(cu_seqlens)
        names = [name for name in NAMES[3:] if keywords.get(name) is not None]
        given = {"q": q, "k": k, "v": v, **{name: keywords[name] for name in names}}
        dtensors = _DTensors(self.group, [n for n in given if n not in WEIGHT_NAMES], 1 if cu_seqlens is None else 0)
        given = dtensors.local(given)
        q, k, v, others = cast_arguments(given.pop("q"), given.pop("k"), given.pop("v"), given)
        # Placeholder bounds: those of the whole pack do not fit the shard
        device = q.device if isinstance(q, Tensor) else None
        bounds = None if cu_seqlens is None else torch.zeros(2, dtype=torch.int32, device=device)
        inputs = NSAInputs(q, k, v, **others, cu_seqlens=bounds, max_seqlen=keywords.get("max_seqlen"))
        inputs.check(config)
        check_same_rows({"q": q, "k": k})
        flags = {name: keywords.get(name, False) for name in ("deterministic", "recompute")}
        for name, flag in flags.items():
            check_bool(name, flag)
        flags |= {"backend": keywords.get("backend"), "max_seqlen": inputs.max_seqlen}
        return _NSACall(inputs, config, flags, dtensors, self._bounds_text(cu_seqlens), inputs.needs_grad(config))

    def _plan(
        self,
        layout: Layout,
        config: NSAConfig,
        tensors: Mapping[str, Tensor],
        flags: Mapping[str, Any],
        *,
        packed: bool,
    ) -> Plan:
        k = tensors["k"]
        wide = torch.promote_types(k.dtype, torch.float32)
        dims = sum(x.shape[-1] for name, x in tensors.items() if name in KEY_NAMES)
        row_bytes = dims * (k.dtype.itemsize + wide.itemsize)
        batch = 1 if packed else k.shape[0]
        heads = k.shape[-2]
        per_pass = self.kv_heads_per_pass or heads_per_pass(heads, batch * layout.tokens, row_bytes)
        group = tensors["q"].shape[-2] // heads
        return Plan(self._comm, layout, config, packed, heads, group, per_pass, tuple(flags.items()))


class _NSACall(NamedTuple):
    """The checked arguments of `nsa` on this rank."""

    inputs: NSAInputs
    config: NSAConfig
    flags: dict[str, Any]
    dtensors: _DTensors
    bounds: str
    needs_grad: bool

    def facts(self) -> dict[str, object]:
        """Properties that must be equal on all ranks, by argument name."""
        texts: dict[str, object] = {}
        for name in NAMES:
            x = getattr(self.inputs, name)
            texts[name] = None if x is None else _text(x, x.shape) if name in WEIGHT_NAMES else _row_text(x)
        texts |= {name: getattr(self.config, name) for name in OPTION_NAMES}
        texts["compress"] = _compress_text(self.config.compress)
        texts |= {**self.flags, "backend": _backend(self.flags["backend"]), "cu_seqlens": self.bounds}
        return {**texts, "needs_grad": self.needs_grad, "DTensor": bool(self.dtensors.found)}


def token_dim(name: str, x: Tensor, dim: int | None, cu_seqlens: Tensor | None) -> int:
    """Return `dim` or its default, normalized to at least 0.

    Raises:
        TypeError, ValueError: unless x is a dense tensor that has the dimension.
    """
    check_tensor(name, x)
    if dim is None:
        default = 1 if cu_seqlens is None else 0
        if x.dim() <= default:
            wanted = "[B,N,...], or packed [T,...] with cu_seqlens, unless dim is given"
            raise ValueError(f"{name} must be {wanted}, got shape {list(x.shape)}")
        return default
    if x.dim() == 0:
        raise ValueError(f"{name} must have a dimension of tokens, got shape []")
    check_integer("dim", dim, -x.dim(), x.dim() - 1)
    return dim % x.dim()


def check_label_dtype(name: str, x: Tensor) -> None:
    """Raise unless x has one of LABEL_DTYPES."""
    if x.dtype not in LABEL_DTYPES:
        wanted = ", ".join(map(short_name, LABEL_DTYPES))
        raise TypeError(f"{name} must have one of the dtypes {wanted}, got {short_name(x.dtype)}")


def check_ignore_index(ignore_index: object, dtype: torch.dtype) -> None:
    """Raise unless a label of this dtype can be `ignore_index`."""
    limits = torch.iinfo(dtype)
    check_integer("ignore_index", ignore_index, limits.min, limits.max)


def check_labels(logits: Tensor, labels: Tensor, ignore_index: int) -> None:
    """Raise unless labels are classes of the logits, or `ignore_index`; values are read on the CPU only."""
    check_tensor("logits", logits)
    check_tensor("labels", labels)
    check_dtype("logits", logits)
    check_label_dtype("labels", labels)
    check_ignore_index(ignore_index, torch.int64)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [...,classes] of at least one class, got shape {list(logits.shape)}")
    if labels.shape != logits.shape[:-1]:
        wanted = f"the shape {list(logits.shape[:-1])} of logits [...,classes]"
        raise ValueError(f"labels must have {wanted}, got {list(labels.shape)}")
    if labels.device != logits.device:
        raise ValueError(f"labels must be on logits' device {logits.device}, got {labels.device}")
    if type(labels) is Tensor and labels.device.type == "cpu":
        classes, own = logits.shape[-1], labels.long()
        wrong = own[(own != ignore_index) & ((own < 0) | (own >= classes))]
        if wrong.numel() > 0:
            also = f"or ignore_index={ignore_index}"
            raise ValueError(f"labels must be from 0 to {classes - 1}, {also}, got {int(wrong[0])}")


def check_same_rows(tensors: Mapping[str, Tensor]) -> None:
    """Raise unless the tensors have as many rows as q."""
    rows = tensors["q"].shape[-3]
    for name, x in tensors.items():
        if x.shape[-3] != rows:
            raise ValueError(f"{name} must have q's {rows} tokens of this rank, got shape {list(x.shape)}")


def _text(x: Tensor, sizes: Any) -> str:
    """Describe a tensor, for comparison and messages."""
    gradient = " with a gradient" if needs_grad(x) else ""
    return f"{short_name(x.dtype)} [{', '.join(map(str, sizes))}] on {x.device.type}{gradient}"


def _row_text(x: Tensor) -> str:
    """The same for a tensor `[...,n,heads,D]`, without its number of rows."""
    return _text(x, [*x.shape[:-3], "n", *x.shape[-2:]])


def _compress_text(compress: Any) -> str:
    if isinstance(compress, tuple):
        return ", ".join(map(_compress_text, compress))
    if isinstance(compress, torch.nn.Module):
        sizes = [f"{name} {list(p.shape)}" for name, p in compress.named_parameters()]
        return f"{type(compress).__name__}({', '.join(sizes)})"
    return compress if isinstance(compress, str) else getattr(compress, "__qualname__", type(compress).__name__)


def _backend(name: str | None) -> str:
    return name or os.environ.get(ENVIRONMENT_VARIABLE) or "any"


class _DTensors:
    """Arguments that are DTensors: unwraps their local parts, and wraps results.

    Args:
        names: names of the tensors with one row per token; no others may be DTensors.
        dim: dimension of the tokens.
    """

    def __init__(self, group: dist.ProcessGroup, names: Sequence[str], dim: int) -> None:
        self.group, self.names, self.dim = group, names, dim
        self.found: dict[str, Any] = {}

    def local(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Replace DTensors by their local parts."""
        result = {}
        for name, x in tensors.items():
            if type(x) is not Tensor and isinstance(x, Tensor) and isinstance(x, DTensor):
                self._check_placements(name, x)
                self.found[name] = x
                x = x.to_local()
            result[name] = x
        if self.found and (missing := [name for name in self.names if name not in self.found]):
            raise TypeError(f"{missing[0]} must be a DTensor as {next(iter(self.found))} is, got a plain tensor")
        return result

    def _check_placements(self, name: str, x: DTensor) -> None:
        if name not in self.names:
            raise TypeError(f"{name} must be a plain tensor, whole on every rank, got a DTensor")
        own = dist.get_process_group_ranks(self.group)
        over_group = False
        for i, placement in enumerate(x.placements):
            if dist.get_process_group_ranks(x.device_mesh.get_group(i)) == own:
                over_group = placement == Shard(self.dim)
            elif placement == Shard(self.dim) or placement.is_partial():
                raise ValueError(f"{name} must be sharded on tokens over this group alone, got {x.placements}")
        if not over_group:
            raise ValueError(
                f"{name} must be sharded on dim {self.dim}, its tokens, over this group, got {x.placements}"
            )

    def check(self, layout: Layout) -> None:
        """Raise on all ranks unless DTensor's even split equals the layout."""
        if not self.found:
            return
        most = -(-layout.tokens // layout.ranks)
        cuts = [min(rank * most, layout.tokens) for rank in range(layout.ranks + 1)]
        even = [[(a, b)] if a < b else [] for a, b in pairwise(cuts)]
        if even != layout.ranges:
            raise ValueError(
                f"{next(iter(self.found))} is a DTensor, whose even split gives ranks up to {most} of {layout.tokens} "
                f"tokens: layout={layout.kind!r} with tile={layout.tile} has other bounds; use ContextParallel.shard"
            )

    def wrap(self, out: Tensor) -> Tensor:
        """Wrap a result with q's rows as a DTensor if q is one."""
        if "q" not in self.found:
            return out
        q = self.found["q"]
        shape = torch.Size((*q.shape[:-1], self.found["v"].shape[-1]))
        stride = torch.empty(shape, device="meta").stride()
        result: Tensor = DTensor.from_local(
            out, q.device_mesh, q.placements, run_check=False, shape=shape, stride=stride
        )
        return result

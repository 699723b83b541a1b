"""The tensors of a call of NSA (NSAInputs, checked against its NSAConfig), and its intermediate results (NSAAux)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dispatch.registry import short_name
from nsa.common.checks import check_dense, check_dtype, is_integer, is_readable, warn_of_heads_first
from nsa.common.replace import replace
from nsa.config import NSAConfig


class NSAAux(NamedTuple):
    """Intermediate results, returned by `nsa_forward_aux` in addition to `out`.

    N_cmp compressed entries, T = `q_tile_size`, tiles = ceil(N / T). Packed inputs: no B; N and tiles run over the
    pack, with the tiles and compressed entries of consecutive documents in buffers of the largest size that T_total
    tokens can need: `(T_total + B*(T - 1)) // T` tiles and `T_total // d` entries. Unused tiles hold -1, unused entries
    0.

    Queries that continue a sequence: N counts queries, N_cmp and `T_total // d` come from keys, and tiles are those
    that hold queries. If only the device knows them, they start with the first of each sequence or document, in buffers
    of `(N + 2*(T - 1)) // T` tiles, packed `(T_total + 2*B*(T - 1)) // T`. With an integer `q_start` there are no
    entries after the last query; with a tensor they hold 0.

    Attributes:
        o_cmp: output of the compressed branch, `[B,N,H,D_v]` in q's dtype; zeros in rows without keys.
        o_slc: output of the selected branch, as o_cmp.
        o_win: output of the window branch, as o_cmp.
        lse_cmp: log-sum-exp of the compressed branch's scaled logits, natural log: `[B,H,N]` in fp32 (fp64 for fp64
            inputs); -inf in rows without keys.
        lse_slc: log-sum-exp of the selected branch, as lse_cmp.
        lse_win: log-sum-exp of the window branch, as lse_cmp.
        k_cmp: compressed keys `[B,N_cmp,H_kv,D]` in q's dtype, as scored and attended to.
        v_cmp: compressed values `[B,N_cmp,H_kv,D_v]` in q's dtype.
        gates: weights of the branches, `[B,N,H,3]`: compressed, selected, window.
        indices: selected blocks, int32 `[B,H,tiles,num_selected_blocks]` (H_kv instead of H if shared in the group),
            ascending, padded with -1.
        cmp_indices: selected blocks of compressed entries, int32 `[B,H,tiles,c]`, ascending, padded with -1; all blocks
            of the document in each tile if c is at least their number. None without `num_cmp_selected_blocks`.

    Examples:
        >>> import torch
        >>> from nsa import NSAConfig, nsa_forward_aux
        >>> q, k, v = torch.randn(1, 256, 4, 32), torch.randn(1, 256, 2, 32), torch.randn(1, 256, 2, 32)
        >>> _, aux = nsa_forward_aux(q, k, v, config=NSAConfig.paper())
        >>> aux.k_cmp.shape, aux.lse_win.shape, aux.indices.shape
        (torch.Size([1, 15, 2, 32]), torch.Size([1, 4, 256]), torch.Size([1, 2, 256, 16]))
    """

    o_cmp: Tensor
    o_slc: Tensor
    o_win: Tensor
    lse_cmp: Tensor
    lse_slc: Tensor
    lse_win: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    gates: Tensor
    indices: Tensor
    cmp_indices: Tensor | None


@dataclass(frozen=True)
class NSAInputs:
    """The tensor arguments of one call of `nsa`. Backends trust inputs that `check` has accepted.

    q `[B,N_q,H,D]`, k `[B,N_k,H_kv,D]`, v `[B,N_k,H_kv,D_v]`; packed: `[T,...]` with `cu_seqlens` int32 `[B+1]`, and
    `cu_seqlens_k` if keys have their own bounds. Backends get the result of `narrow`: q_start is a tensor or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w_k_compress: Tensor | None = None
    w_v_compress: Tensor | None = None
    k_cmp: Tensor | None = None
    v_cmp: Tensor | None = None
    k_slc: Tensor | None = None
    v_slc: Tensor | None = None
    k_win: Tensor | None = None
    v_win: Tensor | None = None
    gate_proj_weight: Tensor | None = None
    gates: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    q_start: int | Tensor | None = None
    q_sum: Tensor | None = None
    max_seqlen: int | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def key_bounds(self) -> Tensor | None:
        """Bounds of the documents' keys and values."""
        return self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k

    @property
    def continues(self) -> bool:
        """True if queries may begin after the first token of their sequence."""
        if self.q_start is not None or self.cu_seqlens_k is not None:
            return True
        return not self.packed and self.q.shape[1] != self.k.shape[1]

    @property
    def first_token(self) -> int:
        """Token index of the first query; not for packed inputs, nor for starts that only the device knows."""
        return self.q_start if is_integer(self.q_start) else self.k.shape[1] - self.q.shape[1]

    @property
    def group_size(self) -> int:
        """G, query heads per key/value head."""
        return self.q.shape[-2] // max(self.k.shape[-2], 1)

    def num_tiles(self, config: NSAConfig) -> int:
        """Number of tiles in NSAAux, for the queries of each sequence, or of all documents."""
        rows, size = self.q.shape[-3], config.q_tile_size
        if self.cu_seqlens is not None:
            docs = self.cu_seqlens.shape[0] - 1
            return (rows + docs * (size - 1) * (2 if self.continues else 1)) // size
        if isinstance(self.q_start, Tensor):
            return (rows + 2 * (size - 1)) // size
        first = self.first_token
        return -(-(first + rows) // size) - first // size if rows > 0 else 0

    def num_entries(self, config: NSAConfig) -> int:
        """Number of compressed entries in NSAAux, for the keys of each sequence, or of all documents."""
        return self.k.shape[0] // config.stride if self.packed else config.num_compressed(self.k.shape[1])

    def needs_grad(self, config: NSAConfig) -> bool:
        """True if one of these tensors, or a parameter of `compress`, needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        return any(t.requires_grad for t in self.tensors().values()) or config.compress_may_learn

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        return {name: x for name in TENSOR_NAMES if isinstance(x := getattr(self, name), Tensor)}

    def map(self, change: Callable[[Tensor], Tensor]) -> NSAInputs:
        """These inputs with `change` applied to every floating-point tensor."""
        changed: dict[str, Any] = {
            name: change(tensor) if tensor.is_floating_point() else tensor for name, tensor in self.tensors().items()
        }
        return replace(self, **changed)

    def narrow(self, config: NSAConfig) -> NSAInputs:
        """Return the same call without an integer q_start: keys end with the last query, so that the start is N_k -
        N_q.
        """
        if isinstance(self.q_start, Tensor) or (self.q_start is None and (self.packed or self.q_sum is None)):
            return self
        stop = self.first_token + self.q.shape[1]
        q_sum = self.q_sum if self.first_token % config.q_tile_size else None  # else the sum of no queries
        if stop == self.k.shape[1]:
            return replace(self, q_start=None, q_sum=q_sum)
        entries = config.num_compressed(stop)
        # Not by |, which Dynamo of torch 2.6 cannot trace
        kept = {**dict.fromkeys(KEY_NAMES, stop), **dict.fromkeys(ENTRY_NAMES, entries)}
        given = self.tensors()
        changed: dict[str, Any] = {name: given[name][:, :count] for name, count in kept.items() if name in given}
        return replace(self, **changed, q_start=None, q_sum=q_sum)

    def check(self, config: NSAConfig) -> None:
        """Raise TypeError or ValueError, naming the argument and the value, unless these tensors fit `config`."""
        self._check_types()
        self._check_sizes()
        self._check_layout_of_documents()
        self._check_options(config)
        self._check_optional_shapes(config)
        self._check_start(config)
        if self.cu_seqlens is not None and _values_readable(self.cu_seqlens, config):
            self._check_documents(self.cu_seqlens, config)
        elif isinstance(self.q_start, Tensor) and _values_readable(self.q_start, config):
            batch, rows, keys = *self.q.shape[:2], self.k.shape[1]
            self._check_starts(self.q_start.tolist(), [rows] * batch, [keys] * batch, config)
        if config.debug and is_readable(self.q, wait=True):
            self._check_finite()

    # Structure: dtype, device, dimensions

    def _check_types(self) -> None:
        for name in ("q", "k", "v"):
            if not isinstance(getattr(self, name), Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(getattr(self, name)).__name__}")
        dtype, device = self.q.dtype, self.q.device
        check_dtype("q", self.q)
        for name in TENSOR_NAMES:
            tensor = getattr(self, name)
            if tensor is None or (name == "q_start" and is_integer(tensor)):
                continue
            if not isinstance(tensor, Tensor):
                also = "an integer, " if name == "q_start" else ""
                raise TypeError(f"{name} must be {also}a torch.Tensor or None, got {type(tensor).__name__}")
            if tensor.dtype not in (allowed := _dtypes(name, dtype)):
                wanted = " or ".join(dict.fromkeys(map(short_name, allowed)))
                because = "" if name in INTEGER_NAMES else f" (q is {short_name(dtype)})"
                raise TypeError(f"{name} must be {wanted}{because}, got {short_name(tensor.dtype)}")
            check_dense(name, tensor)
            if tensor.device != device:
                raise ValueError(f"{name} must be on q's device {device}, got {tensor.device}")

    def _check_sizes(self) -> None:
        q, k, v = self.q.shape, self.k.shape, self.v.shape
        dims = 3 if self.packed else 4
        for name, shape in (("q", q), ("k", k), ("v", v)):
            if len(shape) != dims:
                packed = "[T,heads,D] with cu_seqlens"
                layout = packed if self.packed else f"[B,N,heads,D] (or {packed})"
                raise ValueError(f"{name} must have the layout {layout}, got shape {list(shape)}")
        lead, layout = ("[T]", "[T,heads,D]") if self.packed else ("[B,N]", "[B,N,heads,D]")
        if self.cu_seqlens_k is None and (k[:-3] != q[:-3] or k[-3] < q[-3] or (self.packed and k[-3] > q[-3])):
            longer = "cu_seqlens_k" if self.packed else "more tokens"
            wanted = f"q's {lead} = {list(q[:-2])} (the layout is {layout}), or {longer}"
            raise ValueError(f"k must have {wanted}, got shape {list(k)}")
        if v[:-2] != k[:-2]:
            wanted = f"k's {lead} = {list(k[:-2])} (the layout is {layout})"
            raise ValueError(f"v must have {wanted}, got shape {list(v)}")
        if k[-1] != q[-1]:
            raise ValueError(f"k must have q's head dim D={q[-1]}, got shape {list(k)}")
        if v[-2] != k[-2]:
            raise ValueError(f"v must have k's H_kv={k[-2]} heads, got shape {list(v)}")
        for name, shape, size in (("q", q, q[-1]), ("v", v, v[-1]), ("k", k, k[-2])):
            if size == 0:
                raise ValueError(f"{name} must have at least one head and D >= 1, got shape {list(shape)}")
        if q[-2] == 0 or q[-2] % k[-2] != 0:
            raise ValueError(f"q must have a multiple of k's H_kv={k[-2]} heads (at least one), got H={q[-2]}")
        warn_of_heads_first(self.q, self.k)

    def _check_layout_of_documents(self) -> None:
        if self.cu_seqlens is not None and (self.cu_seqlens.dim() != 1 or self.cu_seqlens.numel() == 0):
            raise ValueError(f"cu_seqlens must have the shape [B+1], got shape {_shape(self.cu_seqlens)}")
        if self.cu_seqlens_k is not None:
            if self.cu_seqlens is None:
                raise ValueError("cu_seqlens_k goes with cu_seqlens, got only cu_seqlens_k")
            if self.cu_seqlens_k.shape != self.cu_seqlens.shape:
                wanted = f"the shape of cu_seqlens, {_shape(self.cu_seqlens)}"
                raise ValueError(f"cu_seqlens_k must have {wanted}, got {_shape(self.cu_seqlens_k)}")
        longest = self.max_seqlen
        if longest is None:
            return
        if not is_integer(longest):
            raise TypeError(f"max_seqlen must be an integer or None, got {longest!r}")
        if not self.packed:
            raise ValueError(f"max_seqlen goes with cu_seqlens, got max_seqlen={longest} without cu_seqlens")
        if longest < 0:
            raise ValueError(f"max_seqlen must be at least 0, got {longest}")

    # Options that exclude or need each other

    def _check_options(self, config: NSAConfig) -> None:
        for one, other in (("k_cmp", "v_cmp"), ("k_slc", "v_slc"), ("k_win", "v_win")):
            missing_one, missing_other = getattr(self, one) is None, getattr(self, other) is None
            if missing_one != missing_other:
                raise ValueError(f"{one} and {other} go together, got only {other if missing_one else one}")
        if self.k_cmp is not None:
            for name in ("w_k_compress", "w_v_compress"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} would be ignored: k_cmp and v_cmp replace compression, got both")
            if config.compress != "mean":
                raise ValueError(
                    f"compress would be ignored: k_cmp and v_cmp replace it, got both and {config.compress!r}"
                )
        if self.gates is not None and self.gate_proj_weight is not None:
            raise ValueError("gates and gate_proj_weight exclude each other, got both")

    def _check_optional_shapes(self, config: NSAConfig) -> None:
        given = {name: tensor for name in TENSOR_NAMES[3:] if (tensor := getattr(self, name)) is not None}
        if not given:
            return
        k, v = self.k.shape, self.v.shape
        *lead, heads, dim = self.q.shape
        kv_heads, v_dim = v[-2:]
        wanted: dict[str, tuple[int, ...]] = {
            "w_k_compress": (kv_heads, dim, dim),
            "w_v_compress": (kv_heads, v_dim, v_dim),
            "k_slc": k,
            "v_slc": v,
            "k_win": k,
            "v_win": v,
            "gate_proj_weight": (heads, 3, dim),
            "gates": (*lead, heads, 3),
        }
        if self.k_cmp is not None and self.v_cmp is not None:
            if self.packed:  # entries of all documents, then any number of unused rows
                entries: tuple[int, ...] = (self.k_cmp.shape[0],) if self.k_cmp.dim() == 3 else (0,)
            else:
                entries = (lead[0], config.num_compressed(k[1]))
            wanted["k_cmp"] = (*entries, kv_heads, dim)
            wanted["v_cmp"] = (*entries, kv_heads, v_dim)
        for name, shape in wanted.items():
            tensor = given.get(name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} must have the shape {list(shape)}, got {_shape(tensor)}")

    # Queries that continue a sequence

    def _check_start(self, config: NSAConfig) -> None:
        start = self.q_start
        if self.q_sum is None and not self.continues:
            return
        if self.continues and not config.causal:
            if start is None:
                sizes = "cu_seqlens_k" if self.packed else f"N_q={self.q.shape[1]}, N_k={self.k.shape[1]}"
                raise ValueError(f"causal=False needs as many queries as keys, got {sizes}")
            got = list(start.shape) if isinstance(start, Tensor) else start
            raise ValueError(f"q_start goes with causal=True, got causal=False and q_start={got}")
        batch = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        if isinstance(start, Tensor):
            if start.shape != (batch,):
                raise ValueError(f"q_start must have the shape [B] = [{batch}], got {_shape(start)}")
        elif start is not None and self.packed:
            raise ValueError(f"q_start must be int32 [B] with cu_seqlens, one for each document, got {start}")
        if self.q_sum is not None:
            wanted = (batch, *self.q.shape[-2:])
            if config.token_mode:
                raise ValueError("q_sum would be ignored: q_tile_size=1 has no queries to add, got both")
            if self.q_sum.shape != wanted:
                raise ValueError(f"q_sum must have the shape {list(wanted)}, got {_shape(self.q_sum)}")
        if not self.packed and not isinstance(start, Tensor):
            self._check_starts([self.first_token], [self.q.shape[1]], [self.k.shape[1]], config)

    def _check_starts(self, starts: list[int], queries: list[int], keys: list[int], config: NSAConfig) -> None:
        """Check the first token, N_q and N_k of each sequence or document."""
        tile = config.q_tile_size
        for b, (start, num_q, num_k) in enumerate(zip(starts, queries, keys, strict=True)):
            where = f" at position {b}" if isinstance(self.q_start, Tensor) else ""
            if not 0 <= start <= num_k - num_q:
                raise ValueError(
                    f"q_start must be from 0 to N_k - N_q = {num_k} - {num_q} = {num_k - num_q}, got {start}{where}"
                )
            if self.q_sum is None and num_q > 0 and start % tile:
                first = start // tile * tile
                raise ValueError(
                    f"q_sum must be given if queries begin inside a tile: tile {start // tile} has tokens {first} "
                    f"to {first + tile - 1} (q_tile_size={tile}), got q_start={start}{where}"
                )

    # Values: checked on the CPU, and on a device only with debug=True

    def _check_documents(self, cu_seqlens: Tensor, config: NSAConfig) -> None:
        bounds = cu_seqlens.tolist()
        check_bounds("cu_seqlens", bounds, self.q.shape[0])
        queries = keys = [stop - start for start, stop in pairwise(bounds)]
        if self.cu_seqlens_k is not None:
            key_bounds = self.cu_seqlens_k.tolist()
            check_bounds("cu_seqlens_k", key_bounds, self.k.shape[0])
            keys = [stop - start for start, stop in pairwise(key_bounds)]
            for b, (num_q, num_k) in enumerate(zip(queries, keys, strict=True)):
                if num_q > num_k:
                    raise ValueError(
                        f"cu_seqlens_k must give each document at least as many keys as queries, got {num_k} keys for "
                        f"{num_q} queries at position {b}"
                    )
        if self.continues:
            bottom_right = [num_k - num_q for num_q, num_k in zip(queries, keys, strict=True)]
            starts = self.q_start.tolist() if isinstance(self.q_start, Tensor) else bottom_right
            self._check_starts(starts, queries, keys, config)
        if self.max_seqlen is not None and self.max_seqlen < max(keys, default=0):
            raise ValueError(f"max_seqlen must be at least the longest document, {max(keys)}, got {self.max_seqlen}")
        if self.k_cmp is not None:
            needed = sum(config.num_compressed(length) for length in keys)
            if self.k_cmp.shape[0] < needed:
                raise ValueError(
                    f"k_cmp must hold the {needed} compressed entries of all documents, got shape {_shape(self.k_cmp)}"
                )

    def _check_finite(self) -> None:
        for name, tensor in self.tensors().items():
            if not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor)).sum())
                raise ValueError(f"{name} must be finite (debug=True), got {bad} NaN or inf of {tensor.numel()} values")


TENSOR_NAMES = tuple(field.name for field in fields(NSAInputs) if field.name != "max_seqlen")

QUERY_NAMES = ("q", "gates")
"""Tensors with one row per query."""

KEY_NAMES = ("k", "v", "k_slc", "v_slc", "k_win", "v_win")
"""Tensors with one row per key."""

ENTRY_NAMES = ("k_cmp", "v_cmp")
"""Tensors with one row per compressed entry."""

INTEGER_NAMES = ("cu_seqlens", "cu_seqlens_k", "q_start")
"""Tensors of int32."""


def _dtypes(name: str, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Allowed dtypes of a tensor, given q's dtype."""
    if name in ("gates", "gate_proj_weight"):
        return dtype, torch.float32
    if name in INTEGER_NAMES:
        return (torch.int32,)
    return (torch.promote_types(dtype, torch.float32) if name == "q_sum" else dtype,)


def check_bounds(name: str, bounds: list[int], total: int) -> None:
    if bounds[0] != 0:
        raise ValueError(f"{name} must start at 0, got {bounds[0]}")
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise ValueError(f"{name} must not decrease, got {start} then {stop} at position {i + 1}")
    if bounds[-1] > total:
        raise ValueError(f"{name} must end at most at T={total}, got {bounds[-1]}")


def _values_readable(tensor: Tensor, config: NSAConfig) -> bool:
    """True if values may be read: on the CPU, and on a device only with debug=True, because that synchronizes."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__  # other subclasses may have no values
    return plain and is_readable(tensor, wait=config.debug)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)

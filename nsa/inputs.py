"""The tensors of a call of NSA (NSAInputs, checked against its NSAConfig), and its intermediate results (NSAAux)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dispatch.registry import short_name
from nsa.common.checks import DTYPES, check_dense
from nsa.config import NSAConfig


class NSAAux(NamedTuple):
    """The intermediate results that `nsa_forward_aux` returns beside `out`.

    N_cmp compressed entries, T = `q_tile_size`, tiles = ceil(N / T). Packed inputs: no B; N and tiles run over the
    pack, tiles and compressed entries document after document, in buffers as large as T_total tokens can need:
    `(T_total + B*(T - 1)) // T` tiles and `T_total // d` entries. Unused tiles hold -1, unused entries 0.

    Attributes:
        o_cmp: output of the compressed branch, `[B,N,H,D_v]` in q's dtype; zeros in rows without keys.
        o_slc: output of the selected branch, likewise.
        o_win: output of the window branch, likewise.
        lse_cmp: log-sum-exp of the compressed branch's scaled logits, natural log: `[B,H,N]` in fp32 (fp64 for fp64
            inputs); -inf in rows without keys.
        lse_slc: that of the selected branch.
        lse_win: that of the window branch.
        k_cmp: compressed keys `[B,N_cmp,H_kv,D]` in q's dtype, as scored and attended to.
        v_cmp: compressed values `[B,N_cmp,H_kv,D_v]` in q's dtype.
        gates: weights of the branches, `[B,N,H,3]`: compressed, selected, window.
        indices: selected blocks, int32 `[B,H,tiles,num_selected_blocks]` (H_kv in place of H when shared in the group),
            ascending, padded with -1.
        cmp_indices: selected blocks of compressed entries, int32 `[B,H,tiles,c]`, ascending, padded with -1; all blocks
            of the document in each tile where c is at least their number. None without `num_cmp_selected_blocks`.

    Example:
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
    """The tensors of one call, as `nsa` takes them. Backends trust what `check` has accepted.

    q `[B,N,H,D]`, k `[B,N,H_kv,D]`, v `[B,N,H_kv,D_v]`; packed: `[T,...]` with `cu_seqlens` int32 `[B+1]`.
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
    max_seqlen: int | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def group_size(self) -> int:
        """G, query heads per key/value head."""
        return self.q.shape[-2] // max(self.k.shape[-2], 1)

    def needs_grad(self, config: NSAConfig) -> bool:
        """Whether one of these tensors, or a parameter of `compress`, needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        return any(t.requires_grad for t in self.tensors().values()) or config.compress_may_learn

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        return {name: value for name in TENSOR_NAMES if isinstance(value := getattr(self, name), Tensor)}

    def map(self, change: Callable[[Tensor], Tensor]) -> NSAInputs:
        """These inputs with `change` applied to every floating-point tensor."""
        changed = {
            name: change(tensor) if tensor.is_floating_point() else tensor for name, tensor in self.tensors().items()
        }
        return NSAInputs(**changed, max_seqlen=self.max_seqlen)

    def check(self, config: NSAConfig) -> None:
        """Raise TypeError or ValueError, naming the argument and the value, unless these tensors fit `config`."""
        self._check_types()
        self._check_sizes()
        self._check_layout_of_documents()
        self._check_options(config)
        self._check_optional_shapes(config)
        if self.cu_seqlens is not None and _values_readable(self.cu_seqlens, config):
            self._check_documents(self.cu_seqlens, config)
        if config.debug and _has_values(self.q):
            self._check_finite()

    # Structure: dtype, device, dimensions

    def _check_types(self) -> None:
        for name in ("q", "k", "v"):
            if not isinstance(getattr(self, name), Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(getattr(self, name)).__name__}")
        dtype, device = self.q.dtype, self.q.device
        if dtype not in DTYPES:
            raise TypeError(f"q must be bfloat16, float16, float32 or float64, got {short_name(dtype)}")
        weights = (dtype, torch.float32)
        allowed = {"cu_seqlens": (torch.int32,), "gates": weights, "gate_proj_weight": weights}
        for name in TENSOR_NAMES:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}")
            if tensor.dtype not in allowed.get(name, (dtype,)):
                wanted = " or ".join(dict.fromkeys(map(short_name, allowed.get(name, (dtype,)))))
                because = "" if name == "cu_seqlens" else f" (q is {short_name(dtype)})"
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
        for name, shape in (("k", k), ("v", v)):
            if shape[:-2] != q[:-2]:
                lead, layout = ("[T]", "[T,heads,D]") if self.packed else ("[B,N]", "[B,N,heads,D]")
                wanted = f"q's {lead} = {list(q[:-2])} (the layout is {layout})"
                raise ValueError(f"{name} must have {wanted}, got shape {list(shape)}")
        if k[-1] != q[-1]:
            raise ValueError(f"k must have q's head dim D={q[-1]}, got shape {list(k)}")
        if v[-2] != k[-2]:
            raise ValueError(f"v must have k's H_kv={k[-2]} heads, got shape {list(v)}")
        for name, shape, size in (("q", q, q[-1]), ("v", v, v[-1]), ("k", k, k[-2])):
            if size == 0:
                raise ValueError(f"{name} must have at least one head and D >= 1, got shape {list(shape)}")
        if q[-2] == 0 or q[-2] % k[-2] != 0:
            raise ValueError(f"q must have a multiple of k's H_kv={k[-2]} heads (at least one), got H={q[-2]}")

    def _check_layout_of_documents(self) -> None:
        if self.cu_seqlens is not None and (self.cu_seqlens.dim() != 1 or self.cu_seqlens.numel() == 0):
            raise ValueError(f"cu_seqlens must have the shape [B+1], got shape {_shape(self.cu_seqlens)}")
        longest = self.max_seqlen
        if longest is None:
            return
        if isinstance(longest, bool) or not isinstance(longest, int):
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
                entries = (lead[0], config.num_compressed(lead[1]))
            wanted["k_cmp"] = (*entries, kv_heads, dim)
            wanted["v_cmp"] = (*entries, kv_heads, v_dim)
        for name, shape in wanted.items():
            tensor = given.get(name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} must have the shape {list(shape)}, got {_shape(tensor)}")

    # Values: checked on the CPU, and on a device only with debug=True

    def _check_documents(self, cu_seqlens: Tensor, config: NSAConfig) -> None:
        bounds = cu_seqlens.tolist()
        tokens = self.q.shape[0]
        if bounds[0] != 0:
            raise ValueError(f"cu_seqlens must start at 0, got {bounds[0]}")
        for i, (start, stop) in enumerate(pairwise(bounds)):
            if stop < start:
                raise ValueError(f"cu_seqlens must not decrease, got {start} then {stop} at position {i + 1}")
        if bounds[-1] > tokens:
            raise ValueError(f"cu_seqlens must end at most at T={tokens}, got {bounds[-1]}")
        lengths = [stop - start for start, stop in pairwise(bounds)]
        if self.max_seqlen is not None and self.max_seqlen < max(lengths, default=0):
            raise ValueError(f"max_seqlen must be at least the longest document, {max(lengths)}, got {self.max_seqlen}")
        if self.k_cmp is not None:
            needed = sum(config.num_compressed(length) for length in lengths)
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


def _values_readable(tensor: Tensor, config: NSAConfig) -> bool:
    """Whether values may be read: on the CPU, and on a device only with debug=True, as reading waits for it."""
    return type(tensor) is Tensor and _has_values(tensor) and (tensor.device.type == "cpu" or config.debug)


def _has_values(tensor: Tensor) -> bool:
    """Not so for fake tensors, meta tensors, and under tracing."""
    return not torch.compiler.is_compiling() and tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)

"""NSA: its calls, and their operators (see nsa/common/operators.py).

Arguments of an operator include the fields of NSAConfig; `compress` must be "mean", and a callable runs before the
operator. q_start is a tensor; the caller slices the keys for an integer one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa.common.checks import check_bool
from nsa.common.operators import ResolvedCall, empty_out, register_backward, register_forward
from nsa.common.resolve import accepted, find_impl, is_remembered, properties_of
from nsa.config import DEFAULT_CONFIG, OPTION_NAMES, NSAConfig, check_options
from nsa.inputs import INTEGER_NAMES, QUERY_NAMES, TENSOR_NAMES, NSAAux, NSAInputs

DIFFERENTIABLE_NAMES = tuple(name for name in TENSOR_NAMES if name not in (*INTEGER_NAMES, "q_sum"))
"""Tensors with gradients, the first ones of TENSOR_NAMES."""

_TENSORS = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in TENSOR_NAMES)
OPTIONS = (
    "SymInt compress_block_size, SymInt? compress_stride, SymInt? select_block_size, SymInt num_selected_blocks, "
    "SymInt window_size, SymInt q_tile_size, bool share_heads_in_group, SymInt num_init_blocks, "
    "SymInt num_local_blocks, SymInt? num_cmp_selected_blocks, SymInt n_block_size, str compress, bool causal, "
    "float? softmax_scale, bool debug"
)
"""Schema of NSAConfig's fields."""
_KEYWORDS = f"{OPTIONS}, SymInt? max_seqlen, bool deterministic, bool recompute, str? backend"
FORWARD = "nsa_kernels::forward", f"({_TENSORS}, *, {_KEYWORDS}) -> Tensor"
SAVING = "nsa_kernels::saving", f"({_TENSORS}, *, {_KEYWORDS}) -> (Tensor, Tensor[])"
BACKWARD = "nsa_kernels::backward", f"(Tensor do, Tensor[] saved, {_TENSORS}, *, {_KEYWORDS}) -> Tensor[]"

FLAG_DEFAULTS = {"deterministic": False, "recompute": False, "backend": None}
CALL_DEFAULTS = {"max_seqlen": None, **FLAG_DEFAULTS}
"""Keyword arguments that are neither tensors nor options of NSAConfig."""

CALL_KEYWORDS = (*TENSOR_NAMES[3:], *CALL_DEFAULTS, "config")
"""Keyword arguments that are not options of NSAConfig."""


# Calls


@dataclass
class NSACall(ResolvedCall):
    """The tensors that are given, since each argument of autograd costs host time; config, deterministic, recompute."""

    names: tuple[str, ...]
    inputs: NSAInputs
    """The tensors by name, with an integer q_start already applied."""

    op, saves_out = "nsa", False

    @classmethod
    def of(cls, impl: dispatch.Impl, backward: bool, inputs: NSAInputs, options: dict[str, Any]) -> NSACall:
        given = inputs.tensors()
        return cls(impl, backward, (*given.values(),), options, (*given,), inputs)

    @property
    def sources(self) -> tuple[Any, ...]:
        return self.tensors[: sum(name in DIFFERENTIABLE_NAMES for name in self.names)]

    def with_tensors(self) -> Callable[[tuple[Any, ...]], ResolvedCall]:
        impl, options, names, longest = self.impl, self.options, self.names, self.inputs.max_seqlen

        def make(tensors: tuple[Any, ...]) -> NSACall:
            given: dict[str, Any] = dict(zip(names, tensors, strict=True))
            return NSACall(impl, True, tensors, options, names, NSAInputs(**given, max_seqlen=longest))

        return make

    def forward(self) -> Tensor:
        out: Tensor = self.impl.load()(self.inputs, self.options["config"], aux=False)[0]
        return out

    def saving(self) -> tuple[Tensor, list[Tensor]]:
        training = self.impl.load_training()
        if training is None:
            return self.forward(), []
        out, saved = training.nsa_saving(self.inputs, self.options["config"], recompute=self.options["recompute"])
        return out, saved

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        training, config, recompute = self.impl.load_training(), self.options["config"], self.options["recompute"]
        saved = [] if training is None else training.nsa_saved_like(self.inputs, config, recompute=recompute)
        return empty_out(self.inputs.q, self.inputs.k, self.inputs.v), saved

    def gradients(self, do: Tensor, out: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
        by_name = self.gradients_by_name(do, saved)
        return [by_name[name] for name in self.names if name in DIFFERENTIABLE_NAMES]

    def gradients_by_name(
        self, do: Tensor, saved: Sequence[Tensor], share_dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Gradients of the floating-point tensors.

        Args:
            share_dtype: dtype of all gradients except those of q and gates. If queries continue a sequence these
                gradients are partial sums, and fp32 lets the caller round once after summing. Default: None, which
                means the tensors' own.
        """
        training = self.impl.load_training()
        if training is not None:
            config, deterministic = self.options["config"], self.options["deterministic"]
            by_name: dict[str, Tensor] = training.nsa_backward(
                self.inputs, config, saved, do, deterministic=deterministic, share_dtype=share_dtype
            )
            return by_name
        sources = zip(self.names, self.sources, strict=False)
        tensors = {name: x if share_dtype is None or name in QUERY_NAMES else x.to(share_dtype) for name, x in sources}
        return dict(zip(tensors, self.recomputed([*tensors.values()], do), strict=True))


def empty_aux(inputs: NSAInputs, config: NSAConfig) -> NSAAux:
    """Intermediate results without values."""
    q, v = inputs.q, inputs.v
    *batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[-2:]
    tiles, entries = inputs.num_tiles(config), inputs.num_entries(config)
    sums = torch.promote_types(q.dtype, torch.float32)
    gates = sums if inputs.gates is None else inputs.gates.dtype
    select_heads, count = kv_heads if config.shares_heads else heads, config.num_cmp_selected_blocks

    def empty(*shape: int, dtype: torch.dtype = q.dtype) -> Tensor:
        return q.new_empty((*batch, *shape), dtype=dtype)

    return NSAAux(
        o_cmp=empty(tokens, heads, v_dim),
        o_slc=empty(tokens, heads, v_dim),
        o_win=empty(tokens, heads, v_dim),
        lse_cmp=empty(heads, tokens, dtype=sums),
        lse_slc=empty(heads, tokens, dtype=sums),
        lse_win=empty(heads, tokens, dtype=sums),
        k_cmp=empty(entries, kv_heads, dim),
        v_cmp=empty(entries, kv_heads, v_dim),
        gates=empty(tokens, heads, 3, dtype=gates),
        indices=empty(select_heads, tiles, config.num_selected_blocks, dtype=torch.int32),
        cmp_indices=None if count is None else empty(heads, tiles, count, dtype=torch.int32),
    )


def resolve(
    inputs: NSAInputs, config: NSAConfig, *, deterministic: bool, recompute: bool, backend: str | None, needs_grad: bool
) -> NSACall:
    """Check all arguments and find a backend that supports the call."""
    check_bool("deterministic", deterministic)
    check_bool("recompute", recompute)
    options = {"config": config, "deterministic": deterministic, "recompute": recompute}
    properties = None
    plain = not config.debug and config.compress == "mean"
    unread = inputs.cu_seqlens is None and inputs.q_start is None and inputs.q_sum is None  # no values are checked
    if plain and unread and is_remembered(inputs.q, backend):  # `narrow` does not change such a call
        flags = deterministic, recompute, backend, needs_grad
        properties = properties_of(vars(inputs).values(), config, *flags)
    impl = accepted(properties)
    if impl is None:
        inputs.check(config)
        inputs = inputs.narrow(config)
        facts = {"inputs": inputs, **options}
        call = dispatch.Call("nsa", inputs.q.device, inputs.q.dtype, backward=needs_grad, options=facts)
        impl = find_impl(call, backend, properties)
    return NSACall.of(impl, needs_grad, inputs, options)


# Operators


def _resolve(*, needs_grad: bool, **arguments: Any) -> NSACall:
    """The call of an operator's arguments."""
    inputs = NSAInputs(**{name: arguments[name] for name in (*TENSOR_NAMES, "max_seqlen")})
    config = NSAConfig(**{name: arguments[name] for name in OPTION_NAMES})
    flags = {name: arguments[name] for name in FLAG_DEFAULTS}
    return resolve(inputs, config, **flags, needs_grad=needs_grad)


register_forward(*FORWARD, partial(_resolve, needs_grad=False), empty_out)  # checks run with the graph
register_forward(*SAVING, partial(_resolve, needs_grad=True))
register_backward("nsa", SAVING, BACKWARD, partial(_resolve, needs_grad=True), DIFFERENTIABLE_NAMES)


# Calls of the operators with the keywords of the public functions


def options_of(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Options of NSAConfig among the keyword arguments of a call.

    Raises:
        TypeError: for unknown keywords, and for options together with a config.
    """
    options = {name: value for name, value in keywords.items() if name not in CALL_KEYWORDS}
    check_options(keywords.get("config"), options, CALL_KEYWORDS)
    return options


def call_forward(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """Call the operator of `nsa_forward`, with detached inputs."""
    tensors = [None if x is None else x.detach() for x in operator_tensors(q, k, v, keywords)]
    out: Tensor = torch.ops.nsa_kernels.forward(*tensors, **operator_keywords(keywords))
    return out


def call_saving(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """Call the operator of `nsa`."""
    tensors = operator_tensors(q, k, v, keywords)
    out: Tensor = torch.ops.nsa_kernels.saving(*tensors, **operator_keywords(keywords))[0]
    return out


def operator_tensors(q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> list[Tensor | None]:
    """The tensors of a call in the order of the schema."""
    return [q, k, v, *(keywords.get(name) for name in TENSOR_NAMES[3:])]


def operator_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    """All keyword arguments of the schema, with defaults for those not given."""
    options, config = options_of(keywords), keywords.get("config") or DEFAULT_CONFIG
    flags = {name: keywords.get(name, default) for name, default in CALL_DEFAULTS.items()}
    return {**{name: options.get(name, getattr(config, name)) for name in OPTION_NAMES}, **flags}

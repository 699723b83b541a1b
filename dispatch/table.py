"""The table of implementations, best first for each op. Targets are strings, imported on first use."""

from __future__ import annotations

from dispatch.impl import Impl

CUTE = ("cutlass.cute", "flash_attn.cute")
TRITON = ("triton",)

ROWS: tuple[Impl, ...] = (
    Impl(
        "nsa",
        "cute",
        target="cute_kernels.forward:nsa",
        check="cute_kernels.support:check",
        packages=CUTE,
        training="cute_kernels.backward",
    ),
    Impl("nsa", "reference", target="nsa.reference:nsa", check="nsa.reference:check"),
    Impl(
        "nsa_with_cache",
        "cute",
        target="cute_kernels.decoding:nsa_with_cache",
        check="cute_kernels.support:check_with_cache",
        packages=CUTE,
    ),
    Impl(
        "nsa_with_cache",
        "reference",
        target="nsa.decoding.reference:nsa_with_cache",
        check="nsa.decoding.reference:check",
    ),
    Impl(
        "neighborhood_attention",
        "triton",
        target="ascend_kernels.neighborhood.algorithms:forward",
        check="ascend_kernels.neighborhood.support:check_narrow_gpu",
        packages=TRITON,
        training="ascend_kernels.neighborhood.algorithms",
    ),
    Impl(
        "neighborhood_attention",
        "cute",
        target="cute_kernels.neighborhood:forward",
        check="cute_kernels.support:check_neighborhood_attention",
        packages=CUTE,
        training="cute_kernels.neighborhood",
    ),
    Impl(
        "neighborhood_attention",
        "triton",
        target="ascend_kernels.neighborhood.algorithms:forward",
        check="ascend_kernels.neighborhood.support:check_gpu",
        packages=TRITON,
        training="ascend_kernels.neighborhood.algorithms",
    ),
    Impl(
        "neighborhood_attention",
        "ascend",
        target="ascend_kernels.neighborhood.algorithms:forward",
        check="ascend_kernels.neighborhood.support:check_npu",
        packages=TRITON,
        training="ascend_kernels.neighborhood.algorithms",
    ),
    Impl(
        "neighborhood_attention",
        "reference",
        target="ascend_kernels.neighborhood.reference:neighborhood_attention",
        check="ascend_kernels.support:check_reference",
    ),
    Impl(
        "neighborhood_attention_backward",
        "triton",
        target="ascend_kernels.neighborhood.backward:backward",
        check="ascend_kernels.neighborhood.support:check_gpu",
        packages=TRITON,
    ),
    Impl(
        "neighborhood_attention_backward",
        "ascend",
        target="ascend_kernels.neighborhood.backward:backward",
        check="ascend_kernels.neighborhood.support:check_npu",
        packages=TRITON,
    ),
    Impl(
        "neighborhood_attention_backward",
        "reference",
        target="ascend_kernels.neighborhood.reference:neighborhood_attention_backward",
        check="ascend_kernels.support:check_reference",
    ),
    Impl(
        "attention_residual",
        "triton",
        target="ascend_kernels.residual.launchers:forward",
        check="ascend_kernels.residual.support:check_gpu",
        packages=TRITON,
        training="ascend_kernels.residual.launchers",
    ),
    Impl(
        "attention_residual",
        "ascend",
        target="ascend_kernels.residual.launchers:forward",
        check="ascend_kernels.residual.support:check_npu",
        packages=TRITON,
        training="ascend_kernels.residual.launchers",
    ),
    Impl(
        "attention_residual",
        "reference",
        target="ascend_kernels.residual.reference:attention_residual",
        check="ascend_kernels.support:check_reference",
    ),
)

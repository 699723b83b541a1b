"""AttentionResidual: a layer with the weights of `attention_residual`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nsa.common.checks import check_eps, check_sizes
from nsa.residual.api import attention_residual
from nsa.residual.operators import check_layer_blocks


class AttentionResidual(nn.Module):
    """Mixture of the outputs of all earlier blocks, as a layer's input instead of their sum (arXiv 2603.15031).

    A learned query `w_query` weighs the blocks for each token. It starts at zero, so that initially all blocks have the
    same weight; `w_norm` starts at one.

    Args:
        hidden_size: D.
        eps: as in `attention_residual`. Default: 1e-6.
        norm_weight: learn a `w_norm`; otherwise the attribute is None. Default: True.
        backend: as in `attention_residual`. Default: None.
        device: device of the parameters, as in nn.Linear. Default: None.
        dtype: dtype of the parameters, as in nn.Linear. Default: None.

    Raises:
        TypeError: naming an argument of the wrong type, what was expected and what came.
        ValueError: naming an argument out of range, what was expected and what came.

    Examples:
        >>> import torch
        >>> from nsa import AttentionResidual
        >>> mix = AttentionResidual(hidden_size=32)
        >>> mix([torch.randn(1, 10, 32) for _ in range(4)]).shape
        torch.Size([1, 10, 32])
    """

    w_norm: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-6,
        norm_weight: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(hidden_size=hidden_size)
        check_eps(eps)
        self.eps, self.backend = eps, backend
        self.w_query = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        if norm_weight:
            self.w_norm = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        else:
            self.register_parameter("w_norm", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give all blocks the same weight. Call it after `to_empty` on layers created on the meta device, as for
        nn.Linear.
        """
        with torch.no_grad():
            self.w_query.zero_()
            if self.w_norm is not None:
                self.w_norm.fill_(1.0)

    def forward(self, blocks: Tensor | Sequence[Tensor]) -> Tensor:
        """Mix the blocks with `attention_residual`.

        Args:
            blocks: `[L,B,N,hidden_size]`, or a list of L tensors `[B,N,hidden_size]`, with any leading dimensions
                instead of B and N; in the weights' dtype, unless these are fp32.

        Returns:
            `[B,N,hidden_size]`, or the blocks' other leading dimensions, in their dtype.

        Raises:
            TypeError, ValueError: as `attention_residual`.
        """
        check_layer_blocks(blocks, self.w_query)
        return attention_residual(blocks, self.w_query, self.w_norm, self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.w_query.shape[0]}, eps={self.eps}, norm_weight={self.w_norm is not None}"

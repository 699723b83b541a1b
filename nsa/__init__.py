"""Native Sparse Attention (arXiv 2502.11089). Importing this package needs only torch.

Pages in docstrings, such as docs/semantics.md, are in the repository; a wheel installs them in share/doc/nsa-kernels of
the environment.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__version__ = "0.3.0.dev0"  # read by pyproject.toml


def _check_siblings() -> None:
    """Check that the distribution's other packages, whose names are generic, are not shadowed by another project's."""
    home = Path(__file__).resolve().parent.parent
    for name in ("dispatch", "cute_kernels", "ascend_kernels"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise ImportError(f"nsa-kernels is incomplete: its package {name!r} is missing beside {home / 'nsa'}")
        if Path(spec.origin).resolve().parent.parent != home:
            raise ImportError(
                f"nsa-kernels needs its own package {name!r} from {home}, but Python finds another one first: "
                f"{spec.origin}. Rename or remove that one, or put {home} before it on sys.path."
            )


_check_siblings()

from nsa.api import nsa, nsa_forward, nsa_forward_aux  # noqa: E402
from nsa.block_sparse.api import block_sparse_attention  # noqa: E402
from nsa.compression import LinearCompression  # noqa: E402
from nsa.config import NSAConfig  # noqa: E402
from nsa.decoding.api import nsa_with_cache  # noqa: E402
from nsa.decoding.cache import NSACache  # noqa: E402
from nsa.decoding.table import PageTable  # noqa: E402
from nsa.indexer.api import indexer_kl_loss, top_blocks_by_max  # noqa: E402
from nsa.inputs import NSAAux  # noqa: E402
from nsa.module import NSAttention  # noqa: E402
from nsa.neighborhood.api import neighborhood_attention  # noqa: E402
from nsa.neighborhood.cache import NeighborhoodCache  # noqa: E402
from nsa.neighborhood.module import NeighborhoodAttention, NeighborhoodAttentionLayer  # noqa: E402
from nsa.residual.api import attention_residual  # noqa: E402
from nsa.residual.module import AttentionResidual  # noqa: E402
from nsa.rotary import llama_rope, rotary_table  # noqa: E402
from nsa.unpadding import Unpadding  # noqa: E402
from nsa.warm_up import warm_up  # noqa: E402

__all__ = [
    "AttentionResidual",
    "LinearCompression",
    "NSAAux",
    "NSACache",
    "NSAConfig",
    "NSAttention",
    "NeighborhoodAttention",
    "NeighborhoodAttentionLayer",
    "NeighborhoodCache",
    "PageTable",
    "Unpadding",
    "attention_residual",
    "block_sparse_attention",
    "indexer_kl_loss",
    "llama_rope",
    "neighborhood_attention",
    "nsa",
    "nsa_forward",
    "nsa_forward_aux",
    "nsa_with_cache",
    "rotary_table",
    "top_blocks_by_max",
    "warm_up",
]

"""FlashAttention-4 (flash_attn.cute): attention through it, and direct launches of its kernels.

    interface    the three attentions of NSA and their backward; rules for block lists on each architecture; masks
    launch       records which compiled kernels FA4 uses for a call, and launches them without its Python afterwards
    kept         finds them on disk, without its Python
    without_gpu  what its compilers need where there is no GPU

Nothing else in cute_kernels imports flash_attn. It is imported on first use, so interface and launch need torch alone.
"""

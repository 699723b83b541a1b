"""FlashAttention-4 (flash_attn.cute): attention with its kernels, compiled and launched without its interface.

    rules        which calls its block-sparse kernels take, and the tiles of block lists
    masks        which keys a row sees; mask_mods
    kernels      its kernels, compiled for the forms that NSA calls
    interface    the three attentions of NSA and their backward

Nothing else in cute_kernels imports flash_attn, which is imported where one of its kernels is compiled. rules needs
torch alone.
"""

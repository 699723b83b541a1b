"""FlashAttention-4 (flash_attn.cute), called from here alone."""

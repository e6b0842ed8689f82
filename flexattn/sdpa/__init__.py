"""sdpa: flexattn as a provider of the kernels behind PyTorch's scaled_dot_product_attention and varlen_attn.

`import flexattn.sdpa` changes nothing. `register()` adds a name to PyTorch's registry of flash attention
implementations, and `torch.nn.attention.activate_flash_attention_impl("flexattn")` replaces the kernels.
"""

from flexattn.sdpa.operators import (
    flash_attention_backward,
    flash_attention_forward,
    flash_attention_forward_no_dropout_inplace,
    scaled_dot_product_flash_attention,
    scaled_dot_product_flash_attention_backward,
)
from flexattn.sdpa.provider import Handle, activate, register
from flexattn.sdpa.rules import Unhandled, why_not

__all__ = [
    "Handle",
    "Unhandled",
    "activate",
    "flash_attention_backward",
    "flash_attention_forward",
    "flash_attention_forward_no_dropout_inplace",
    "register",
    "scaled_dot_product_flash_attention",
    "scaled_dot_product_flash_attention_backward",
    "why_not",
]

"""Products of a frozen base in eight bits, while LoRA, norms and attention stay as they are."""

from wanshim.core.eight_bit.linear import compute_in_eight_bits, takes_eight_bits
from wanshim.core.eight_bit.product import refusal

__all__ = ["compute_in_eight_bits", "refusal", "takes_eight_bits"]

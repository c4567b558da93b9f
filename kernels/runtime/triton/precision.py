"""Precision of float32 matrix products."""

import torch


def use_tf32(is_wanted: bool) -> None:
    """Allow or forbid TF32 for float32 matrix products, whatever torch's defaults are.

    TF32 rounds the operands of a product to ten bits of mantissa. Without TF32 they are multiplied exactly.
    """
    torch.set_float32_matmul_precision("high" if is_wanted else "highest")
    torch.backends.cudnn.allow_tf32 = is_wanted


def dot_precision() -> str:
    """Return the setting of use_tf32 as the input_precision of tl.dot."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"

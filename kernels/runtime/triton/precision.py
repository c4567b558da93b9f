"""What products of float32 numbers are made of."""

import torch


def use_tf32(is_wanted: bool) -> None:
    """Products may round what they multiply to ten bits; without it they are exact, whatever torch's defaults are."""
    torch.set_float32_matmul_precision("high" if is_wanted else "highest")
    torch.backends.cudnn.allow_tf32 = is_wanted


def dot_precision() -> str:
    """Triton's word for it: input_precision of tl.dot."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"

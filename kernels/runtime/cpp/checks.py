"""The comparison that checks of native functions use. Checks run at each start, and importing torch.testing is slow."""

from torch import Tensor


def assert_agrees(found: Tensor, expected: Tensor, rtol: float, atol: float = 1e-6) -> None:
    """Raise AssertionError, with the largest difference, unless dtypes match and |found - expected| ≤ the tolerance.

    The tolerance is atol + rtol·|expected|; a NaN fails.
    """
    difference = (found.float() - expected.float()).abs()
    if found.dtype != expected.dtype or not (difference <= atol + rtol * expected.float().abs()).all():
        raise AssertionError(f"it differs from its reference by {difference.max():.3g}")

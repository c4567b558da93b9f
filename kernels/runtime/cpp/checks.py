"""What a check is made of. It runs at each start: torch.testing alone would take a second to import."""

from torch import Tensor


def assert_agrees(found: Tensor, expected: Tensor, rtol: float, atol: float = 1e-6) -> None:
    """Raises AssertionError with the largest difference unless all are within atol + rtol·|expected|."""
    difference = (found.float() - expected.float()).abs()
    if found.dtype != expected.dtype or not (difference <= atol + rtol * expected.float().abs()).all():
        raise AssertionError(f"it differs from its reference by {difference.max():.3g}")

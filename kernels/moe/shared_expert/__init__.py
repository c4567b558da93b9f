"""The sum of the routed experts' output and the shared expert's."""

from baton.kernels.moe.shared_expert import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["add_shared"]

add_shared = dispatch(
    reference.add_shared, (native.takes, native.add_shared), triton="baton.kernels.moe.shared_expert.triton"
)

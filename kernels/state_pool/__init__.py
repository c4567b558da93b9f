"""Operations on whole slots of a state pool; each is one launch for any number of slots."""

from baton.kernels.runtime.dispatch import dispatch
from baton.kernels.state_pool import reference

__all__ = ["clear", "copy", "gather", "scatter"]

TRITON = "baton.kernels.state_pool.triton"

copy = dispatch(reference.copy, triton=TRITON)
clear = dispatch(reference.clear, triton=TRITON)
gather = dispatch(reference.gather, triton=TRITON)
scatter = dispatch(reference.scatter, triton=TRITON)

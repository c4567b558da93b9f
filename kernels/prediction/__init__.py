"""Operations of a head for multi-token prediction that are not part of its layers."""

from baton.kernels.prediction import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["exchange_hidden", "join"]

exchange_hidden = dispatch(reference.exchange_hidden, (native.takes_hidden, native.exchange_hidden))
join = dispatch(reference.join, (native.takes_halves, native.join))

"""The two nets that the tests of this folder run on, each with its forms: the gated delta net, and Kimi's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.delta_net import decode, prefill
from baton.kernels.delta_net.decode import native as native_decode, reference as reference_decode
from baton.kernels.delta_net.prefill import native as native_prefill, reference as reference_prefill
from tests.kernels.delta_net import delta_nets, kda_nets
from tests.kernels.delta_net.nets import Net


@dataclass(frozen=True)
class Forms:
    """The forms of one operation."""

    dispatched: Callable[..., Tensor]  # what the models call
    native: Callable[..., Tensor]  # C++
    reference: Callable[..., Tensor]


@dataclass(frozen=True)
class Kind:
    name: str
    layouts: st.SearchStrategy[Any]
    typical: Any  # the layout of a real model, but for the number of heads
    small: Any  # a layout
    drawn: Callable[..., Net]
    definition: Callable[..., tuple[Tensor, Tensor]]
    prefill: Forms
    decode: Forms


GATED = Kind(
    "gated delta net",
    delta_nets.layouts(),
    delta_nets.TYPICAL,
    delta_nets.SMALL,
    delta_nets.drawn,
    delta_nets.definition,
    Forms(prefill.delta_prefill, native_prefill.delta_prefill, reference_prefill.delta_prefill),
    Forms(decode.delta_decode, native_decode.delta_decode, reference_decode.delta_decode),
)
KDA = Kind(
    "KDA",
    kda_nets.layouts(),
    kda_nets.TYPICAL,
    kda_nets.SMALL,
    kda_nets.drawn,
    kda_nets.definition,
    Forms(prefill.kda_prefill, native_prefill.kda_prefill, reference_prefill.kda_prefill),
    Forms(decode.kda_decode, native_decode.kda_decode, reference_decode.kda_decode),
)
KINDS = [GATED, KDA]


def name_of(kind: Kind) -> str:
    return kind.name

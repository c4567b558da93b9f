"""The stochastic rounding of states in Triton."""

import torch
from triton import language as tl
from triton.runtime.interpreter import InterpretedFunction

from baton.kernels.state_pool.rounding import NAN, round_stochastically
from baton.kernels.state_pool.triton_states import rounded

NANS = [0x7FFFFFFF, 0x7FFFFFFF - 2**31, 0x7FFF0001, 0x7FC00000, 0x7F800001, 0x7FC00000 - 2**31]
INFINITIES = [0x7F800000, 0x7F800000 - 2**31]


@InterpretedFunction
def round_all(bits_ptr, rounded_ptr, position, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    states = tl.load(bits_ptr + places).to(tl.float32, bitcast=True)
    tl.store(rounded_ptr + places, rounded(states, places, position))


def in_triton(bits: torch.Tensor, position: int) -> torch.Tensor:
    """Round one row of states, which are given as bits: int32 pointers keep the payloads of NaNs."""
    found = torch.empty(len(bits), dtype=torch.int16)
    round_all[(1,)](bits, found, position, BLOCK=len(bits))
    return found


def test_every_nan_stays_nan() -> None:
    """A GPU's arithmetic makes the bits 0x7FFFFFFF, which overflow to -0 if a random integer is added."""
    bits = torch.tensor(NANS, dtype=torch.int32).repeat(100)[:512]
    assert in_triton(bits, 7).unique().tolist() == [NAN]
    states = bits.view(torch.float32)
    assert round_stochastically(states[None], torch.tensor([7])).view(torch.int16).unique().tolist() == [NAN]


def test_numbers_are_rounded_as_in_the_reference_and_infinities_stay() -> None:
    numbers = torch.randn(510, generator=torch.Generator().manual_seed(0))
    bits = torch.cat((numbers.view(torch.int32), torch.tensor(INFINITIES, dtype=torch.int32)))
    expected = round_stochastically(bits.view(torch.float32)[None], torch.tensor([123_456]))[0]
    assert torch.equal(in_triton(bits, 123_456), expected.view(torch.int16))
    assert expected[-2:].tolist() == [torch.inf, -torch.inf]

"""Reading, rounding and writing of a pool's states in Triton kernels."""

from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.sizes import next_power_of_2
from baton.kernels.state_pool import rounding

NAN = tl.constexpr(rounding.NAN)


def candidates(size: int) -> list[KernelConfig]:
    """Return the block sizes to choose from, the default first, for states whose rows have `size` columns.

    A thread owns its elements: no thread reads in place what another one has written.
    """
    elements = [(1024, 1), (512, 1), (2048, 1), (2048, 2), (4096, 2), (4096, 4), (8192, 4)]
    columns = next_power_of_2(size)
    return [KernelConfig({"BLOCK_P": max(1, tile // columns)}, warps) for tile, warps in elements]


@jit
def widened(loaded):
    """Return the float32 state of a pool's elements, which are float32, or the bits of bfloat16 as int16."""
    if loaded.dtype == tl.int16:
        return (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 (which of them is known when the kernel is compiled)
        return loaded


@jit
def rounded(state, places, position):
    """Round as rounding.round_stochastically does; return the bits of bfloat16 as int16.

    places: element indices within the slot.
    position: the row's absolute position, int64.
    """
    chance = _mix(places + _mix(position.to(tl.int32))) >> 16 & 0xFFFF
    bits = state.to(tl.int32, bitcast=True) + chance >> 16
    return tl.where(state != state, NAN, bits).to(tl.int16)


@jit
def as_kept(state, places, position, pool_ptr):
    """Return the state as it will be after it has been stored in a pool and loaded again."""
    if pool_ptr.dtype.element_ty == tl.int16:
        return widened(rounded(state, places, position))
    else:  # noqa: RET505 (which of them is known when the kernel is compiled)
        return state


@jit
def put(pool_ptr, state, inside):
    """Store what as_kept returned, or what `widened` did, to a tile of pointers to the pool's elements."""
    if pool_ptr.dtype.element_ty == tl.int16:
        tl.store(pool_ptr, (state.to(tl.int32, bitcast=True) >> 16).to(tl.int16), inside)
    else:
        tl.store(pool_ptr, state, inside)


@jit
def _mix(x):
    """Compute rounding._mix."""
    x = x * 0x7FEB352D
    return (x ^ (x >> 15 & 0x1FFFF)) * -0x7B935975

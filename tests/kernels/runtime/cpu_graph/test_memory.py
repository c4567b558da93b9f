"""The layout of buffers that share memory."""

from hypothesis import given, strategies as st

from baton.kernels.runtime.cpu_graph.memory import ALIGNMENT, Lifetime, SharedMemory, lay_out

LIFETIMES = st.lists(
    st.builds(
        lambda size, first, length: Lifetime(size, first, first + length),
        size=st.integers(1, 1000),
        first=st.integers(0, 20),
        length=st.integers(0, 8),
    ),
    max_size=30,
)


@given(LIFETIMES)
def test_buffers_that_live_at_the_same_time_do_not_overlap(lifetimes: list[Lifetime]) -> None:
    offsets, size = lay_out(lifetimes)
    placed = list(zip(offsets, lifetimes, strict=True))
    for number, (offset, buffer) in enumerate(placed):
        assert offset % ALIGNMENT == 0 and offset + buffer.size <= size
        for other_offset, other in placed[:number]:
            together = buffer.first <= other.last and other.first <= buffer.last
            apart = offset >= other_offset + other.size or other_offset >= offset + buffer.size
            assert apart or not together


def test_layers_use_the_same_memory_again() -> None:
    layers = [Lifetime(640, layer, layer + 1) for layer in range(50)]
    assert lay_out(layers)[1] == 2 * 640


def test_shared_memory_grows_and_earlier_users_keep_theirs() -> None:
    memory = SharedMemory()
    small = memory.take(100)
    assert small.nbytes >= 100
    assert memory.take(50).data_ptr() == small.data_ptr()
    assert memory.take(5000).data_ptr() != small.data_ptr()
    small.fill_(1)

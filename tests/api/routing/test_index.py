"""The index of states by digest."""

from hypothesis import given, strategies as st

from baton.api.routing.index import StateIndex

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "all"]), st.integers(0, 3), st.integers(0, 5)), max_size=60
)


@given(steps=STEPS)
def test_the_index_knows_which_engines_have_a_state(steps: list[tuple[str, int, int]]) -> None:
    index, expected = StateIndex(), set[tuple[int, int]]()
    for step, engine, digest in steps:
        match step:
            case "add":
                index.add(engine, [digest])
                expected.add((engine, digest))
            case "remove":
                index.remove(engine, [digest])
                expected.discard((engine, digest))
            case _:
                index.remove_all(engine)
                expected = {pair for pair in expected if pair[0] != engine}
        for known in range(6):
            assert {*index.engines(known)} == {engine for engine, digest in expected if digest == known}
        assert len(index) == len({digest for _, digest in expected})
        assert [index.count(each) for each in range(4)] == [
            sum(engine == each for engine, _ in expected) for each in range(4)
        ]

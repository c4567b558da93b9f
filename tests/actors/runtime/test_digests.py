"""Digests of token sequences."""

from hypothesis import given, strategies as st

from baton.actors.runtime.digests import Digester
from baton.actors.tokens import pack

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


@given(tokens=TOKENS, cut=st.integers(0, 40), salt=st.text(max_size=5))
def test_a_digest_follows_from_that_of_a_beginning(tokens: list[int], cut: int, salt: str) -> None:
    digester, cut = Digester(), min(cut, len(tokens) - 1)
    whole = digester.extended(digester.beginning(salt), 0, pack(tokens)).tolist()
    known = whole[cut - 1] if cut else digester.beginning(salt)
    assert Digester().extended(known, cut, pack(tokens[cut:])).tolist() == whole[cut:]


@given(one=TOKENS, other=TOKENS)
def test_other_tokens_have_other_digests(one: list[int], other: list[int]) -> None:
    digester = Digester()
    first, second = (digester.extended(0, 0, pack(tokens))[-1] for tokens in (one, other))
    assert (first == second) == (one == other)


def test_so_have_other_salts_and_other_orders() -> None:
    digester = Digester()
    assert digester.beginning("a") != digester.beginning("b")
    assert digester.extended(0, 0, pack([1, 2]))[-1] != digester.extended(0, 0, pack([2, 1]))[-1]

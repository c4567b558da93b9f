from hypothesis import example, given, strategies as st

from baton.models.text.stop_strings import StopStrings


def cut(text: str, strings: list[str], keep: bool) -> tuple[str, str | None]:
    """Cut a text, by definition, where the first stop string is complete; of several that end there, at the longest."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


letters = st.text("ab\u00e9", max_size=24)


@given(
    pieces=st.lists(st.text("ab\u00e9", max_size=5), max_size=12),
    strings=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3),
    keep=st.booleans(),
)
@example(pieces=["aa", "ab"], strings=["aab"], keep=False)
@example(pieces=["ab", "ab", "a"], strings=["abab\u00e9", "ba"], keep=True)
def test_any_split_gives_the_definition(pieces: list[str], strings: list[str], keep: bool) -> None:
    stops = StopStrings(strings, keep)
    shown = "".join(stops.push(piece) for piece in pieces) + stops.flush()
    assert (shown, stops.matched) == cut("".join(pieces), strings, keep)


@given(text=letters, strings=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_a_possible_start_is_held_back(text: str, strings: list[str]) -> None:
    stops = StopStrings(strings)
    shown = "".join(map(stops.push, text))
    if stops.matched is None:
        held = text[len(shown) :]
        assert shown + held == text
        assert not held or any(string.startswith(held) for string in strings)


def test_the_match_is_known_at_once_and_nothing_follows() -> None:
    stops = StopStrings(["\n\n", "END"])
    assert stops.push("one\n") == "one"
    assert stops.matched is None
    assert stops.push("\ntwo END") == ""
    assert stops.matched == "\n\n"
    assert stops.push("three") == "" and stops.flush() == ""


def test_without_strings_text_passes() -> None:
    stops = StopStrings(["", ""])
    assert stops.push("anything") == "anything"
    assert stops.matched is None and stops.flush() == ""

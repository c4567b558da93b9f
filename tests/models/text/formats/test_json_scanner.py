import json
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from baton.models.text.formats.json_scanner import MAX_DEPTH, JsonScanner, as_json

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
# Parts of JSON, to be joined in any order.
SHREDS = st.lists(
    st.sampled_from([*'{}[],:"\\ \n', "0", "12", "-", ".", "e", "E+", "true", "nul", "l", "u00e9", "\\u", '"a"', "é"]),
    max_size=14,
).map("".join)


def scan(pieces: list[str]) -> tuple[str, str, JsonScanner]:
    """Feed the pieces to a scanner; return the text of the JSON value, the unread rest, and the scanner."""
    scanner, passed, rest = JsonScanner(), "", ""
    for piece in pieces:
        at = 0
        while at < len(piece) and not scanner.whole and not scanner.broken:
            text, at = scanner.feed(piece, at)
            passed += text
        rest += piece[at:]
    return passed, rest, scanner


@given(
    value=VALUES, indent=st.sampled_from([None, 1]), ascii=st.booleans(), after=st.sampled_from([",", "}", " x", "]"])
)
def test_json_is_whole_at_its_last_character(value: Any, indent: int | None, ascii: bool, after: str) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    for pieces in ([text + after], list(text + after)):
        passed, rest, scanner = scan(pieces)
        assert (passed, rest, scanner.whole, scanner.broken) == (text, after, True, False)


def is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse, strict=False)
    except ValueError:
        return False
    return True


@given(text=SHREDS)
@example(text='{"a":1,}')
@example(text="[1,]")
@example(text="[,1]")
@example(text="01")
@example(text="1.")
@example(text="-")
@example(text="1e5")
@example(text='"\\u12g4"')
@example(text='{"a":"\\"}"}')
@example(text='{"a" "b"}')
@example(text="[1}")
@example(text="NaN")
def test_as_json_accepts_json_only(text: str) -> None:
    found = as_json(text)
    assert (found is not None) == is_json(text)
    if found is not None:
        assert json.loads(found) == json.loads(text, strict=False)


@given(text=SHREDS)
def test_the_end_does_not_depend_on_the_pieces(text: str) -> None:
    at_once, one_by_one = scan([text]), scan(list(text))
    assert at_once[:2] == one_by_one[:2]
    assert (at_once[2].whole, at_once[2].broken) == (one_by_one[2].whole, one_by_one[2].broken)


def test_control_characters_in_strings_become_escapes() -> None:
    assert as_json('{"a\tb":\n"c\nd\x00"}') == '{"a\\tb":\n"c\\nd\\u0000"}'


@pytest.mark.parametrize("open, close", [("[", "]"), ('{"a":', "}")])
def test_depth_is_limited(open: str, close: str) -> None:
    deep = open * MAX_DEPTH + ("1" if close == "}" else "") + close * MAX_DEPTH
    assert as_json(deep) == deep
    assert as_json(open + deep + close) is None

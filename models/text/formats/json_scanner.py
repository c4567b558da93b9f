"""One JSON value in a stream of text."""

import re

# Parsers of clients end somewhere: serde_json's at 128.
MAX_DEPTH = 128

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_CONTROL = {chr(code): f"\\u{code:04x}" for code in range(32)} | {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _all(characters: str, target: str) -> dict[str, str]:
    return dict.fromkeys(characters, target)


_DIGITS = "0123456789"
_SPACE = " \t\n\r"
_VALUE = {
    **_all(_SPACE, "value"),
    **_all(_DIGITS, "integer"),
    **_all("{[", "open"),
    '"': "string",
    "-": "minus",
    "0": "zero",
    "t": "t",
    "f": "f",
    "n": "n",
}
_AFTER = {**_all(_SPACE, "after"), ",": "next", "}": "close", "]": "close"}
_EXPONENT = _all("eE", "exponent")
# What each character leads to: a state, which is a row, or something to do, which is none.
_ROWS: dict[str, dict[str, str]] = {
    "value": _VALUE,
    "first item": {**_VALUE, **_all(_SPACE, "first item"), "]": "close"},
    "first key": {**_all(_SPACE, "first key"), '"': "key", "}": "close"},
    "next key": {**_all(_SPACE, "next key"), '"': "key"},
    "colon": {**_all(_SPACE, "colon"), ":": "value"},
    "after": _AFTER,
    "key": {'"': "colon", "\\": "escape"},
    "string": {'"': "after", "\\": "escape"},
    "escape": {**_all('"\\/bfnrt', "escaped"), "u": "4 digits"},
    "4 digits": _all(_DIGITS + "abcdefABCDEF", "3 digits"),
    "3 digits": _all(_DIGITS + "abcdefABCDEF", "2 digits"),
    "2 digits": _all(_DIGITS + "abcdefABCDEF", "1 digit"),
    "1 digit": _all(_DIGITS + "abcdefABCDEF", "escaped"),
    "minus": {**_all(_DIGITS, "integer"), "0": "zero"},
    "zero": {**_AFTER, **_EXPONENT, ".": "point"},
    "integer": {**_AFTER, **_EXPONENT, **_all(_DIGITS, "integer"), ".": "point"},
    "point": _all(_DIGITS, "fraction"),
    "fraction": {**_AFTER, **_EXPONENT, **_all(_DIGITS, "fraction")},
    "exponent": {**_all(_DIGITS, "power"), **_all("+-", "sign")},
    "sign": _all(_DIGITS, "power"),
    "power": {**_AFTER, **_all(_DIGITS, "power")},
    **{
        word[:length]: {word[length]: word[: length + 1] if length + 1 < len(word) else "after"}
        for word in ("true", "false", "null")
        for length in range(1, len(word))
    },
}
_COMPLETE_NUMBERS = frozenset({"zero", "integer", "fraction", "power"})
_OF_NUMBERS = _COMPLETE_NUMBERS | {"point", "exponent"}


class JsonScanner:
    """Follows one JSON value (RFC 8259) to its last character, `whole`, or to the first that is wrong, `broken`.

    It is more lenient than the standard in one thing: control characters in strings, such as line breaks, which models
    write, are passed on as escapes. Nested deeper than MAX_DEPTH is wrong. No recursion, and linear time.
    """

    def __init__(self) -> None:
        self.whole = False
        self.broken = False
        self._state = "value"
        # Of what is open, outermost first.
        self._closers: list[str] = []
        # What an escape is in: a key or another string.
        self._within = "string"

    def feed(self, text: str, at: int) -> tuple[str, int]:
        """Go on at text[at:]: what of it belongs to the value, as JSON, and where in text that ends.

        A number that is not in anything is whole only when another character follows.
        """
        passed: list[str] = []
        start, end, closers = at, len(text), self._closers
        while at < end and not self.whole and not self.broken:
            state = self._state
            if state == "string" or state == "key":
                at = _end(_PLAIN, text, at)
                if at == end:
                    break
                self._within = state
                if escape := _CONTROL.get(text[at]):
                    passed += text[start:at], escape
                    start = at = at + 1
                    continue
            target = _ROWS[state].get(text[at], "")
            if not closers and state in _COMPLETE_NUMBERS and target not in _OF_NUMBERS:
                self.whole = True
                break
            if target in _ROWS:
                self._state = target
                self.whole = target == "after" and not closers
            else:
                self._do(target, text[at])
            at += not self.broken
        passed.append(text[start:at])
        return "".join(passed), at

    def _do(self, what: str, character: str) -> None:
        closers = self._closers
        if what == "open" and len(closers) < MAX_DEPTH:
            closers.append("}" if character == "{" else "]")
            self._state = "first key" if character == "{" else "first item"
        elif what == "close" and closers[-1] == character:
            closers.pop()
            self._state = "after"
            self.whole = not closers
        elif what == "next":
            self._state = "next key" if closers[-1] == "}" else "value"
        elif what == "escaped":
            self._state = self._within
        else:
            self.broken = True


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the run of characters ends that begins at `at`."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()


def as_json(text: str) -> str | None:
    """Text that is one JSON value between white space, as JSON without that; None if it is none."""
    text = text.strip(_SPACE)
    scanner = JsonScanner()
    json, end = scanner.feed(text + " ", 0)
    return json if scanner.whole and end == len(text) else None

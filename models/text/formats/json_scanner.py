"""A scanner for one JSON value in a stream of text."""

import re

# Clients' parsers limit the nesting: serde_json's to 128.
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
# A transition table: state → character → next state. A name without a row is an action of JsonScanner._do.
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
_NUMBER_STATES = _COMPLETE_NUMBERS | {"point", "exponent"}


class JsonScanner:
    """A scanner that follows one JSON value (RFC 8259) to its last character or to the first invalid one.

    It is more lenient than the standard in one respect: models write control characters, such as line breaks, in
    strings, and these are returned as escapes. Nesting deeper than MAX_DEPTH is invalid. The scanner needs linear time
    and no recursion.
    """

    def __init__(self) -> None:
        self.whole = False  # the value is complete
        self.broken = False  # a character was invalid
        self._state = "value"
        self._closers: list[str] = []  # the closing brackets of open objects and arrays, outermost first
        self._within = "string"  # the state to return to after an escape: "key" or "string"

    def feed(self, text: str, at: int) -> tuple[str, int]:
        """Continue at text[at:]; return the part that belongs to the value, as strict JSON, and the index of its end.

        A number at the top level is whole only once another character follows it.
        """
        parts: list[str] = []
        start, end, closers = at, len(text), self._closers
        while at < end and not self.whole and not self.broken:
            state = self._state
            if state == "string" or state == "key":
                at = _end(_PLAIN, text, at)
                if at == end:
                    break
                self._within = state
                if escape := _CONTROL.get(text[at]):
                    parts += text[start:at], escape
                    start = at = at + 1
                    continue
            target = _ROWS[state].get(text[at], "")
            if not closers and state in _COMPLETE_NUMBERS and target not in _NUMBER_STATES:
                self.whole = True
                break
            if target in _ROWS:
                self._state = target
                self.whole = target == "after" and not closers
            else:
                self._do(target, text[at])
            at += not self.broken
        parts.append(text[start:at])
        return "".join(parts), at

    def _do(self, action: str, character: str) -> None:
        """Carry out an action of the table. The value is broken if the table has no action for this character."""
        closers = self._closers
        if action == "open" and len(closers) < MAX_DEPTH:
            closers.append("}" if character == "{" else "]")
            self._state = "first key" if character == "{" else "first item"
        elif action == "close" and closers[-1] == character:
            closers.pop()
            self._state = "after"
            self.whole = not closers
        elif action == "next":
            self._state = "next key" if closers[-1] == "}" else "value"
        elif action == "escaped":
            self._state = self._within
        else:
            self.broken = True


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the run of matching characters that begins at `at`."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()


def as_json(text: str) -> str | None:
    """Return text that is one JSON value as strict JSON, without surrounding white space; None if it is not JSON."""
    text = text.strip(_SPACE)
    scanner = JsonScanner()
    json, end = scanner.feed(text + " ", 0)
    return json if scanner.whole and end == len(text) else None

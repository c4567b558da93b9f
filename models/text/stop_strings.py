"""Stop strings in a stream of text: which text may be shown already, and where generation ends."""

from collections.abc import Sequence


class StopStrings:
    """A filter that ends a stream of text at the first stop string that becomes complete.

    If several become complete with the same character, the longest counts. The result does not depend on how the text
    is split into pushes. Text that may be the beginning of a stop string is held back until that is decided.
    `keep`: whether to show the stop string too. `matched`: the stop string that was found, or None.
    """

    def __init__(self, strings: Sequence[str], keep: bool = False) -> None:
        self._strings = [string for string in strings if string]
        self._longest = max(map(len, self._strings), default=0)
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add new text and return the text that may be shown; always "" after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(text.find(string) + len(string), -len(string), string) for string in self._strings if string in text]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end if self._keep else end - len(self.matched)]
        shown = len(text) - self._undecided(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """End the stream, and return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a proper prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(string.startswith(tail) for string in self._strings):
                return length
        return 0

"""Text that arrives in pieces, and basic readers of such text: generators that yield where they wait for more."""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader. It yields, without a value, when it needs the next piece; its return value is what it has read."""

WHITE_SPACE = " \t\r\n"


class Broken(Exception):
    """The error that a reader raises when the text is not what it expects."""


class Pieces:
    """The input of a reader: `text[at:]` has arrived and has not been read yet.

    A reader can set a mark and rewind to it. Text that was read is kept only from the mark on. A reader waits only when
    all text has been read. So the work is linear in the text's length if no part is rewound more than a few times.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self._over = False  # no more pieces will arrive
        self._mark: int | None = None  # index of the mark in `text`; 0 if the mark is in earlier text (`_before`)
        self._before: list[str] = []  # text between the mark and the beginning of `text`

    def give(self, text: str) -> None:
        """Take the next piece. All earlier text must have been read."""
        if self._mark is not None:
            self._before.append(self.text[self._mark :])
            self._mark = 0
        self.text, self.at = text, 0

    def end(self) -> None:
        """Note that no more pieces will arrive."""
        self._over = True

    def mark(self) -> None:
        """Remember the current position for `rewind`. There is one mark at most: a new mark replaces the old."""
        self._mark = self.at
        self._before.clear()

    def unmark(self) -> None:
        self._mark = None
        self._before.clear()

    def rewind(self) -> None:
        """Go back to the mark, and remove it."""
        assert self._mark is not None
        if self._before:
            self.text, self.at = "".join([*self._before, self.text[self._mark :]]), 0
        else:
            self.at = self._mark
        self.unmark()

    def more(self) -> Reading[bool]:
        """Wait for a character at `at`; return False if there is none because the output is over."""
        while self.at == len(self.text):
            if self._over:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end of the output."""
        return self.text[self.at] if (yield from self.more()) else ""

    def take(self, count: int) -> str:
        """Read up to `count` characters of `text`, without waiting for more."""
        part = self.text[self.at : self.at + count]
        self.at += len(part)
        return part

    def before(self, pattern: re.Pattern[str]) -> str:
        """Read `text` up to the next match of `pattern`; all of it if there is none."""
        found = pattern.search(self.text, self.at)
        return self.take((found.start() if found else len(self.text)) - self.at)

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read all characters that match from here on. `pattern` is a repeated character class: it matches "" too."""
        found: list[str] = []
        while (yield from self.more()):
            match = pattern.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if match[0]:
                found.append(match[0])
            if self.at < len(self.text):
                break
        return "".join(found)

    def one_of(self, *options: str) -> Reading[str]:
        """Read and return one of the options. Raises Broken if none is next. No option may be a prefix of another."""
        read = ""
        while (yield from self.more()):
            for option in options:
                if option.startswith(read) and self.text.startswith(option[len(read) :], self.at):
                    self.at += len(option) - len(read)
                    return option
            read += self.take(max(map(len, options)))
            if not any(option.startswith(read) for option in options):
                break
        raise Broken

    def space(self) -> Reading[None]:
        """Skip white space."""
        if self.text[self.at : self.at + 1].isspace() or self.at == len(self.text):
            yield from self.run(_SPACE)

    def line_breaks(self) -> Reading[None]:
        """Skip line breaks."""
        yield from self.run(_LINE_BREAKS)


_SPACE = re.compile(f"[{WHITE_SPACE}]*")
_LINE_BREAKS = re.compile(r"\n*")


def beginning(*markers: str) -> re.Pattern[str]:
    """Return a pattern for the beginning of a marker: the whole marker, or a prefix of it at the end of the text."""
    begun = {marker[:length] for marker in markers for length in range(1, len(marker))}
    return re.compile("|".join([*map(re.escape, markers), *(re.escape(part) + r"\Z" for part in sorted(begun))]))


class Trailing:
    """A filter between a reader and `show` that holds back `characters` at the end of the text.

    Text that is held back is dropped if a marker follows, and shown if other text follows.
    """

    def __init__(self, show: Callable[[str], None], characters: str) -> None:
        self._show = show
        self._characters = characters
        self._held: list[str] = []
        self.after_marker = False  # whether no text but `characters` came since the last marker

    def add(self, text: str) -> None:
        body = text.rstrip(self._characters)
        if body:
            self.release()
            self._show(body)
            self.after_marker = False
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def release(self) -> None:
        """Show the text that is held back."""
        if self._held:
            self._show("".join(self._held))
            self._held.clear()

    def drop(self) -> None:
        """Drop the text that is held back, because a marker follows."""
        self._held.clear()
        self.after_marker = True

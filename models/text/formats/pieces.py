"""Text that comes in pieces, and what reads it: generators that yield wherever they must wait for more."""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
# It yields nothing: only that it waits for the next piece.
Reading = Generator[None, None, T]

WHITE_SPACE = " \t\r\n"


class Broken(Exception):
    """The text is not what its reader expects."""


class Pieces:
    """`text[at:]` has come and has not been read. Of what was read nothing is kept but from a mark on.

    A reader waits only when all is read. So work is linear in the text, if none of it is rewound more than a few times.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self._over = False
        self._mark: int | None = None
        # From the mark on, what came before `text`.
        self._before: list[str] = []

    def give(self, text: str) -> None:
        """The next piece; all before it was read."""
        if self._mark is not None:
            self._before.append(self.text[self._mark :])
            self._mark = 0
        self.text, self.at = text, 0

    def end(self) -> None:
        """No more pieces will come."""
        self._over = True

    def mark(self) -> None:
        """A place to come back to; there is only the last one."""
        self._mark = self.at
        self._before.clear()

    def unmark(self) -> None:
        self._mark = None
        self._before.clear()

    def rewind(self) -> None:
        """Back to the mark, which is gone then."""
        assert self._mark is not None
        if self._before:
            self.text, self.at = "".join([*self._before, self.text[self._mark :]]), 0
        else:
            self.at = self._mark
        self.unmark()

    def more(self) -> Reading[bool]:
        """Wait for a character at `at`; False if there is none, at the end of all text."""
        while self.at == len(self.text):
            if self._over:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, which stays unread; "" at the end of all text."""
        return self.text[self.at] if (yield from self.more()) else ""

    def take(self, count: int) -> str:
        """The next characters of `text`, as many as there are."""
        taken = self.text[self.at : self.at + count]
        self.at += len(taken)
        return taken

    def before(self, pattern: re.Pattern[str]) -> str:
        """What there is of `text` before the next match of `pattern`; all of it if there is none."""
        found = pattern.search(self.text, self.at)
        return self.take((found.start() if found else len(self.text)) - self.at)

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """All characters from here on that match; `pattern` is of any number of characters of a kind."""
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
        """The option that comes next, read; Broken if none does. None is the beginning of another."""
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
    """Finds where one of the markers begins: whole, or as much of it as there is before the end of the text."""
    begun = {marker[:length] for marker in markers for length in range(1, len(marker))}
    return re.compile("|".join([*map(re.escape, markers), *(re.escape(part) + r"\Z" for part in sorted(begun))]))


class Trailing:
    """Text on its way to `show`, but for `characters` at its end: they are dropped where a marker follows."""

    def __init__(self, show: Callable[[str], None], characters: str) -> None:
        self._show = show
        self._characters = characters
        self._held: list[str] = []
        # Whether there is nothing but such characters since the last marker.
        self.behind_marker = False

    def add(self, text: str) -> None:
        body = text.rstrip(self._characters)
        if body:
            self.release()
            self._show(body)
            self.behind_marker = False
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def release(self) -> None:
        if self._held:
            self._show("".join(self._held))
            self._held.clear()

    def drop(self) -> None:
        """A marker follows."""
        self._held.clear()
        self.behind_marker = True

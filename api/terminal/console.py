"""The terminal of `baton chat`: lines read with editing and history, and text shown that cannot drive it."""

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

PROMPT = "> "
HISTORY_LINES = 1000


class Terminal:
    """Standard input, output and error of the chat. Control characters in what is shown are replaced.

    interactive: somebody types, so there are prompts, and a failure is not the end.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._in_line = False
        self._notes = sys.stderr.isatty()
        self._editor = open_editor() if self.interactive and sys.stdout.isatty() else None
        for file in (sys.stdin, sys.stdout):
            if isinstance(file, TextIOWrapper):
                file.reconfigure(errors="replace")

    def read(self, offered: str = "") -> str | None:
        """One trimmed line of input; None at its end. offered: the line to begin with, for it could not be sent."""
        self.end_line()
        try:
            if self._editor is not None:
                return self._editor.read(offered)
            line = input(PROMPT if self.interactive else "").strip()
            return line or offered
        except EOFError:
            self._in_line = self.interactive
            return None
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            self._in_line = True
            self.note("/quit or Ctrl-D leaves.")
            return ""

    def write(self, text: str) -> None:
        """A piece of an answer."""
        if text:
            print(printable(text), end="", flush=True)
            self._in_line = not text.endswith("\n")

    def say(self, text: str) -> None:
        self.end_line()
        print(printable(text), flush=True)

    def note(self, text: str) -> None:
        """Dim, and only for somebody who watches."""
        self.end_line()
        if self._notes:
            plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
            print(printable(text) if plain else f"\x1b[2m{printable(text)}\x1b[0m", file=sys.stderr, flush=True)

    def complain(self, text: str) -> None:
        self.end_line()
        print(f"baton: {printable(text)}", file=sys.stderr, flush=True)

    def end_line(self) -> None:
        if self._in_line:
            print(flush=True)
            self._in_line = False


class Editor:
    """Lines edited by readline. What is typed is kept for the next time, but not a line that begins with a space."""

    def __init__(self, path: Path) -> None:
        import readline

        self._readline = readline
        self._path = path
        readline.set_auto_history(False)
        readline.set_history_length(HISTORY_LINES)
        with suppress(OSError):  # A home that cannot be written costs the history and no more.
            create_private(path)
            readline.read_history_file(path)

    def read(self, offered: str) -> str:
        self._readline.set_startup_hook(lambda: self._readline.insert_text(offered))
        try:
            line = input(PROMPT)
        finally:
            self._readline.set_startup_hook()
        self._remember(line)
        return line.strip()

    def _remember(self, line: str) -> None:
        last = self._readline.get_history_item(self._readline.get_current_history_length())
        if not line.strip() or line.startswith(" ") or line == last:
            return
        self._readline.add_history(line)
        with suppress(OSError):
            if hasattr(self._readline, "append_history_file"):
                self._readline.append_history_file(1, self._path)
            else:
                self._readline.write_history_file(self._path)


def open_editor() -> Editor | None:
    """None where Python has no readline."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    try:
        return Editor(Path(state) / "baton" / "chat_history")
    except ImportError:
        return None


def create_private(path: Path) -> None:
    """A file that only its owner can read, if there was none and also if there was one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.fchmod(file, 0o600)
    finally:
        os.close(file)


def printable(text: str) -> str:
    """Without control characters: a model's answer must not drive the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)

"""The terminal of `baton chat`: input with editing and history, and output without control characters."""

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

PROMPT = "> "
HISTORY_LINES = 1000


class Terminal:
    """Standard input, output and error of the chat. Control characters in the output are replaced."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()  # True: show prompts, and do not end the chat at a failure
        self._in_line = False  # whether the cursor is inside a line, not at its beginning
        self._notes = sys.stderr.isatty()
        self._editor = open_editor() if self.interactive and sys.stdout.isatty() else None
        for file in (sys.stdin, sys.stdout):
            if isinstance(file, TextIOWrapper):
                file.reconfigure(errors="replace")

    def read(self, draft: str = "") -> str | None:
        """Read one trimmed line. Return None at the end of the input.

        draft: text that the line begins with. Without an editor, an empty line returns the draft.
        """
        self.end_line()
        try:
            if self._editor is not None:
                return self._editor.read(draft)
            line = input(PROMPT if self.interactive else "").strip()
            return line or draft
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
        """Print a part of an answer, without ending the line."""
        if text:
            print(printable(text), end="", flush=True)
            self._in_line = not text.endswith("\n")

    def say(self, text: str) -> None:
        """Print a text on separate lines."""
        self.end_line()
        print(printable(text), flush=True)

    def note(self, text: str) -> None:
        """Print a note to standard error, dimmed, if standard error is a terminal."""
        self.end_line()
        if self._notes:
            plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
            print(printable(text) if plain else f"\x1b[2m{printable(text)}\x1b[0m", file=sys.stderr, flush=True)

    def complain(self, text: str) -> None:
        """Print an error to standard error."""
        self.end_line()
        print(f"baton: {printable(text)}", file=sys.stderr, flush=True)

    def end_line(self) -> None:
        """End the current line of output, unless the cursor is at the beginning of a line."""
        if self._in_line:
            print(flush=True)
            self._in_line = False


class Editor:
    """Line input with readline. Lines go to a history file, except those that begin with a space."""

    def __init__(self, path: Path) -> None:
        import readline

        self._readline = readline
        self._path = path
        readline.set_auto_history(False)
        readline.set_history_length(HISTORY_LINES)
        with suppress(OSError):  # Without a writable home folder there is no history.
            create_private(path)
            readline.read_history_file(path)

    def read(self, draft: str) -> str:
        """Read a line. draft: text with which the line begins, for the user to edit."""
        self._readline.set_startup_hook(lambda: self._readline.insert_text(draft))
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
    """Return an editor, or None if Python has no readline."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    try:
        return Editor(Path(state) / "baton" / "chat_history")
    except ImportError:
        return None


def create_private(path: Path) -> None:
    """Create a file if it does not exist, and let only its owner read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.fchmod(file, 0o600)
    finally:
        os.close(file)


def complain(error: Exception) -> None:
    """Print an error to standard error, in one line."""
    print(f"baton: {escaped(str(error))}", file=sys.stderr)


def escaped(text: str) -> str:
    """Return a text in one line, with escapes such as \\x1b for control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Replace control characters: a model's answer must not control the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)

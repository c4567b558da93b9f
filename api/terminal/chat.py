"""`baton chat`: a chat on a terminal. The server keeps the session, so each turn sends only the new messages."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, Literal, TypeAlias

from baton.api.terminal.client import (
    DEFAULT_URL,
    ChatClient,
    ChatError,
    EndEvent,
    Event,
    SessionInfo,
    TextEvent,
    TurnInfo,
)
from baton.api.terminal.console import Terminal
from baton.api.terminal.view import exchange, figures, session_table, standing, transcript

HELP = """\
/sessions      list the sessions
/resume ID     continue a session: its id, the beginning of the id, or its number in the list
/fork [TURN]   continue in a copy of this session, which ends after that turn or the last one
/rewind TURN   delete all turns after that one; 0 deletes all
/history       show the turns and their numbers
/new           begin a new session
/close         delete this session
/help          show this help
/quit          leave, as Ctrl-D does
Ctrl-C stops an answer. Begin a line with // to send one that begins with /."""
# HTTP statuses of a refused turn, of which the session records nothing.
TRACELESS = (400, 401, 403, 413, 429)
# Codes of errors after which the session is fetched again, because it may have changed.
CHANGED = ("session_moved_on", "session_not_found", "session_not_saved", "session_not_deleted")
INTERRUPTED = 130  # exit code
SHORTEST = 4  # minimum characters of an abbreviated id
# Result of a line: "answered": a message was answered or a command carried out; "kept": the session has the message, or
# a command failed; "lost": the session does not have the message, so the user can send it again.
Outcome: TypeAlias = Literal["answered", "kept", "lost"]


def chat(
    url: str,
    api_key: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    session: str | None = None,
    fork: str | None = None,
) -> int:
    """Read messages from standard input and print the answers as they arrive. Return the exit code."""
    settings = {"temperature": temperature, "max_tokens": max_tokens}
    chosen = {name: value for name, value in settings.items() if value is not None}
    try:
        talk = Chat(ChatClient(url, api_key), Terminal(), system, chosen)
        return talk.run() if talk.begin(session, fork) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of standard output is gone. Redirect the output, so that Python's flush at exit does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class Chat:
    """The loop of `baton chat`, with one current session. The first message creates a session."""

    def __init__(self, client: ChatClient, terminal: Terminal, system: str | None, settings: dict[str, Any]) -> None:
        self._client = client
        self._terminal = terminal
        self._system = system
        self._settings = settings
        self._session: SessionInfo | None = None
        self._listed: list[str] = []  # ids in the order in which /sessions numbered them
        self._commands: dict[str, Callable[[str], None]] = {
            "/sessions": self._list,
            "/resume": self._resume,
            "/fork": self._fork,
            "/rewind": self._rewind,
            "/history": self._history,
            "/new": self._new,
            "/close": self._close,
            "/help": lambda _: self._terminal.say(HELP),
        }

    def begin(self, session: str | None, fork: str | None) -> bool:
        """Show a greeting, and resume or fork the named session. Return False if the chat cannot begin."""
        try:
            model = self._client.model()
            if self._terminal.interactive:
                self._terminal.say(f"{model} at {self._client.url}. /help shows the commands, Ctrl-D leaves.")
            if named := session or fork:
                self._resume(named)
            if fork:
                self._fork("")
        except ChatError as error:
            self._terminal.complain(str(error))
            if error.code != "session_not_found" or not self._terminal.interactive:
                return False
            self._obey("/sessions")
            self._terminal.note("/resume continues one of them; any other message begins a new session.")
        return True

    def run(self) -> int:
        """Read and carry out lines until the end of the input. Return the exit code."""
        draft = ""  # a message that was lost, for the user to edit and send again
        while (line := self._terminal.read(draft)) is not None and line != "/quit":
            draft = ""
            if not line:
                continue
            try:
                outcome = self._take(line)
            except KeyboardInterrupt:
                outcome = "lost"
                if not self._terminal.interactive:
                    raise
            if outcome != "answered" and not self._terminal.interactive:
                return 1
            if outcome == "lost":
                draft = line
                self._terminal.note("Enter tries again.")
        self._leave()
        return 0

    def _take(self, line: str) -> Outcome:
        """Carry out a command, or send a message."""
        if line.startswith("//"):
            return self._say(line[1:])
        if line.startswith("/"):
            return "answered" if self._obey(line) else "kept"
        return self._say(line)

    def _leave(self) -> None:
        """Show how to continue the session."""
        self._terminal.end_line()
        if self._session is not None and self._session.turn:
            where = [] if self._client.url == DEFAULT_URL else ["--url", self._client.url]
            again = shlex.join(["baton", "chat", *where, "--session", self._session.id])
            self._terminal.note(f"Continue with: {again}")

    def _say(self, text: str) -> Outcome:
        """Send one message and show the answer. Return "lost" if the session does not have the message."""
        try:
            if self._session is None:
                self._session = self._client.create()
            self._show(self._session, self._client.turn(self._session.id, self._body(self._session, text)))
            return "answered"
        except KeyboardInterrupt:
            self._terminal.write(" [stopped]")
            if not self._terminal.interactive:
                raise
        except ChatError as error:
            self._terminal.complain(str(error))
            if error.code == "session_not_saved" and self._session is not None:
                return "answered"
            if error.status in TRACELESS or error.code == "session_busy":
                return "lost"
        return self._catch_up(text)

    def _body(self, session: SessionInfo, text: str) -> dict[str, Any]:
        """Return the body of the request for a turn with this message."""
        messages = [{"role": "user", "content": text}]
        if self._system and not session.turn:
            messages.insert(0, {"role": "system", "content": self._system})
        return {"messages": messages, "after": session.turn, **self._settings}

    def _show(self, session: SessionInfo, events: Generator[Event, None, None]) -> None:
        """Print an answer while it is generated, and update the session's turn and position at its end."""
        first = None
        with closing(events):
            for event in events:
                if isinstance(event, TextEvent):
                    first = time.monotonic() if first is None else first
                    self._terminal.write(event.text)
                elif isinstance(event, EndEvent):
                    session.turn, session.position = event.turn, event.position
                    self._terminal.end_line()
                    self._terminal.note(figures(event, time.monotonic() - first if first is not None else 0))

    def _catch_up(self, text: str) -> Outcome:
        """Fetch the session to find out whether it recorded a turn whose end did not arrive."""
        before = self._session
        if before is None:
            return "lost"
        try:
            now = self._session = self._client.settled(before.id)
        except ChatError as error:
            if error.code == "session_not_found":
                self._forget()
            return "lost"
        new = [turn for turn in now.turns if turn.turn > before.turn]
        if new and message_of(new[-1]) == text:
            self._report(new[-1])
            return "kept"
        self._terminal.complain("the turn was not recorded" if now.turn == before.turn else moved(now))
        return "lost"

    def _report(self, turn: TurnInfo) -> None:
        """Show a turn whose end did not arrive, but which the session has recorded."""
        if turn.status == "completed":
            self._terminal.say(exchange(turn))
        else:
            part = f"turn {turn.turn} was kept with {turn.output_tokens} tokens of its answer"
            self._terminal.complain(f"{part}; the session is at {turn.position} tokens")

    def _obey(self, line: str) -> bool:
        """Carry out a command. Return False if the command failed."""
        word, _, argument = line.partition(" ")
        try:
            if word not in self._commands:
                raise ChatError(f"there is no command {word}: see /help")
            self._commands[word](argument.strip())
        except ChatError as error:
            self._terminal.complain(str(error))
            if error.code in CHANGED:
                self._look_again()
            return False
        return True

    def _list(self, _: str) -> None:
        sessions = self._client.sessions()
        self._listed = [session.id for session in sessions]
        self._terminal.say(session_table(sessions, self._session.id if self._session is not None else None))

    def _resume(self, name: str) -> None:
        if not name:
            raise ChatError("which one? Give its id, or its number in /sessions")
        session = self._session = self._client.session(self._find(name))
        if self._terminal.interactive:
            self._terminal.say("\n".join([standing(session), *map(exchange, session.turns[-1:])]))
        if self._system and session.turn:
            self._terminal.complain("--system applies to a session's first turn only, which this session has had")

    def _find(self, name: str) -> str:
        """Return a session's id. name: the id, its beginning, or its number in /sessions. Raises ChatError."""
        ids = [session.id for session in self._client.sessions()]
        if name in ids:
            return name
        if name.isdecimal() and 0 < int(name) <= len(self._listed):
            return self._listed[int(name) - 1]
        matches = [
            id for id in ids if id.startswith(name) or (len(name) >= SHORTEST and id.startswith(f"session-{name}"))
        ]
        if len(matches) > 1:
            raise ChatError(f"{len(matches)} sessions begin with {name}")
        if not matches:
            raise ChatError(f"there is no session {name}", 404, "session_not_found")
        return matches[0]

    def _fork(self, argument: str) -> None:
        session = self._current()
        turn = number(argument) if argument else None
        fork = self._session = self._client.fork(session.id, turn, session.turn)
        self._terminal.say(f"Forked {session.id} after turn {fork.turn}. This is {fork.id} now.")

    def _rewind(self, argument: str) -> None:
        session = self._current()
        back = self._session = self._client.rewind(session.id, number(argument), session.turn)
        self._terminal.say(f"Rewound to turn {back.turn}, at {back.position} tokens.")

    def _history(self, _: str) -> None:
        session = self._session = self._client.session(self._current().id)
        self._terminal.say("\n".join([standing(session), transcript(session.turns)]))

    def _new(self, _: str) -> None:
        session, self._session = self._session, None
        hint = f" /resume {session.id} returns to this one." if session is not None and session.turn else ""
        self._terminal.note(f"Your next message begins a new session.{hint}")

    def _close(self, _: str) -> None:
        session = self._current()
        self._client.close(session.id, session.turn)
        self._session = None
        self._terminal.say(f"Closed {session.id}.")

    def _current(self) -> SessionInfo:
        if self._session is None:
            raise ChatError("there is no session yet: send a message, or /resume one")
        return self._session

    def _look_again(self) -> None:
        """Fetch the session again, because another client may have changed or closed it."""
        if self._session is None:
            return
        known = self._session.turn
        try:
            self._session = self._client.session(self._session.id)
        except ChatError as error:
            if error.code == "session_not_found":
                self._forget()
            return
        if self._session.turn != known:
            self._terminal.complain(moved(self._session))

    def _forget(self) -> None:
        """Leave a session that does not exist any more."""
        assert self._session is not None
        self._terminal.complain(f"session {self._session.id} is gone: your next message begins a new one")
        self._session = None


def message_of(turn: TurnInfo) -> str | None:
    """Return the text of a turn's last message, or None if the turn was not a chat turn."""
    return turn.messages[-1]["content"] if turn.messages else None


def moved(session: SessionInfo) -> str:
    """Return a notice that the session has another last turn than expected, with that turn's messages."""
    last = "".join(f"\n{exchange(turn)}" for turn in session.turns[-1:])
    return f"the session is at turn {session.turn} now{last}"


def number(argument: str) -> int:
    """Parse the number of a turn. Raises ChatError."""
    if not (argument.isascii() and argument.isdecimal()):
        raise ChatError("which turn? Give its number, as /history shows it")
    return int(argument)

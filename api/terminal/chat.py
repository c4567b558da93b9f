"""`baton chat`: a terminal chat on a session, which the server keeps. A turn sends only what is new."""

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
/resume ID     go on with one: its id, the beginning of it, or its number in the list
/fork [TURN]   go on in a copy, from the end or from after that turn
/rewind TURN   forget what came after that turn; 0 forgets all
/history       show the turns and their numbers
/new           begin a new session
/close         delete this session
/help          show this
/quit          leave, as Ctrl-D does
Ctrl-C stops an answer. A line that begins with // is said with one /."""
TRACELESS = (400, 401, 403, 413, 429)
CHANGED = ("session_moved_on", "session_not_found", "session_not_saved", "session_not_deleted")
INTERRUPTED = 130
SHORTEST = 4
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
    """Read turns from standard input and print the answers as they come. Returns the exit code."""
    settings = {"temperature": temperature, "max_tokens": max_tokens}
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        talk = Chat(ChatClient(url, api_key), Terminal(), system, given)
        return talk.run() if talk.begin(session, fork) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads any more, and Python's last flush must not fail on that again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class Chat:
    """One session at a time; none until something is said."""

    def __init__(self, client: ChatClient, terminal: Terminal, system: str | None, settings: dict[str, Any]) -> None:
        self._client = client
        self._terminal = terminal
        self._system = system
        self._settings = settings
        self._session: SessionInfo | None = None
        self._listed: list[str] = []
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
        """Greet, and go on with a session if one is named. False if the chat cannot begin."""
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
            self._terminal.note("/resume goes on with one of them; anything else begins a new session.")
        return True

    def run(self) -> int:
        offered = ""
        while (line := self._terminal.read(offered)) is not None and line != "/quit":
            offered = ""
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
                offered = line
                self._terminal.note("Enter tries again.")
        self._leave()
        return 0

    def _take(self, line: str) -> Outcome:
        if line.startswith("//"):
            return self._say(line[1:])
        if line.startswith("/"):
            return "answered" if self._obey(line) else "kept"
        return self._say(line)

    def _leave(self) -> None:
        self._terminal.end_line()
        if self._session is not None and self._session.turn:
            where = [] if self._client.url == DEFAULT_URL else ["--url", self._client.url]
            again = shlex.join(["baton", "chat", *where, "--session", self._session.id])
            self._terminal.note(f"Go on with: {again}")

    def _say(self, said: str) -> Outcome:
        """One turn. lost: the server has nothing of it, so that it can be said again."""
        try:
            if self._session is None:
                self._session = self._client.create()
            self._show(self._session, self._client.turn(self._session.id, self._body(self._session, said)))
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
        return self._catch_up(said)

    def _body(self, session: SessionInfo, said: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": said}]
        if self._system and not session.turn:
            messages.insert(0, {"role": "system", "content": self._system})
        return {"messages": messages, "after": session.turn, **self._settings}

    def _show(self, session: SessionInfo, events: Generator[Event, None, None]) -> None:
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

    def _catch_up(self, said: str) -> Outcome:
        """Learn what became of a turn whose end was not seen."""
        before = self._session
        if before is None:
            return "lost"
        try:
            seen = self._session = self._client.settled(before.id)
        except ChatError as error:
            if error.code == "session_not_found":
                self._forget()
            return "lost"
        new = [turn for turn in seen.turns if turn.turn > before.turn]
        if new and said_in(new[-1]) == said:
            self._report(new[-1])
            return "kept"
        self._terminal.complain("it left no trace" if seen.turn == before.turn else moved(seen))
        return "lost"

    def _report(self, turn: TurnInfo) -> None:
        if turn.status == "completed":
            self._terminal.say(exchange(turn))
        else:
            kept = f"turn {turn.turn} was kept with {turn.output_tokens} tokens of its answer"
            self._terminal.complain(f"{kept}; the session is at {turn.position} tokens")

    def _obey(self, line: str) -> bool:
        """False if the command could not be carried out."""
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
            raise ChatError("which one? /resume ID, or its number in /sessions")
        session = self._session = self._client.session(self._find(name))
        if self._terminal.interactive:
            self._terminal.say("\n".join([standing(session), *map(exchange, session.turns[-1:])]))
        if self._system and session.turn:
            self._terminal.complain("--system is said in a session's first turn only, and this one had that")

    def _find(self, name: str) -> str:
        """The id that is meant. Raises ChatError."""
        ids = [session.id for session in self._client.sessions()]
        if name in ids:
            return name
        if name.isdecimal() and 0 < int(name) <= len(self._listed):
            return self._listed[int(name) - 1]
        begun = [
            id for id in ids if id.startswith(name) or (len(name) >= SHORTEST and id.startswith(f"session-{name}"))
        ]
        if len(begun) > 1:
            raise ChatError(f"{len(begun)} sessions begin with {name}")
        if not begun:
            raise ChatError(f"there is no session {name}", 404, "session_not_found")
        return begun[0]

    def _fork(self, argument: str) -> None:
        session = self._current()
        turn = number(argument) if argument else None
        fork = self._session = self._client.fork(session.id, turn, session.turn)
        self._terminal.say(f"Forked {session.id} after turn {fork.turn}. This is {fork.id} now.")

    def _rewind(self, argument: str) -> None:
        session = self._current()
        back = self._session = self._client.rewind(session.id, number(argument), session.turn)
        self._terminal.say(f"Back after turn {back.turn}, at {back.position} tokens.")

    def _history(self, _: str) -> None:
        session = self._session = self._client.session(self._current().id)
        self._terminal.say("\n".join([standing(session), transcript(session.turns)]))

    def _new(self, _: str) -> None:
        session, self._session = self._session, None
        kept = f" /resume {session.id} goes back." if session is not None and session.turn else ""
        self._terminal.note(f"What you say next begins a new session.{kept}")

    def _close(self, _: str) -> None:
        session = self._current()
        self._client.close(session.id, session.turn)
        self._session = None
        self._terminal.say(f"Closed {session.id}.")

    def _current(self) -> SessionInfo:
        if self._session is None:
            raise ChatError("there is no session yet: say something, or /resume one")
        return self._session

    def _look_again(self) -> None:
        """Another client may have changed the session, or closed it."""
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
        assert self._session is not None
        self._terminal.complain(f"session {self._session.id} is gone: what you say next begins a new one")
        self._session = None


def said_in(turn: TurnInfo) -> str | None:
    return turn.messages[-1]["content"] if turn.messages else None


def moved(session: SessionInfo) -> str:
    """After another client's turn or rewind, or a command of ours that was carried out in part."""
    last = "".join(f"\n{exchange(turn)}" for turn in session.turns[-1:])
    return f"the session is at turn {session.turn} now{last}"


def number(argument: str) -> int:
    """The number of a turn. Raises ChatError."""
    if not (argument.isascii() and argument.isdecimal()):
        raise ChatError("which turn? Give its number, as /history shows it")
    return int(argument)

"""A session: a log with a name and an owner, and at most one running turn. Its states live in the ring's tree."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

from msgspec.structs import replace

from actors.requests import Request, Tier
from actors.tokens import Tokens, common_prefix, count, cut, unpack
from api import errors
from api.errors import ApiError
from api.generation.reader import Generation, Member
from api.sessions.log import Turn, TurnStatus, backwards, history
from api.sessions.records import VERSION, LogRecord, Rewound, SessionHeader, record_of
from api.sessions.saver import Saver

Decode: TypeAlias = Callable[[Sequence[int]], str]
CONTEXT = 16
REFUSALS = (400, 429, 503)
ENDS: dict[str, TurnStatus] = {"stop": "completed", "length": "completed", "abort": "aborted", "error": "failed"}
FAILURES: dict[int, TurnStatus] = {504: "timeout", errors.CLIENT_LEFT: "disconnected"}


@dataclass(eq=False, kw_only=True)
class Session:
    """owner: a digest of the API key that made it. nodes: by request id, the turns that a branching one can go on from.
    key: its name in the ring, and of its file. saver: None if it lives in memory only. tier, kept: where the ring has
    its state, and how many tokens that has consumed.

    Turn numbers are never used twice, also after a rewind: whoever names one means exactly that turn.
    """

    id: str
    owner: bytes
    salt: str = ""
    clock: Callable[[], float]
    idle_timeout: float
    branching: bool = False
    parent: tuple[str, int] | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    saver: Saver | None = None
    tier: Tier = "tokens"
    kept: int = 0
    suspended: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    used: float = field(init=False)
    closed: bool = False
    head: Turn | None = None
    tokens: Tokens = b""
    last_number: int = 0
    nodes: dict[str, Turn] = field(default_factory=dict)
    log_cap: int | None = None
    running: "OpenTurn | None" = None

    def __post_init__(self) -> None:
        self.used = self.clock()

    @property
    def number(self) -> int:
        """The last turn's number; 0 before the first."""
        return self.head.number if self.head is not None else 0

    @property
    def position(self) -> int:
        return count(self.tokens)

    @property
    def log_bytes(self) -> int:
        """Bytes of its turns: tokens and texts."""
        if self.branching:
            return sum(turn.own_bytes for turn in self.nodes.values())
        return self.head.log_bytes if self.head is not None else 0

    def is_busy(self) -> bool:
        """A turn is over with its last token, whether its client has read that or not: it is settled here."""
        if self.running is not None and self.running.over:
            self.running.settle()
        return self.running is not None

    def check_idle(self) -> None:
        """Raises 409."""
        if self.is_busy():
            message = f"session {self.id!r} is in a turn, and has one at a time"
            raise ApiError(409, message, "conflict_error", code="session_busy")

    def check_after(self, after: int | None) -> None:
        """Settles a turn that is over. Raises 409 unless `after` is the last turn that has ended, or None."""
        self.is_busy()
        if after is not None and after != self.number:
            message = f"the last turn of session {self.id!r} is {self.number}, not {after}"
            raise ApiError(409, message, "conflict_error", "after", "session_moved_on")

    def begin(self, request: str) -> "OpenTurn":
        """A turn that goes on from the last one, unless it is told otherwise. Raises 400, 409."""
        self.check_idle()
        if self.log_cap is not None and self.log_bytes >= self.log_cap:
            message = f"session {self.id!r} is full (--session-log): rewind it, fork it earlier, or begin another"
            raise errors.bad_request(message, "session", "session_full")
        self.suspended = False
        self.running = OpenTurn(self, request)
        return self.running

    def append(self, turn: Turn, tokens: Tokens) -> None:
        self.head, self.tokens, self.last_number = turn, tokens, turn.number
        if self.branching:
            self.nodes[turn.request] = turn
        if self.saver is not None:
            self.saver.note(record_of(turn))

    def find(self, number: int) -> Turn | None:
        """The turn of this number; None for 0, before the first. Raises 400."""
        turn = next((turn for turn in backwards(self.head) if turn.number == number), None)
        if turn is None and number != 0:
            raise errors.bad_request(f"session {self.id!r} has no turn {number}", "turn", "unknown_turn")
        return turn

    def rewind(self, number: int) -> None:
        """Forget the turns after `number`. Raises 400, 409."""
        self.check_idle()
        self.head = self.find(number)
        self.tokens = history(self.head)
        if self.saver is not None:
            self.saver.rewrite()

    def forget_after(self, base: Turn | None) -> None:
        """A branching session cannot go on any more from what went on from `base`; from nothing, if that is None."""
        gone = [rid for rid, turn in self.nodes.items() if turn is not base and base in (None, *backwards(turn))]
        for rid in gone:
            del self.nodes[rid]
        if self.saver is not None:
            self.saver.outdate()

    async def saved(self) -> None:
        """Returns when its log is on the disk, if it has a file. Raises ApiError 507 if that cannot be."""
        if self.saver is not None:
            await self.saver.saved()

    def records(self) -> list[LogRecord]:
        """What its file holds when it is written anew."""
        kept = {turn.number: turn for end in (self.head, *self.nodes.values()) for turn in backwards(end)}
        turns: list[LogRecord] = [record_of(kept[number]) for number in sorted(kept)]
        behind = [Rewound(self.number)] if self.number != max(kept, default=0) else []
        return [self._header(), *turns, *behind]

    def _header(self) -> SessionHeader:
        return SessionHeader(
            version=VERSION,
            id=self.id,
            owner=self.owner,
            salt=self.salt,
            idle_timeout=self.idle_timeout,
            branching=self.branching,
            created=self.created,
            parent=self.parent,
            last_number=self.last_number,
        )


class OpenTurn:
    """A turn from its reservation to its end. As a context it settles when it is left, whatever happened, and is on the
    disk before its client reads an error, which says not to try again if the turn stays.

    base, before: what it goes on from. prompt: the whole history that is sent into the ring. feeds_only: the token that
    comes back is not wanted.
    """

    def __init__(self, session: Session, request: str) -> None:
        self.session = session
        self.request = request
        self.number = session.last_number + 1
        self.base = session.head
        self.before = session.tokens
        self.prompt: Tokens = b""
        self.messages: tuple[dict[str, Any], ...] | None = None
        self.feeds_only = False
        self.settled: Turn | None = None
        self.done = asyncio.Event()
        self._generation: Generation | None = None
        self._decode: Decode = lambda ids: ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.settle()
        if isinstance(error, ApiError):
            with suppress(ApiError):
                await self.save()
            if self.settled is not None:
                raise errors.kept(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    @property
    def start(self) -> int:
        """How much of the history before it goes on from."""
        return common_prefix(self.before, self.prompt)

    @property
    def over(self) -> bool:
        """Nothing more will come for it."""
        if self._generation is None:
            return False
        [member] = self._generation.members
        return member.finish_reason is not None or self._generation.error is not None

    def go_on_from(self, base: Turn | None) -> None:
        self.base, self.before = base, history(base)

    def take(self, request: Request) -> Request:
        """`request` as this turn's: its state is kept in the session's name."""
        self.prompt = request.tokens
        return replace(request, session=self.session.key)

    def sent(self, generation: Generation, decode: Decode) -> None:
        """`generation` is what the ring makes of the prompt."""
        self._generation, self._decode = generation, decode

    async def save(self) -> None:
        """Settle, and return when the turn is on the disk (at once, if the session lives in memory).

        To be awaited before the client reads that the turn is over: what it has read survives a crash. Raises
        ApiError 507 (session_not_saved) if it cannot be written; the turn stays in the session, and is written
        with the next.
        """
        self.settle()
        await self.session.saved()

    def settle(self) -> None:
        """Note what has come, once. A turn that the ring refused leaves no trace."""
        if self.session.running is not self:
            return
        self.session.running = None
        self.session.used = self.session.clock()
        if self._generation is not None and not refused(self._generation):
            [member] = self._generation.members
            self._append(member, status_of(member, self._generation.error))
        self.done.set()

    def _append(self, member: Member, status: TurnStatus) -> None:
        output = b"" if self.feeds_only else bytes(member.delivered)
        self.settled = Turn(
            previous=self.base,
            number=self.number,
            request=self.request,
            start=self.start,
            input=cut(self.prompt, self.start, count(self.prompt)),
            output=output,
            status=status,
            finish_reason=member.finish_reason,
            messages=self.messages,
            answer=None if self.feeds_only else answer_text(self._decode, member, output),
            created=int(time.time()),
            cached_tokens=member.cached_tokens,
        )
        self.session.append(self.settled, self.prompt + output)


def refused(generation: Generation) -> bool:
    """It never ran, and its client was told so: to be sent again, or not at all."""
    [member] = generation.members
    error = generation.error
    return member.admitted is None and error is not None and error.status in REFUSALS


def status_of(member: Member, error: ApiError | None) -> TurnStatus:
    if member.finish_reason is not None:
        return ENDS[member.finish_reason]
    if error is None:
        return "disconnected"
    return FAILURES.get(error.status, "failed")


def answer_text(decode: Decode, member: Member, output: Tokens) -> str:
    """The text of `output` behind its prompt, without the token that ended it, but with a stop string that did."""
    ids, request = unpack(output), member.request
    if member.finish_reason == "stop" and ids and ids[-1] in request.stops.token_ids:
        ids.pop()
    tail = unpack(cut(request.tokens, max(request.prompt_len - CONTEXT, 0), request.prompt_len))
    known, whole = decode(tail), decode(tail + ids)
    return whole[len(known) :] if whole.startswith(known) else decode(ids)

"""A session: a log with a name and an owner, and at most one running turn. Its states live in the ring's tree."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

from msgspec.structs import replace

from baton.actors.requests import Request, Tier
from baton.actors.tokens import Tokens, common_prefix, count, cut, unpack
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.generation.outputs import Generation, Member
from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.sessions.log import Turn, TurnStatus, backwards, history
from baton.api.sessions.records import VERSION, LogRecord, RewindRecord, SessionHeader, record_of
from baton.api.sessions.saver import Saver

Decode: TypeAlias = Callable[[Sequence[int]], str]
CONTEXT = 16
REFUSALS = (400, 429, 503)
ENDS: dict[str, TurnStatus] = {"stop": "completed", "length": "completed", "abort": "aborted", "error": "failed"}
FAILURES: dict[int, TurnStatus] = {504: "timeout", errors.CLIENT_LEFT: "disconnected"}


@dataclass(eq=False, kw_only=True)
class Session:
    """A session: its log up to the turn `head`, and the turn that runs, if any. tokens: the history up to `head`.

    key: its name in the ring and of its file; clients know it by `id`. owner: digest of the API key that made it; empty
    without keys. branching: a turn may go on from any earlier one, found by its request in `turns_by_request`.
    state_tier, state_position: where the ring has its state, and how many tokens that has consumed. idle_timeout:
    seconds. log_cap: bytes; at this length of its log it takes no further turn. metadata: a client's own. used: the
    last time, on `clock`.
    saver: None if it is in memory only.

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
    state_tier: Tier = "tokens"
    state_position: int = 0
    suspended: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    used: float = field(init=False)
    closed: bool = False
    head: Turn | None = None
    tokens: Tokens = b""
    highest_number: int = 0
    turns_by_request: dict[str, Turn] = field(default_factory=dict)
    log_cap: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    running: "OpenTurn | None" = None

    def __post_init__(self) -> None:
        self.used = self.clock()

    @property
    def head_number(self) -> int:
        """The last turn's number; 0 before the first."""
        return self.head.number if self.head is not None else 0

    @property
    def position(self) -> int:
        return count(self.tokens)

    @property
    def log_bytes(self) -> int:
        """Bytes of its turns: tokens and texts."""
        if self.branching:
            return sum(turn.own_bytes for turn in self.turns_by_request.values())
        return self.head.log_bytes if self.head is not None else 0

    def settle_if_over(self) -> None:
        """Settle a turn for which nothing more will come, whether its client has read that or not."""
        if self.running is not None and self.running.over:
            self.running.settle()

    def is_busy(self) -> bool:
        """Whether a turn is running, of which something may still come."""
        self.settle_if_over()
        return self.running is not None

    def check_idle(self) -> None:
        """Raises 409."""
        if self.is_busy():
            message = f"session {self.id!r} is in a turn, and has one at a time"
            raise ApiError(409, message, "conflict_error", code="session_busy")

    def check_after(self, after: int | None) -> None:
        """Settles a turn that is over. Raises 409 unless `after` is the last turn that has ended, or None."""
        self.settle_if_over()
        if after is not None and after != self.head_number:
            message = f"the last turn of session {self.id!r} is {self.head_number}, not {after}"
            raise ApiError(409, message, "conflict_error", "after", "session_moved_on")

    def begin(self, request: str) -> "OpenTurn":
        """A turn that goes on from the last one, unless it is told otherwise. Raises 400, 409."""
        self.check_idle()
        self._check_room()
        self.suspended = False
        self.running = OpenTurn(self, request)
        return self.running

    def put(self, request: str, messages: Sequence[dict[str, Any]]) -> Turn:
        """Messages that are said without a turn: the next one feeds them. Raises 400, 409."""
        self.check_idle()
        self._check_room()
        if self.head is not None and self.head.messages is None:
            raise errors.bad_request("the session's last turn was not one of chat", "items", "not_a_chat")
        turn = Turn(
            previous=self.head,
            number=self.highest_number + 1,
            request=request,
            start=self.position,
            input=b"",
            output=b"",
            status="completed",
            finish_reason=None,
            messages=tuple(messages),
            answer=None,
            created=int(time.time()),
            cached_tokens=0,
        )
        self.append(turn, self.tokens)
        return turn

    def describe_as(self, metadata: dict[str, str]) -> None:
        """Its metadata are these from now on."""
        self.metadata = metadata
        if self.saver is not None:
            self.saver.rewrite()

    def append(self, turn: Turn, tokens: Tokens) -> None:
        self.head, self.tokens, self.highest_number = turn, tokens, turn.number
        if self.branching:
            self.turns_by_request[turn.request] = turn
        if self.saver is not None:
            self.saver.append(record_of(turn))

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
        gone = [
            rid for rid, turn in self.turns_by_request.items() if turn is not base and base in (None, *backwards(turn))
        ]
        for rid in gone:
            del self.turns_by_request[rid]
        if self.saver is not None:
            self.saver.mark_stale()

    async def wait_saved(self) -> None:
        """Wait until its log is on the disk, or deleted if it is closed; at once without a file.

        Raises ApiError 507 or 500 if that cannot be.
        """
        if self.saver is not None:
            await self.saver.wait_saved()

    def records(self) -> list[LogRecord]:
        """What its file holds when it is written anew."""
        kept = {turn.number: turn for end in (self.head, *self.turns_by_request.values()) for turn in backwards(end)}
        turns: list[LogRecord] = [record_of(kept[number]) for number in sorted(kept)]
        behind = [RewindRecord(self.head_number)] if self.head_number != max(kept, default=0) else []
        return [self._header(), *turns, *behind]

    def _check_room(self) -> None:
        """Raises 400."""
        if self.log_cap is not None and self.log_bytes >= self.log_cap:
            message = f"session {self.id!r} is full (--session-log): rewind it, fork it earlier, or begin another"
            raise errors.bad_request(message, "session", "session_full")

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
            last_number=self.highest_number,
            metadata=self.metadata,
        )


class OpenTurn:
    """The turn that a session is in, from `Session.begin` until it is settled. Leaving the context settles it.

    An ApiError leaves `async with` when the turn is on the disk, or cannot be brought there; if the turn stays in the
    session, the error says not to try again.

    base, base_tokens: the turn that it goes on from (None: from nothing), and the tokens up to there. prompt: the whole
    history that is sent into the ring. prefill_only: the token that comes back is dropped. parse: takes the answer's
    text apart, in a turn of chat; parsed: what it made of it. settled: the turn that stays in the session; None until
    then, and if none does. done: set when it is settled.
    """

    def __init__(self, session: Session, request: str) -> None:
        self.session = session
        self.request = request
        self.number = session.highest_number + 1
        self.base = session.head
        self.base_tokens = session.tokens
        self.prompt: Tokens = b""
        self.messages: tuple[dict[str, Any], ...] | None = None
        self.prefill_only = False
        self.parse: Callable[[str], ParsedAnswer] | None = None
        self.parsed: ParsedAnswer | None = None
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
                raise errors.not_retryable(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    @property
    def start(self) -> int:
        """How much of the history before it goes on from."""
        return common_prefix(self.base_tokens, self.prompt)

    @property
    def over(self) -> bool:
        """Nothing more will come for it."""
        if self._generation is None:
            return False
        [member] = self._generation.members
        return member.finish_reason is not None or self._generation.error is not None

    def go_on_from(self, base: Turn | None) -> None:
        self.base, self.base_tokens = base, history(base)

    @property
    def ring_id(self) -> str:
        """Its request's id in the ring, where an API key's own ids stand apart."""
        return self.request if self._generation is None else self._generation.members[0].request.id

    def bind(self, request: Request) -> Request:
        """`request` as this turn's: its state is kept in the session's name."""
        self.prompt = request.tokens
        return replace(request, session=self.session.key)

    def attach(self, generation: Generation, decode: Decode) -> None:
        """`generation` is what the ring makes of the prompt."""
        self._generation, self._decode = generation, decode

    async def save(self) -> None:
        """Settle, and return when the turn is on the disk (at once, if the session lives in memory).

        To be awaited before the client reads that the turn is over: what it has read survives a crash. Raises
        ApiError 507 (session_not_saved) if it cannot be written; the turn stays in the session, and is written
        with the next.
        """
        self.settle()
        await self.session.wait_saved()

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
        output = b"" if self.prefill_only else bytes(member.delivered)
        answer = None if self.prefill_only else answer_text(self._decode, member, output)
        if answer is not None and self.parse is not None:
            self.parsed = self.parse(answer)
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
            answer=answer,
            created=int(time.time()),
            cached_tokens=member.cached_tokens,
            parts=self.parsed.message if self.parsed is not None and not self.parsed.plain else None,
        )
        self.session.append(self.settled, self.prompt + output)


def refused(generation: Generation) -> bool:
    """Whether the request was turned away before it was admitted (400, 429 or 503). Such a turn leaves no trace."""
    [member] = generation.members
    error = generation.error
    return member.admitted_at is None and error is not None and error.status in REFUSALS


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

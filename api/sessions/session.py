"""A session: a log with a name and an owner, and at most one running turn. Its states are in the cache's tree."""

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
CONTEXT = 16  # prompt tokens that are decoded with the answer, so that its first characters come out right
REFUSALS = (400, 429, 503)  # statuses of requests that the ring did not accept
ENDS: dict[str, TurnStatus] = {"stop": "completed", "length": "completed", "abort": "aborted", "error": "failed"}
FAILURES: dict[int, TurnStatus] = {504: "timeout", errors.CLIENT_LEFT: "disconnected"}


@dataclass(eq=False, kw_only=True)
class Session:
    """A session: its log up to the turn `head`, and the running turn, if any.

    Turn numbers are never used twice, not even after a rewind: a number always means the same turn.
    """

    id: str  # the name that clients use
    owner: bytes  # digest of the API key that created it; empty without keys
    salt: str = ""
    clock: Callable[[], float]
    idle_timeout: float  # seconds
    branching: bool = False  # a turn may continue any earlier turn, found in `turns_by_request`
    parent: tuple[str, int] | None = None  # id and turn of the session that it was forked from
    key: str = field(default_factory=lambda: uuid.uuid4().hex)  # its name in the ring, and of its file
    saver: Saver | None = None  # None if it lives in memory only
    state_tier: Tier = "tokens"  # where the ring has its state
    state_position: int = 0  # tokens that the state has consumed
    suspended: bool = False  # not used since its state left its slot
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time
    used: float = field(init=False)  # time of the last use, on `clock`
    closed: bool = False
    head: Turn | None = None  # the last turn
    tokens: Tokens = b""  # the history up to `head`
    highest_number: int = 0  # of all its turns, including deleted ones
    turns_by_request: dict[str, Turn] = field(default_factory=dict)  # of a branching session
    log_cap: int | None = None  # bytes; a longer log takes no further turn
    metadata: dict[str, str] = field(default_factory=dict)  # set by the client
    running: "OpenTurn | None" = None

    def __post_init__(self) -> None:
        self.used = self.clock()

    @property
    def head_number(self) -> int:
        """The last turn's number; 0 before the first."""
        return self.head.number if self.head is not None else 0

    @property
    def position(self) -> int:
        """Length of the history in tokens."""
        return count(self.tokens)

    @property
    def log_bytes(self) -> int:
        """Size of its turns: tokens and texts."""
        if self.branching:
            return sum(turn.own_bytes for turn in self.turns_by_request.values())
        return self.head.log_bytes if self.head is not None else 0

    def settle_if_over(self) -> None:
        """Settle the running turn if the ring has finished it, even if its client has not read the end yet."""
        if self.running is not None and self.running.over:
            self.running.settle()

    def is_busy(self) -> bool:
        """Whether a turn is running that the ring has not finished."""
        self.settle_if_over()
        return self.running is not None

    def check_idle(self) -> None:
        """Raise 409 if a turn is running."""
        if self.is_busy():
            message = f"session {self.id!r} is in a turn already"
            raise ApiError(409, message, "conflict_error", code="session_busy")

    def check_after(self, after: int | None) -> None:
        """Raise 409 unless `after` is the last turn that has ended, or None. Settle a turn that is over first."""
        self.settle_if_over()
        if after is not None and after != self.head_number:
            message = f"the last turn of session {self.id!r} is {self.head_number}, not {after}"
            raise ApiError(409, message, "conflict_error", "after", "session_moved_on")

    def begin(self, request: str) -> "OpenTurn":
        """Open a turn, which continues the last one unless `go_on_from` says otherwise. Raises 400, 409."""
        self.check_idle()
        self._check_room()
        self.suspended = False
        self.running = OpenTurn(self, request)
        return self.running

    def put(self, request: str, messages: Sequence[dict[str, Any]]) -> Turn:
        """Put messages into the session without running the model; the next turn feeds them. Raises 400, 409."""
        self.check_idle()
        self._check_room()
        if self.head is not None and self.head.messages is None:
            raise errors.bad_request("the session's last turn was not a chat turn", "items", "not_a_chat")
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
        """Replace the metadata."""
        self.metadata = metadata
        if self.saver is not None:
            self.saver.rewrite()

    def append(self, turn: Turn, tokens: Tokens) -> None:
        """Make a turn the last one. tokens: the history up to it."""
        self.head, self.tokens, self.highest_number = turn, tokens, turn.number
        if self.branching:
            self.turns_by_request[turn.request] = turn
        if self.saver is not None:
            self.saver.append(record_of(turn))

    def find(self, number: int) -> Turn | None:
        """Return the turn with a number, or None for 0, which means before the first turn. Raises 400."""
        turn = next((turn for turn in backwards(self.head) if turn.number == number), None)
        if turn is None and number != 0:
            raise errors.bad_request(f"session {self.id!r} has no turn {number}", "turn", "unknown_turn")
        return turn

    def rewind(self, number: int) -> None:
        """Delete the turns after `number`. Raises 400, 409."""
        self.check_idle()
        self.head = self.find(number)
        self.tokens = history(self.head)
        if self.saver is not None:
            self.saver.rewrite()

    def forget_after(self, base: Turn | None) -> None:
        """Forget all turns of a branching session that continue `base`, or all turns if it is None."""
        gone = [
            rid for rid, turn in self.turns_by_request.items() if turn is not base and base in (None, *backwards(turn))
        ]
        for rid in gone:
            del self.turns_by_request[rid]
        if self.saver is not None:
            self.saver.mark_stale()

    async def wait_saved(self) -> None:
        """Wait until the log is on the disk, or deleted if the session is closed. Without a file return at once.

        Raises ApiError: 507 if it cannot be written, 500 if it cannot be deleted.
        """
        if self.saver is not None:
            await self.saver.wait_saved()

    def records(self) -> list[LogRecord]:
        """Return all records of the file, to write it as a whole."""
        found = {turn.number: turn for end in (self.head, *self.turns_by_request.values()) for turn in backwards(end)}
        turns: list[LogRecord] = [record_of(found[number]) for number in sorted(found)]
        # In a branching session the head need not be the turn with the highest number, which comes last in the file.
        rewinds = [RewindRecord(self.head_number)] if self.head_number != max(found, default=0) else []
        return [self._header(), *turns, *rewinds]

    def _check_room(self) -> None:
        """Raise 400 if the log is full."""
        if self.log_cap is not None and self.log_bytes >= self.log_cap:
            message = (
                f"session {self.id!r} is full (--session-log): rewind it, fork it at an earlier turn, or begin another"
            )
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
    """The running turn of a session, from `Session.begin` until it is settled. Leaving the context settles it.

    If an ApiError leaves `async with`, the turn is first written to the disk, if possible. If the turn stays in the
    session, the error then says not to repeat the request.
    """

    def __init__(self, session: Session, request: str) -> None:
        """request: id of the turn's request."""
        self.session = session
        self.request = request
        self.number = session.highest_number + 1
        self.base = session.head  # the turn that it continues; None: from nothing
        self.base_tokens = session.tokens  # the history up to `base`
        self.prompt: Tokens = b""  # the whole history that is sent into the ring
        self.messages: tuple[dict[str, Any], ...] | None = None  # new in a turn of chat
        self.prefill_only = False  # the token that the ring returns is dropped
        self.parse: Callable[[str], ParsedAnswer] | None = None  # splits the answer's text, in a turn of chat
        self.parsed: ParsedAnswer | None = None
        self.settled: Turn | None = None  # the turn that stays in the session; None until settled, or if none stays
        self.done = asyncio.Event()  # set when it is settled
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
        """The length of the history before it that its prompt keeps."""
        return common_prefix(self.base_tokens, self.prompt)

    @property
    def over(self) -> bool:
        """Whether the ring has finished it."""
        if self._generation is None:
            return False
        [member] = self._generation.members
        return member.finish_reason is not None or self._generation.error is not None

    def go_on_from(self, base: Turn | None) -> None:
        """Continue from another turn, or from nothing."""
        self.base, self.base_tokens = base, history(base)

    @property
    def ring_id(self) -> str:
        """The id of its request in the ring, which differs from the client's id where there are several API keys."""
        return self.request if self._generation is None else self._generation.members[0].request.id

    def bind(self, request: Request) -> Request:
        """Return `request` with the session's name, under which the ring keeps its state."""
        self.prompt = request.tokens
        return replace(request, session=self.session.key)

    def attach(self, generation: Generation, decode: Decode) -> None:
        """Set the generation whose output is the answer. decode: turns tokens into text."""
        self._generation, self._decode = generation, decode

    async def save(self) -> None:
        """Settle the turn, and wait until it is on the disk. Without files return at once.

        Await this before the client reads that the turn is over, so that every turn it has seen survives a crash.
        Raises ApiError 507 (session_not_saved) if the turn cannot be written. Then it stays in the session, and is
        written with the next one.
        """
        self.settle()
        await self.session.wait_saved()

    def settle(self) -> None:
        """Append the turn, as far as it came, to the session, unless it was refused. Later calls do nothing."""
        if self.session.running is not self:
            return
        self.session.running = None
        self.session.used = self.session.clock()
        if self._generation is not None and not refused(self._generation):
            [member] = self._generation.members
            self._append(member, status_of(member, self._generation.error))
        self.done.set()

    def _append(self, member: Member, status: TurnStatus) -> None:
        """Make a Turn of what the ring has delivered, and append it."""
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
    """Whether the request was refused before it was admitted. Such a turn is not recorded."""
    [member] = generation.members
    error = generation.error
    return member.admitted_at is None and error is not None and error.status in REFUSALS


def status_of(member: Member, error: ApiError | None) -> TurnStatus:
    """Return how a turn ended."""
    if member.finish_reason is not None:
        return ENDS[member.finish_reason]
    if error is None:
        return "disconnected"
    return FAILURES.get(error.status, "failed")


def answer_text(decode: Decode, member: Member, output: Tokens) -> str:
    """Return the text of `output`, without a stop token but with a stop string that ended it."""
    ids, request = unpack(output), member.request
    if member.finish_reason == "stop" and ids and ids[-1] in request.stops.token_ids:
        ids.pop()
    # Decoding depends on the tokens before: decode the end of the prompt with and without the answer.
    tail = unpack(cut(request.tokens, max(request.prompt_len - CONTEXT, 0), request.prompt_len))
    before, whole = decode(tail), decode(tail + ids)
    return whole[len(before) :] if whole.startswith(before) else decode(ids)

"""A session: a token log with a name and an owner, and at most one running turn. The cache keeps its states."""

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
CONTEXT = 16  # prompt tokens that are decoded before an answer; without them its first characters may be wrong
REFUSALS = (400, 429, 503)  # statuses of requests that the ring did not accept
ENDS: dict[str, TurnStatus] = {
    "stop": "completed",
    "length": "completed",
    "abort": "aborted",
    "error": "failed",
    "grammar": "failed",
}
FAILURES: dict[int, TurnStatus] = {504: "timeout", errors.CLIENT_LEFT: "disconnected"}


@dataclass(eq=False, kw_only=True)
class Session:
    """A session: its log up to the turn `head`, and the running turn, if any.

    Turn numbers are never used twice, not even after a rewind: a number always means the same turn.
    """

    id: str  # the session's name for clients
    owner: bytes  # digest of the API key that created the session; empty without keys
    salt: str = ""
    clock: Callable[[], float]
    idle_timeout: float  # seconds
    branching: bool = False  # whether a turn may continue any turn in `turns_by_request`, rather than only `head`
    parent: tuple[str, int] | None = None  # id and turn of the session from which this one was forked
    key: str = field(default_factory=lambda: uuid.uuid4().hex)  # the session's name in the ring, and its file's name
    saver: Saver | None = None  # writes the log to a file; None if the session is only in memory
    state_tier: Tier = "tokens"  # where the ring has the session's state
    state_position: int = 0  # tokens that the state has consumed
    naming: asyncio.Future[None] | None = None  # ends when `state_tier` and `state_position` follow the last Name
    suspended: bool = False  # the session was not used since its state left the slot
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time
    used: float = field(init=False)  # time of the last use, on `clock`
    closed: bool = False
    head: Turn | None = None  # the last turn
    tokens: Tokens = b""  # the history up to `head`
    highest_number: int = 0  # highest number of its turns, including deleted turns
    turns_by_request: dict[str, Turn] = field(default_factory=dict)  # turns of a branching session, by request id
    log_cap: int | None = None  # bytes; a session with a longer log accepts no turn
    make_room: Callable[["Session"], None] = lambda session: None  # called before a turn; may raise ApiError
    metadata: dict[str, str] = field(default_factory=dict)  # the client's metadata of a conversation
    running: "OpenTurn | None" = None

    def __post_init__(self) -> None:
        self.used = self.clock()

    @property
    def head_number(self) -> int:
        """The number of the last turn, or 0 before the first turn."""
        return self.head.number if self.head is not None else 0

    @property
    def position(self) -> int:
        """The length of the history in tokens."""
        return count(self.tokens)

    @property
    def memory_bytes(self) -> int:
        """The size of the turns and of the history in bytes. A fork counts like any other session."""
        return self.log_bytes + len(self.tokens)

    @property
    def log_bytes(self) -> int:
        """The size of the session's turns in bytes, tokens and texts together."""
        if self.branching:
            return sum(turn.own_bytes for turn in self.turns_by_request.values())
        return self.head.log_bytes if self.head is not None else 0

    def settle_if_over(self) -> None:
        """Settle the running turn if the ring has finished it, even if the client has not read the turn's end yet."""
        if self.running is not None and self.running.over:
            self.running.settle()

    def is_busy(self) -> bool:
        """Return whether the session has a running turn that the ring has not finished."""
        self.settle_if_over()
        return self.running is not None

    def check_idle(self) -> None:
        """Raise ApiError 409 if a turn is running."""
        if self.is_busy():
            message = f"session {self.id!r} is in a turn already"
            raise ApiError(409, message, "conflict_error", code="session_busy")

    def check_after(self, after: int | None) -> None:
        """Settle a turn that the ring has finished. Raise ApiError 409 unless `after` is None or the last turn."""
        self.settle_if_over()
        if after is not None and after != self.head_number:
            message = f"the last turn of session {self.id!r} is {self.head_number}, not {after}"
            raise ApiError(409, message, "conflict_error", "after", "session_moved_on")

    def begin(self, request: str) -> "OpenTurn":
        """Open a turn, which continues the last turn unless `go_on_from` is called. Raises ApiError: 400, 409."""
        self.check_idle()
        self.check_room()
        return self.occupy(request)

    def occupy(self, request: str) -> "OpenTurn":
        """Keep turns out until the returned turn is settled, which leaves no trace without a generation.

        Raises ApiError 409 if a turn is running.
        """
        self.check_idle()
        self.suspended = False
        if self.naming is not None:
            self.naming.cancel()  # The ring may delay the answer until the new turn has ended.
        self.running = OpenTurn(self, request)
        return self.running

    def put(self, request: str, messages: Sequence[dict[str, Any]]) -> Turn:
        """Put messages into the session. The model reads the messages in the next turn. Raises ApiError: 400, 409."""
        self.check_idle()
        self.check_room()
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
        """Add a turn as the last turn. tokens: the history including this turn."""
        self.head, self.tokens, self.highest_number = turn, tokens, turn.number
        if self.branching:
            self.turns_by_request[turn.request] = turn
        if self.saver is not None:
            self.saver.append(record_of(turn))

    def find(self, number: int) -> Turn | None:
        """Return the turn with a number, or None for 0, which means before the first turn. Raises ApiError 400."""
        turn = next((turn for turn in backwards(self.head) if turn.number == number), None)
        if turn is None and number != 0:
            raise errors.bad_request(f"session {self.id!r} has no turn {number}", "turn", "unknown_turn")
        return turn

    def rewind(self, number: int) -> None:
        """Delete the turns after `number`. Raises ApiError 400, 409."""
        self.check_idle()
        self.head = self.find(number)
        self.tokens = history(self.head)
        if self.saver is not None:
            self.saver.rewrite()

    def forget_after(self, base: Turn | None) -> None:
        """Forget all turns of a branching session that continue `base`, or all turns if `base` is None."""
        gone = [
            rid for rid, turn in self.turns_by_request.items() if turn is not base and base in (None, *backwards(turn))
        ]
        for rid in gone:
            del self.turns_by_request[rid]
        if self.saver is not None:
            self.saver.mark_stale()

    async def wait_saved(self) -> None:
        """Wait until the log is on the disk, or deleted if the session is closed. Return at once without a file.

        Raises ApiError 507 if the file cannot be written, and 500 if it cannot be deleted.
        """
        if self.saver is not None:
            await self.saver.wait_saved()

    async def wait_named(self) -> None:
        """Wait until the ring has reported the state from which the session resumes after a fork or rewind."""
        if self.naming is not None:
            await asyncio.wait({self.naming})

    def records(self) -> list[LogRecord]:
        """Return all records of the session, for writing a complete file."""
        found = {turn.number: turn for end in (self.head, *self.turns_by_request.values()) for turn in backwards(end)}
        turns: list[LogRecord] = [record_of(found[number]) for number in sorted(found)]
        # A reader of the file takes its last turn as the head. In a branching session the head may be another turn.
        rewinds = [RewindRecord(self.head_number)] if self.head_number != max(found, default=0) else []
        return [self._header(), *turns, *rewinds]

    def check_room(self) -> None:
        """Raise ApiError 400 if the log is full, and 507 if there is no memory for a turn."""
        if self.log_cap is not None and self.log_bytes >= self.log_cap:
            message = (
                f"session {self.id!r} is full (--session-log): rewind it, fork it at an earlier turn, or begin another"
            )
            raise errors.bad_request(message, "session", "session_full")
        self.make_room(self)

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
    """The running turn of a session, from `Session.begin` until it is settled.

    A turn is settled when it is appended to the session, or dropped because the ring refused it. The end of the `with`
    block settles the turn.

    If an ApiError leaves `async with`, the turn is first written to the disk, if possible. If the turn is then part of
    the session, the error gets a header against retries.
    """

    def __init__(self, session: Session, request: str) -> None:
        """request: id of the turn's request."""
        self.session = session
        self.request = request
        self.number = session.highest_number + 1
        self.base = session.head  # the turn that this turn continues; None: the beginning
        self.base_tokens = session.tokens  # the history up to `base`
        self.prompt: Tokens = (
            b""  # the prompt of the turn's request: the part of the history that it keeps, then the turn's input
        )
        self.messages: tuple[dict[str, Any], ...] | None = None  # the new messages of a chat turn
        self.replaces = False  # the turns that continue `base` are forgotten when this one is in the session
        self.cut_short = False  # another turn continues it, so it is aborted as soon as it is submitted
        self.replaced = False  # another turn has taken its place, so it must not be submitted
        self.prefill_only = False  # the model only reads the input; the one token that is drawn is dropped
        self.parse: Callable[[str], ParsedAnswer] | None = None  # parses the text of the answer in a chat turn
        self.parsed: ParsedAnswer | None = None
        self.settled: Turn | None = None  # the turn that was added to the session; None before, or if refused
        self.done = asyncio.Event()  # set when the turn is settled
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
        """How many tokens of the history before this turn its prompt keeps."""
        return common_prefix(self.base_tokens, self.prompt)

    @property
    def over(self) -> bool:
        """Whether the ring has finished the turn."""
        if self._generation is None:
            return False
        [member] = self._generation.members
        return member.finish_reason is not None or self._generation.error is not None

    def go_on_from(self, base: Turn | None) -> None:
        """Let the turn continue `base` instead of the last turn; None means the beginning of the session."""
        self.base, self.base_tokens = base, history(base)

    @property
    def ring_id(self) -> str | None:
        """The id of the turn's request in the ring, or None before the turn is submitted.

        It differs from the client's id, which another API key's request may have in the ring.
        """
        return None if self._generation is None else self._generation.members[0].request.id

    def bind(self, request: Request) -> Request:
        """Return `request` with the session's name, under which the ring will keep the state at the turn's end."""
        self.prompt = request.tokens
        return replace(request, session=self.session.key)

    def check_wanted(self) -> None:
        """Raise ApiError 503 if another turn has replaced this one while its prompt was prepared."""
        if self.replaced:
            raise errors.aborted()

    def attach(self, generation: Generation, decode: Decode) -> None:
        """Set the generation whose output is the answer. decode: turns tokens into text."""
        self._generation, self._decode = generation, decode

    async def save(self) -> None:
        """Settle the turn, and wait until it is on the disk. Return at once without files.

        Await this before the client reads the end of the turn, so that every turn seen by a client survives a crash.
        Raises ApiError 507 (session_not_saved) if the turn cannot be written. The session then keeps the turn in
        memory, and writes it with the next turn.
        """
        self.settle()
        await self.session.wait_saved()

    def settle(self) -> None:
        """Append the turn, even if incomplete, to the session, unless the ring refused it. Later calls do nothing."""
        if self.session.running is not self:
            return
        self.session.running = None
        self.session.used = self.session.clock()
        if self._generation is not None and not refused(self._generation):
            [member] = self._generation.members
            if self.replaces:
                self.session.forget_after(self.base)
            self._append(member, status_of(member, self._generation.error))
        self.done.set()

    def _append(self, member: Member, status: TurnStatus) -> None:
        """Make a Turn from the outputs that the ring has delivered, and append it to the session."""
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
    """Return whether the ring refused a turn's request before its admission. Sessions do not record such turns."""
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
    # How a token decodes depends on the tokens before it: decode the prompt's end with and without the answer.
    tail = unpack(cut(request.tokens, max(request.prompt_len - CONTEXT, 0), request.prompt_len))
    before, whole = decode(tail), decode(tail + ids)
    return whole[len(before) :] if whole.startswith(before) else decode(ids)

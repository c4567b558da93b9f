"""One response as clients see it: the object, and the events of its stream, which are made from what has come of it."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from baton.actors.requests import Output
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.generation.messages import Message
from baton.api.generation.outputs import Member
from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.responses.items import Event, FunctionCallItem, MessageItem, OutputItem, ReasoningItem
from baton.models.text.formats.events import CallArguments, CallBegun, CallEnded, Content, OutputEvent, Reasoning

DescribeLogprobs: TypeAlias = Callable[[Output], list[msgspec.Raw]]
QUEUED = ("response.created", "response.queued")
ENDS = {"completed": "response.completed", "failed": "response.failed"}
UNENDED: dict[str, Any] = {
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
MAX_AT_ONCE = 256


class Transcript:
    """What has come of one response. Events are not kept but made from it, as often as they are read.

    An item begins with the first of its text, and ends where the next one begins. body: the object, always up to date.
    parsed: takes the outputs apart. logprobs_of: an output's log probabilities as clients see them, if they are wanted:
    those of messages. prefill_only: what the model says is not wanted.
    """

    def __init__(
        self,
        body: dict[str, Any],
        parsed: ParsedAnswer,
        logprobs_of: DescribeLogprobs | None = None,
        prefill_only: bool = False,
    ) -> None:
        self.body = body
        self.over = False
        self.changed = asyncio.Event()
        self.prefill_only = prefill_only
        self._parsed: ParsedAnswer | None = parsed
        self._logprobs_of = logprobs_of
        self._logprobs: list[msgspec.Raw] = []
        self._items: list[OutputItem] = []
        # The number of each item's first event.
        self._numbers: list[int] = []
        self._opened: OutputItem | None = None
        self._first = (*QUEUED, "response.in_progress") if body["background"] else (QUEUED[0], "response.in_progress")

    @property
    def count(self) -> int:
        """How many events there are; until it is over, without a delta for what has come since the last."""
        if self.body["status"] == "queued":
            return len(QUEUED)
        if not self._items:
            return len(self._first) + self.over
        item = self._items[-1]
        closing = item.closing if item is not self._opened else 0
        return self._numbers[-1] + item.opening + len(item.growing) + closing + self.over

    @property
    def size(self) -> int:
        """Bytes of the body as JSON, and of the marks."""
        return len(msgspec.json.encode(self.body)) + sum(item.growing.size for item in self._items)

    @property
    def message(self) -> Message:
        """What was said, as templates know it; without calls that were cut off, which they could not show."""
        items = self._items
        message: Message = {
            "role": "assistant",
            "content": "".join([item.growing.text for item in items if isinstance(item, MessageItem)]),
        }
        if thoughts := [item.growing.text for item in items if isinstance(item, ReasoningItem)]:
            message["reasoning_content"] = "".join(thoughts)
        if calls := [item.message() for item in items if isinstance(item, FunctionCallItem) and item.complete]:
            message["tool_calls"] = calls
        return message

    def add(self, output: Output) -> None:
        if self.body["status"] == "queued":
            self.body["status"] = "in_progress"
        if not self.prefill_only and self._parsed is not None:
            if self._logprobs_of is not None:
                self._logprobs += self._logprobs_of(output)
            self._note(self._parsed, self._parsed.add(output))
        self.changed.set()

    def finish(self, status: str, member: Member, error: ApiError | None = None) -> None:
        assert self._parsed is not None
        parsed = self._parsed
        self.body["status"] = status  # It is queued no more: items have their numbers behind all of the first events.
        self._note(parsed, parsed.finish(member.finish_reason))
        if not self.prefill_only:
            if not self._items:
                self._open(MessageItem(self._id("msg"), 0))
            self._give_logprobs()
        self._close(complete=member.finish_reason == "stop")
        self.over = True
        self._parsed = None
        generated = 0 if self.prefill_only else member.completion_tokens
        self.body.update(
            {
                "status": status,
                "completed_at": int(time.time()) if status == "completed" else None,
                "error": {"code": error.code or error.type, "message": error.message} if error is not None else None,
                "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
                "output": [item.whole() for item in self._items],
                "usage": {
                    "input_tokens": member.prompt_tokens,
                    "input_tokens_details": {"cached_tokens": member.cached_tokens, "cache_write_tokens": 0}
                    | ({"lost": member.miss_reason} if member.miss_reason else {}),
                    "output_tokens": generated,
                    "output_tokens_details": {"reasoning_tokens": parsed.reasoning_tokens},
                    "total_tokens": member.prompt_tokens + generated,
                },
            }
        )
        self.changed.set()

    def events(self, start: int, most: int = MAX_AT_ONCE) -> list[Event]:
        """Those from number `start` on that there are, at most so many. A reader who has all sets a mark."""
        if start >= self.count and self._opened is not None:
            self._opened.growing.mark()
        return [self._event(number) for number in range(start, min(self.count, start + most))]

    def _note(self, parsed: ParsedAnswer, events: Sequence[OutputEvent]) -> None:
        for event in events:
            match event:
                case Content(text):
                    if not isinstance(self._opened, MessageItem):
                        self._open(MessageItem(self._id("msg"), len(self._items)))
                    self._add(text)
                case Reasoning(text):
                    if not isinstance(self._opened, ReasoningItem):
                        self._open(ReasoningItem(self._id("rs"), len(self._items)))
                    self._add(text)
                case CallBegun(index):
                    self._open(FunctionCallItem(self._id("fc"), len(self._items), parsed.calls[index]))
                case CallArguments(_, json):
                    self._add(json)
                case CallEnded(_, whole):
                    self._close(whole)
        if self._opened is not None:
            self._give_logprobs()

    def _open(self, item: OutputItem) -> None:
        self._close()
        self._numbers.append(self.count)
        self._items.append(item)
        self._opened = item

    def _add(self, text: str) -> None:
        if self._opened is not None:
            self._opened.growing.add(text)

    def _close(self, complete: bool = True) -> None:
        if self._opened is not None:
            self._opened.complete = complete
            self._opened.growing.close()
            self._opened = None

    def _give_logprobs(self) -> None:
        """Those that have come belong to what is open."""
        if isinstance(self._opened, MessageItem):
            self._opened.growing.logprobs += self._logprobs
        self._logprobs = []

    def _id(self, kind: str) -> str:
        """The first message's is made from the response's alone."""
        id, earlier = item_id(self.body["id"], kind), len(self._items)
        said = any(isinstance(item, MessageItem) for item in self._items)
        return id if kind == "msg" and not said else f"{id}.{earlier}"

    def _event(self, number: int) -> Event:
        if number < len(self._first):
            kind = self._first[number]
            status = "queued" if self.body["background"] and kind in QUEUED else "in_progress"
            return {"type": kind, "sequence_number": number, "response": {**self.body, **UNENDED, "status": status}}
        if self.over and number == self.count - 1:
            kind = ENDS.get(self.body["status"], "response.incomplete")
            return {"type": kind, "sequence_number": number, "response": dict(self.body)}
        place = bisect_right(self._numbers, number) - 1
        event = event_of(self._items[place], number - self._numbers[place])
        return {"type": event.pop("type"), "sequence_number": number, **event}


def event_of(item: OutputItem, number: int) -> Event:
    """The event of this number among the item's own."""
    delta, done = number - item.opening, number - item.opening - len(item.growing)
    return item.first()[number] if delta < 0 else item.delta(delta) if done < 0 else item.last()[done]


class EventCursor:
    """One client's place in the events of a response. after: the last one that it has. Raises 400."""

    def __init__(self, transcript: Transcript, after: int = -1) -> None:
        if after >= transcript.count:
            message = f"the response has no event {after} yet"
            raise errors.bad_request(message, "starting_after", "invalid_value")
        self._transcript = transcript
        self._next = after + 1

    @property
    def over(self) -> bool:
        """It has got the last one."""
        return self._transcript.over and self._next == self._transcript.count

    async def next(self, wait: float | None = None) -> list[Event]:
        """The next events; none after `wait` seconds of silence."""
        while True:
            self._transcript.changed.clear()
            if events := self._transcript.events(self._next):
                self._next += len(events)
                return events
            try:
                async with asyncio.timeout(wait):
                    await self._transcript.changed.wait()
            except TimeoutError:
                return []


def item_id(response: str, kind: str = "msg") -> str:
    """The id of the output message of a response or a turn, made from the id of that, or of another item."""
    return f"{kind}_" + response.replace("_", "-").partition("-")[2]

"""The output of one response, from which its response object and the events of its stream are generated."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from baton.actors.requests import Output
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.generation.answers import CompletionTokensDetails
from baton.api.generation.messages import Message
from baton.api.generation.outputs import Member
from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.responses.items import Event, FunctionCallItem, MessageItem, OutputItem, ReasoningItem
from baton.models.text.formats.events import CallArguments, CallBegun, CallEnded, Content, OutputEvent, Reasoning

DescribeLogprobs: TypeAlias = Callable[[Output], list[msgspec.Raw]]
QUEUED = ("response.created", "response.queued")  # first events of a background response, before any output
# Type of the last event by status of the response; response.incomplete for all other statuses.
ENDS = {"completed": "response.completed", "failed": "response.failed"}
# Values of these fields of the response object in all events but the last one.
UNENDED: dict[str, Any] = {
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
MAX_AT_ONCE = 256  # maximum events that a reader gets at once


class Transcript:
    """The output of one response so far. Events are not stored, but generated from the output for each reader.

    An output item begins with its first text and ends where the next item begins. The events are numbered:

        created, (queued,) in_progress | item 0: opening, deltas, closing | item 1: … | the end
        _first                           _numbers[0]                        _numbers[1]
    """

    def __init__(
        self,
        body: dict[str, Any],
        parsed: ParsedAnswer,
        logprobs_of: DescribeLogprobs | None = None,
        prefill_only: bool = False,
    ) -> None:
        """body: the response object, which the transcript keeps up to date.

        parsed: parses the outputs.
        logprobs_of: returns an output's log probabilities in the client's form; None if the client asks for none.
        prefill_only: only the prompt is computed; the model's output is dropped.
        """
        self.body = body
        self.over = False
        self.changed = asyncio.Event()
        self.prefill_only = prefill_only
        self.taken_over = 0  # events that another engine has sent, whose text is one delta here
        self._parsed: ParsedAnswer | None = parsed
        self._logprobs_of = logprobs_of
        self._logprobs: list[msgspec.Raw] = []  # log probabilities not yet added to an item
        self._items: list[OutputItem] = []
        # For each item the number of its first event.
        self._numbers: list[int] = []
        self._opened: OutputItem | None = None  # the last item, while its text grows
        self._first = (*QUEUED, "response.in_progress") if body["background"] else (QUEUED[0], "response.in_progress")

    @property
    def count(self) -> int:
        """The number of events so far. Text after the last mark of an open item is not part of an event yet."""
        if self.body["status"] == "queued":
            return len(QUEUED)
        if not self._items:
            return len(self._first) + self.over
        item = self._items[-1]
        closing = item.closing if item is not self._opened else 0
        return self._numbers[-1] + item.opening + len(item.growing) + closing + self.over

    @property
    def opening(self) -> int:
        """The number of events before any output."""
        return len(self._first)

    @property
    def unmarked(self) -> bool:
        """Whether there is text that is not part of an event yet."""
        return self._opened is not None and self._opened.growing.unmarked

    @property
    def size(self) -> int:
        """The bytes of the response object as JSON, plus the bytes of all marks in the items' texts."""
        return len(msgspec.json.encode(self.body)) + sum(item.growing.size for item in self._items)

    @property
    def message(self) -> Message:
        """The answer as a message for chat templates, without cut-off calls, which templates cannot show."""
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
        """Add the next output of the model."""
        if self.body["status"] == "queued":
            self.body["status"] = "in_progress"
        if not self.prefill_only and self._parsed is not None:
            if self._logprobs_of is not None:
                self._logprobs += self._logprobs_of(output)
            self._note(self._parsed, self._parsed.add(output))
        self.changed.set()

    def take_over(self, output: Output, events: int) -> None:
        """Add the output that a client has from another engine.

        events: how many the client has; the next event gets the number after them
        """
        self.add(output)
        if self._opened is not None:
            self._opened.growing.mark()
        if self._items:
            self._items[-1].growing.pad(events - self.count)
        self.taken_over = self.count

    def finish(self, status: str, member: Member, error: ApiError | None = None) -> None:
        """End the response: close the open item, and complete the response object."""
        assert self._parsed is not None
        parsed = self._parsed
        self.body["status"] = status  # Set it first: while "queued", `count` leaves out items.
        self._note(parsed, parsed.finish(member.finish_reason))
        if not self.prefill_only:
            if not self._items:
                self._open(MessageItem(self._id("msg"), 0))
            self._give_logprobs()
        self._close(complete=member.finish_reason == "stop")
        self.over = True
        self._parsed = None
        generated = 0 if self.prefill_only else member.completion_tokens
        of_output = CompletionTokensDetails(parsed.reasoning_tokens, member.accepted, member.rejected)
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
                    "output_tokens_details": msgspec.to_builtins(of_output),
                    "total_tokens": member.prompt_tokens + generated,
                },
            }
        )
        self.changed.set()

    def events(self, start: int, most: int = MAX_AT_ONCE) -> list[Event]:
        """Return up to `most` events from number `start` on. If there are none, make one from text since the last mark.

        A delta therefore ends where the fastest reader asked for more; slow readers get fewer and longer deltas.
        """
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
        """Add the log probabilities since the last call to the open item if it is a message; else drop them."""
        if isinstance(self._opened, MessageItem):
            self._opened.growing.logprobs += self._logprobs
        self._logprobs = []

    def _id(self, kind: str) -> str:
        """Derive a new item's id from the response's id and, except for the first message, from the item's index."""
        id, earlier = item_id(self.body["id"], kind), len(self._items)
        has_message = any(isinstance(item, MessageItem) for item in self._items)
        return id if kind == "msg" and not has_message else f"{id}.{earlier}"

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
    """Return an item's event. number: 0 for the first event of the item."""
    delta, done = number - item.opening, number - item.opening - len(item.growing)
    return item.first()[number] if delta < 0 else item.delta(delta) if done < 0 else item.last()[done]


class EventCursor:
    """The position of one reader in the events of a response."""

    def __init__(self, transcript: Transcript, after: int = -1) -> None:
        """after: the number of the last event that the client has. Raises ApiError 400 without such an event."""
        if after >= transcript.count:
            message = f"the response has no event {after} yet"
            raise errors.bad_request(message, "starting_after", "invalid_value")
        if 0 <= after < transcript.taken_over - 1:
            message = f"event {after} was lost with its engine: read the response from its beginning"
            raise errors.bad_request(message, "starting_after", "event_lost")
        self._transcript = transcript
        self._next = after + 1

    @property
    def position(self) -> int:
        """The number of the next event."""
        return self._next

    @property
    def caught_up(self) -> bool:
        """Whether the reader has got all that the response has so far."""
        return self._next == self._transcript.count and not self._transcript.unmarked

    @property
    def over(self) -> bool:
        """Whether the reader has got all events of a response that is over."""
        return self._transcript.over and self._next == self._transcript.count

    async def next(self, wait: float | None = None) -> list[Event]:
        """Return the next events, or an empty list after `wait` seconds without a new event."""
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
    """Return the id of an output item, derived from the id of its response or turn."""
    return f"{kind}_" + response.replace("_", "-").partition("-")[2]

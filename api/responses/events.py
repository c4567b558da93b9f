"""One response as clients see it: the object, and the events of its stream, which are made from what has come of it."""

import asyncio
import io
import time
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from actors.requests import Output
from api import errors
from api.errors import ApiError
from api.generation.outputs import Member

Event: TypeAlias = dict[str, Any]
DescribeLogprobs: TypeAlias = Callable[[Output], list[msgspec.Raw]]
QUEUED = ("response.created", "response.queued")
ITEM_ADDED = ("response.output_item.added", "response.content_part.added")
ITEM_DONE = ("response.output_text.done", "response.content_part.done", "response.output_item.done")
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

    A delta is the text between two marks. A mark is set when the first reader comes so far: who reads slowly gets fewer
    and longer deltas, and who reads again gets the same. body: the object, always up to date. logprobs_of: an
    output's log probabilities as clients see them, if they are wanted. prefill_only: what the model says is not wanted.
    """

    def __init__(
        self, body: dict[str, Any], logprobs_of: DescribeLogprobs | None = None, prefill_only: bool = False
    ) -> None:
        self.body = body
        self.over = False
        self.changed = asyncio.Event()
        self.prefill_only = prefill_only
        self._logprobs_of = logprobs_of
        self._text: str | None = None
        self._written = io.StringIO()
        self._length = 0
        self._logprobs: list[msgspec.Raw] = []
        self._marks = array("Q")
        self._logprob_marks = array("Q")
        self._finish_reason: str | None = None
        started = (*QUEUED, "response.in_progress") if body["background"] else (QUEUED[0], "response.in_progress")
        self._first = (*started, *(() if prefill_only else ITEM_ADDED))
        self._last = () if prefill_only else ITEM_DONE
        self._item_id = item_id(body["id"])
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    @property
    def text(self) -> str:
        return self._text if self._text is not None else self._written.getvalue()

    @property
    def count(self) -> int:
        """How many events there are; until it is over, without a delta for what has come since the last."""
        if self.body["status"] == "queued":
            return len(QUEUED)
        return len(self._first) + len(self._marks) + (len(self._last) + 1 if self.over else 0)

    @property
    def size(self) -> int:
        """Bytes of the body as JSON, and of the marks."""
        return len(msgspec.json.encode(self.body)) + 8 * (len(self._marks) + len(self._logprob_marks))

    def add(self, output: Output) -> None:
        if self.body["status"] == "queued":
            self.body["status"] = "in_progress"
        self._finish_reason = output.finish_reason
        if not self.prefill_only:
            self._written.seek(self._length)
            self._written.write(output.text)
            self._length += len(output.text)
            if self._logprobs_of is not None:
                self._logprobs += self._logprobs_of(output)
        self.changed.set()

    def finish(self, status: str, member: Member, error: ApiError | None = None) -> None:
        self._mark()
        self.over = True
        self._text = self._written.getvalue()
        self._written.close()
        generated = 0 if self.prefill_only else member.completion_tokens
        self.body.update(
            {
                "status": status,
                "completed_at": int(time.time()) if status == "completed" else None,
                "error": {"code": error.code or error.type, "message": error.message} if error is not None else None,
                "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
                "output": [] if self.prefill_only else [self._whole()],
                "usage": {
                    "input_tokens": member.prompt_tokens,
                    "input_tokens_details": {"cached_tokens": member.cached_tokens, "cache_write_tokens": 0},
                    "output_tokens": generated,
                    "output_tokens_details": {"reasoning_tokens": 0},
                    "total_tokens": member.prompt_tokens + generated,
                },
            }
        )
        self.changed.set()

    def events(self, start: int, most: int = MAX_AT_ONCE) -> list[Event]:
        """Those from number `start` on that there are, at most so many. A reader who has all sets a mark."""
        if start >= self.count:
            self._mark()
        return [self._event(number) for number in range(start, min(self.count, start + most))]

    def _mark(self) -> None:
        """What has come since the last delta is the next."""
        at = self._marks[-1] if self._marks else 0
        logprobs_at = self._logprob_marks[-1] if self._logprob_marks else 0
        if not self.over and (self._length > at or len(self._logprobs) > logprobs_at):
            self._marks.append(self._length)
            if self._logprobs_of is not None:
                self._logprob_marks.append(len(self._logprobs))

    def _event(self, number: int) -> Event:
        delta = number - len(self._first)
        done = delta - len(self._marks)
        if delta < 0:
            kind = self._first[number]
            fields = self._opening(kind)
        elif done < 0:
            kind, fields = "response.output_text.delta", self._delta(delta)
        elif done < len(self._last):
            kind = self._last[done]
            fields = self._closing(kind)
        else:
            kind, fields = ENDS.get(self.body["status"], "response.incomplete"), {"response": dict(self.body)}
        return {"type": kind, "sequence_number": number, **fields}

    def _opening(self, kind: str) -> dict[str, Any]:
        match kind:
            case "response.output_item.added":
                return {"output_index": 0, "item": self._item("in_progress", [])}
            case "response.content_part.added":
                return {**self._place, "part": self._part("", [])}
        status = "queued" if self.body["background"] and kind in QUEUED else "in_progress"
        return {"response": {**self.body, **UNENDED, "status": status}}

    def _delta(self, index: int) -> dict[str, Any]:
        begin = self._marks[index - 1] if index else 0
        if self._text is not None:
            text = self._text[begin : self._marks[index]]
        else:
            self._written.seek(begin)
            text = self._written.read(self._marks[index] - begin)
        logprobs: list[msgspec.Raw] = []
        if self._logprobs_of is not None:
            logprobs = self._logprobs[self._logprob_marks[index - 1] if index else 0 : self._logprob_marks[index]]
        return {**self._place, "delta": text, "logprobs": logprobs}

    def _closing(self, kind: str) -> dict[str, Any]:
        match kind:
            case "response.output_text.done":
                return {**self._place, "text": self.text, "logprobs": self._logprobs}
            case "response.content_part.done":
                return {**self._place, "part": self._part(self.text, self._logprobs)}
        return {"output_index": 0, "item": self._whole()}

    def _whole(self) -> dict[str, Any]:
        status = "completed" if self._finish_reason == "stop" else "incomplete"
        return self._item(status, [self._part(self.text, self._logprobs)])

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


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


def item_id(response: str) -> str:
    """The id of the output message of a response or a turn, made from the id of that."""
    return "msg-" + response.partition("-")[2]

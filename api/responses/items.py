"""The output items of a response (messages, reasoning, function calls) and the events of each item."""

import io
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from baton.api.generation.messages import call_message
from baton.api.generation.parsed_answer import CalledTool
from baton.api.responses.response_tools import prefix_of

Event: TypeAlias = dict[str, Any]
Item: TypeAlias = dict[str, Any]


class GrowingText:
    """A growing text with marks. The text between two marks is one delta of a stream.

    A mark is set when a reader asks for more than the text up to the last mark. All readers get the same deltas; if all
    are slow, the deltas are fewer and longer.
    """

    def __init__(self) -> None:
        self.logprobs: list[msgspec.Raw] = []  # log probabilities of the text's tokens, as JSON
        self._whole: str | None = None  # the complete text; None while it grows
        self._written = io.StringIO()  # the text while it grows
        self._length = 0  # characters of the text so far
        self._marks = array("Q")  # end of each delta in the text
        self._logprob_marks = array("Q")  # end of each delta in `logprobs`

    def __len__(self) -> int:
        """Return the number of deltas."""
        return len(self._marks)

    @property
    def text(self) -> str:
        return self._whole if self._whole is not None else self._written.getvalue()

    @property
    def size(self) -> int:
        """The memory of the marks, in bytes."""
        return 8 * (len(self._marks) + len(self._logprob_marks))

    def add(self, text: str) -> None:
        self._written.seek(self._length)
        self._written.write(text)
        self._length += len(text)

    @property
    def unmarked(self) -> bool:
        """Whether there is text since the last mark."""
        at = self._marks[-1] if self._marks else 0
        logprobs_at = self._logprob_marks[-1] if self._logprob_marks else 0
        return self._whole is None and (self._length > at or len(self.logprobs) > logprobs_at)

    def mark(self) -> None:
        """Set a mark at the end, if there is text since the last mark: that text becomes a delta."""
        if self.unmarked:
            self._marks.append(self._length)
            self._logprob_marks.append(len(self.logprobs))

    def pad(self, marks: int) -> None:
        """Add marks at the end: deltas without text."""
        self._marks.extend([self._length] * marks)
        self._logprob_marks.extend([len(self.logprobs)] * marks)

    def close(self) -> None:
        """End the growth of the text. The text since the last mark becomes the last delta."""
        self.mark()
        self._whole = self._written.getvalue()
        self._written.close()

    def delta(self, index: int) -> tuple[str, list[msgspec.Raw]]:
        begin, end = self._marks[index - 1] if index else 0, self._marks[index]
        if self._whole is not None:
            text = self._whole[begin:end]
        else:
            self._written.seek(begin)
            text = self._written.read(end - begin)
        return text, self.logprobs[self._logprob_marks[index - 1] if index else 0 : self._logprob_marks[index]]


class OutputItem(Protocol):
    """One item of a response's output."""

    growing: GrowingText
    complete: bool  # whether the item's status at the end is "completed", rather than "incomplete"
    opening: int  # the number of events before the deltas
    closing: int  # the number of events after the deltas

    def whole(self) -> Item:
        """Return the complete item, in the format of the response object."""
        ...

    def first(self) -> list[Event]:
        """Return the events before the deltas."""
        ...

    def delta(self, index: int) -> Event:
        """Return the event of one delta."""
        ...

    def last(self) -> list[Event]:
        """Return the events after the deltas."""
        ...


class MessageItem:
    opening, closing = 2, 3

    def __init__(self, id: str, index: int) -> None:
        self.growing = GrowingText()
        self.complete = False
        self._id = id
        self._index = index
        self._place = {"item_id": id, "output_index": index, "content_index": 0}

    def whole(self) -> Item:
        return self._item(status_of(self), [self._part(self.growing.text, self.growing.logprobs)])

    def first(self) -> list[Event]:
        return [
            added(self._index, self._item("in_progress", [])),
            {"type": "response.content_part.added", **self._place, "part": self._part("", [])},
        ]

    def delta(self, index: int) -> Event:
        text, logprobs = self.growing.delta(index)
        return {"type": "response.output_text.delta", **self._place, "delta": text, "logprobs": logprobs}

    def last(self) -> list[Event]:
        text, logprobs = self.growing.text, self.growing.logprobs
        return [
            {"type": "response.output_text.done", **self._place, "text": text, "logprobs": logprobs},
            {"type": "response.content_part.done", **self._place, "part": self._part(text, logprobs)},
            done(self._index, self.whole()),
        ]

    def _item(self, status: str, content: list[Item]) -> Item:
        return {"id": self._id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str, logprobs: list[msgspec.Raw]) -> Item:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ReasoningItem:
    opening, closing = 2, 3

    def __init__(self, id: str, index: int) -> None:
        self.growing = GrowingText()
        self.complete = False
        self._id = id
        self._index = index
        self._place = {"item_id": id, "output_index": index, "content_index": 0}

    def whole(self) -> Item:
        return reasoning_item(self._id, self.growing.text, status_of(self))

    def first(self) -> list[Event]:
        part = {"type": "reasoning_text", "text": ""}
        item = {"id": self._id, "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        return [added(self._index, item), {"type": "response.content_part.added", **self._place, "part": part}]

    def delta(self, index: int) -> Event:
        return {"type": "response.reasoning_text.delta", **self._place, "delta": self.growing.delta(index)[0]}

    def last(self) -> list[Event]:
        text = self.growing.text
        part = {"type": "reasoning_text", "text": text}
        return [
            {"type": "response.reasoning_text.done", **self._place, "text": text},
            {"type": "response.content_part.done", **self._place, "part": part},
            done(self._index, self.whole()),
        ]


class FunctionCallItem:
    """A function call. It is complete if its arguments are a complete JSON object."""

    opening, closing = 1, 2

    def __init__(self, id: str, index: int, call: CalledTool) -> None:
        self.growing = GrowingText()
        self.complete = False
        self._id = id
        self._index = index
        self._call = call
        self._place = {"item_id": id, "output_index": index}

    def whole(self) -> Item:
        return call_item(self._id, self._call, self.growing.text, status_of(self))

    def message(self) -> dict[str, Any]:
        """Return this tool call as a message for the chat template."""
        return call_message(self._call.id, self._call.name, self.growing.text)

    def first(self) -> list[Event]:
        return [added(self._index, call_item(self._id, self._call, "", "in_progress"))]

    def delta(self, index: int) -> Event:
        arguments, _ = self.growing.delta(index)
        return {"type": "response.function_call_arguments.delta", **self._place, "delta": arguments}

    def last(self) -> list[Event]:
        item = self.whole()
        about = {"name": item["name"], "arguments": item["arguments"]}
        return [{"type": "response.function_call_arguments.done", **self._place, **about}, done(self._index, item)]


def added(index: int, item: Item) -> Event:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def done(index: int, item: Item) -> Event:
    return {"type": "response.output_item.done", "output_index": index, "item": item}


def status_of(item: OutputItem) -> str:
    return "completed" if item.complete else "incomplete"


def reasoning_item(id: str, text: str, status: str) -> Item:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}


def call_item(id: str, call: CalledTool, arguments: str, status: str) -> Item:
    """Return a call as an item. Its name is without the namespace prefix that the model sees, as clients expect."""
    name = call.name.removeprefix(prefix_of(call.namespace))
    item: Item = {"id": id, "type": "function_call", "call_id": call.id, "name": name, "arguments": arguments}
    return item | ({"namespace": call.namespace} if call.namespace else {}) | {"status": status}


def items_of(id: str, message: Mapping[str, Any]) -> list[Item]:
    """Split a message into items: reasoning, text and calls, in this order.

    If the model wrote its answer in this order, the items get the same ids as in the response with this answer.

    id: id of the text's item, from which the other ids derive.
    """
    content, calls = message["content"], message.get("tool_calls", ())
    if message["role"] == "tool":
        answered = {"call_id": message["tool_call_id"]} if "tool_call_id" in message else {}
        named = {"name": message["name"]} if "name" in message else {}
        result = {"id": id, "type": "function_call_output", **answered, **named, "output": content}
        return [{**result, "status": "completed"}]
    items, rest = list[Item](), id.partition("_")[2]
    if thought := message.get("reasoning_content"):
        items.append(reasoning_item(f"rs_{rest}.0", thought, "completed"))
    if content or not (calls or thought):
        items.append(message_item(id, message["role"], content))
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        items.append(call_item(f"fc_{rest}.{len(items)}", CalledTool(call["id"], name), written, "completed"))
    return items


def message_item(id: str, role: str, text: str) -> Item:
    answered = role == "assistant"
    part: Item = {"type": "output_text" if answered else "input_text", "text": text}
    if answered:
        part |= {"annotations": [], "logprobs": []}
    return {"id": id, "type": "message", "role": role, "status": "completed", "content": [part]}


def frames(events: Sequence[Event]) -> bytes:
    """Encode events as SSE frames with the events' names."""
    return b"".join(
        [b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in events]
    )

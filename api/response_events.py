"""One response as clients see it: the object, and the events of its stream."""

import time
from collections.abc import Callable
from typing import Any, Self

from actors.messages import Output
from api.answers import Answer
from api.engine import Text
from api.errors import ApiError
from api.generation import Generation
from api.openai_chat import TokenInfo, describe
from api.response_store import StoredResponse
from api.session import refused

Event = dict[str, Any]


class ResponseEvents:
    """Keeps the stored response up to date, and numbers the events. As a context it closes the response when left.

    forget: called if the ring refused it.
    """

    def __init__(
        self,
        response: StoredResponse,
        generation: Generation,
        text: Text,
        logprobs: bool,
        forget: Callable[[], None],
    ) -> None:
        self.over = False
        self._response = response
        self._generation = generation
        self._text = text
        self._logprobs = logprobs
        self._forget = forget
        self._answer = Answer()
        self._infos: list[TokenInfo] = []
        self._item_id = response.id.replace("resp", "msg", 1)
        self._opened = False
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self._response.running:
            return
        if isinstance(error, ApiError):
            if refused(self._generation):
                self._forget()
            self._failed(error)
        else:
            self._take_rest()
            self._finish("cancelled")

    async def next(self, wait: float | None = None) -> list[Event]:
        """The next events; none after `wait` seconds of silence.

        An ApiError before the first is raised, and a later one becomes the last.
        """
        try:
            batch = await self._generation.next(wait)
        except ApiError as error:
            if not self._opened:
                raise
            return self._failed(error)
        events = [] if self._opened else self._opening()
        for _, output in batch:
            events += self._delta(output)
        if self._generation.finished:
            events += self._closing()
        return events

    async def read(self) -> dict[str, Any]:
        """To the end; the body. Raises ApiError."""
        while not self._generation.finished:
            for _, output in await self._generation.next():
                self._delta(output)
        self._closing()
        return self.body

    @property
    def body(self) -> dict[str, Any]:
        return self._response.body

    def _opening(self) -> list[Event]:
        self._opened = True
        return [
            self._event("response.created", response=self.body),
            self._event("response.in_progress", response=self.body),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **self._place(), part=self._part("", [])),
        ]

    def _delta(self, output: Output) -> list[Event]:
        self._answer.add(output)
        infos = describe(self._text, output.logprobs).content if self._logprobs else []
        self._infos += infos
        if not output.text and not infos:
            return []
        return [self._event("response.output_text.delta", **self._place(), delta=output.text, logprobs=infos)]

    def _closing(self) -> list[Event]:
        """The response is over, and stored as such, before anybody reads so."""
        status = {"stop": "completed", "length": "incomplete"}.get(self._answer.finish_reason or "", "cancelled")
        self._finish(status)
        if status == "incomplete":
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        kind = "response.completed" if status == "completed" else "response.incomplete"
        return [*self._done(), self._event(kind, response=self.body)]

    def _failed(self, error: ApiError) -> list[Event]:
        self._take_rest()
        self._finish("failed")
        self.body["error"] = {"code": error.code or error.type, "message": error.message}
        return [*self._done(), self._event("response.failed", response=self.body)]

    def _take_rest(self) -> None:
        """What has come and was not read."""
        for member in self._generation.members:
            if (output := member.take()) is not None:
                self._answer.add(output)

    def _finish(self, status: str) -> None:
        self.over = True
        self._response.finished.set()
        self._response.answer = self._answer.text
        [member] = self._generation.members
        self.body.update(
            {
                "status": status,
                "completed_at": int(time.time()) if status == "completed" else None,
                "output": [self._whole()],
                "usage": {
                    "input_tokens": member.prompt_tokens,
                    "input_tokens_details": {"cached_tokens": member.cached_tokens, "cache_write_tokens": 0},
                    "output_tokens": member.completion_tokens,
                    "output_tokens_details": {"reasoning_tokens": 0},
                    "total_tokens": member.prompt_tokens + member.completion_tokens,
                },
            }
        )

    def _done(self) -> list[Event]:
        text, place = self._answer.text, self._place()
        return [
            self._event("response.output_text.done", **place, text=text, logprobs=self._infos),
            self._event("response.content_part.done", **place, part=self._part(text, self._infos)),
            self._event("response.output_item.done", output_index=0, item=self._whole()),
        ]

    def _whole(self) -> dict[str, Any]:
        status = "completed" if self._answer.finish_reason == "stop" else "incomplete"
        return self._item(status, [self._part(self._answer.text, self._infos)])

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str, infos: list[TokenInfo]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": infos}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Event:
        if "response" in fields:
            fields["response"] = dict(self.body)
        event = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return event

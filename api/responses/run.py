"""The task that runs a response: it reads the ring's outputs to the end, even without a connected client."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Self

import structlog

from baton.actors.requests import Output
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.generation.answers import summary
from baton.api.generation.outputs import Generation
from baton.api.responses.events import Transcript
from baton.api.responses.store import ResponseStore, StoredResponse
from baton.api.server import Server
from baton.api.sessions.saver import NOT_SAVED
from baton.api.sessions.session import OpenTurn, refused

# Status of the response by finish_reason of its request; "cancelled" for all other reasons.
ENDS = {"stop": "completed", "length": "incomplete"}


class ResponseRun:
    """A running response. Its outputs go into a transcript, from which each client reads at its own speed.

    The end of the `with` block aborts the response, unless the response runs in the background.
    """

    def __init__(
        self,
        server: Server,
        responses: ResponseStore,
        owner: bytes,
        response: StoredResponse,
        generation: Generation,
        turn: OpenTurn | None,
        log: structlog.typing.FilteringBoundLogger | None,
    ) -> None:
        """turn: the turn of a session that this response runs; None without a session.

        log: for the line about the response's end; None if the caller logs the end.
        """
        self.response = response
        self.generation = generation
        self.error: ApiError | None = None  # why the response failed, or why its turn was not saved
        self.tokens = bytearray()  # packed tokens of all outputs in the transcript
        self.shown = 0  # characters of the text of these outputs
        self.taken_over = 0  # bytes of `tokens` that another engine has sent to the client
        self._server = server
        self._responses = responses
        self._owner = owner
        self._turn = turn
        self._log = log
        self._begun = asyncio.Event()  # set at the first output, or at the end without output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.response.body["background"]:
            self.generation.fail(errors.client_left())

    @property
    def transcript(self) -> Transcript:
        return self.response.transcript

    async def wait_begun(self, wait: float | None = None) -> None:
        """Wait at most `wait` seconds for the first output. Raises ApiError if the response has failed by then."""
        try:
            async with asyncio.timeout(wait):
                await self._begun.wait()
        except TimeoutError:
            return
        if self.error is not None:
            raise self.error

    async def read(self) -> dict[str, Any]:
        """Wait for the end, and return the response object. Raises ApiError if the response has failed."""
        await self.response.finished.wait()
        if self.error is not None and not self.unsaved:
            raise self.error
        return self.response.body

    @property
    def is_turn(self) -> bool:
        """Whether the response is a turn of a session."""
        return self._turn is not None

    @property
    def has_logprobs(self) -> bool:
        [member] = self.generation.members
        return member.request.logprobs is not None

    @property
    def unsaved(self) -> bool:
        """Whether the answer is complete but its turn could not be saved to disk."""
        return self.error is not None and self.error.code == NOT_SAVED

    async def run_to_end(self) -> None:
        """Run the response to its end. `start_response` starts a task for this."""
        try:
            with self.generation:
                self.error = await failure(self._read())
            if self._turn is not None:
                self._settle()
                self.error = await failure(self._turn.save()) or self.error
        finally:
            self._end()

    async def _read(self) -> None:
        """Read all outputs. Raises ApiError if the response failed before its last output."""
        generation, [member] = self.generation, self.generation.members
        try:
            while not generation.finished:
                for _, output in await generation.next():
                    self._add(output)
        except ApiError:
            if (rest := member.take()) is not None:
                self._add(rest)
            if member.finish_reason in (None, "error", "grammar"):
                raise

    def take_over(self, events: int) -> None:
        """Begin after the output of another engine. Call this before `run_to_end`.

        events: how many that engine has sent
        """
        [member] = self.generation.members
        output = member.take()
        assert output is not None
        self._count(output)
        self.taken_over = len(self.tokens)
        self.transcript.take_over(output, events)
        self._begun.set()

    def _add(self, output: Output) -> None:
        self._count(output)
        self.transcript.add(output)
        self._begun.set()

    def _count(self, output: Output) -> None:
        self.tokens += output.tokens
        self.shown += len(output.text)

    def _end(self) -> None:
        """End the response, and update the store, before any reader sees the end."""
        response, status = self.response, self._status()
        self._settle()
        [member] = self.generation.members
        self.transcript.finish(status, member, self.error if status == "failed" else None)
        response.measure()
        # The ring refused the request, so the client gets an error status, and must not find a response in the store.
        if refused(self.generation) and not response.body["background"]:
            self._responses.delete(self._owner, response.id)
        self._responses.mark_ended(self._owner, response)
        if self._log is not None:
            error = self.error
            self._server.record_end(self.generation, (error.code or str(error.status)) if error is not None else None)
            self._log.info("response", response=response.id, **summary(self.generation))
        response.finished.set()
        self._begun.set()

    def _settle(self) -> None:
        """Settle the turn. If the session has the turn despite a failure, mark the error as not to be retried."""
        if self._turn is not None:
            self._turn.settle()
            turn = self.response.turn = self._turn.settled
            self.response.body["turn"] = turn.number if turn is not None else None
            if self.error is not None and turn is not None:
                self.error = errors.not_retryable(self.error)

    def _status(self) -> str:
        if self.error is not None:
            return "cancelled" if self.error.status == errors.CLIENT_LEFT else "failed"
        [member] = self.generation.members
        status = ENDS.get(member.finish_reason or "", "cancelled")
        return "completed" if self.transcript.prefill_only and status == "incomplete" else status


async def failure(work: Awaitable[None]) -> ApiError | None:
    """Await `work`. Return the exception that it raises, as an ApiError, or None."""
    try:
        await work
    except ApiError as error:
        return error
    except Exception:
        structlog.get_logger().exception("a response failed")
        return errors.internal("the server failed")
    return None

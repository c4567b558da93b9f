"""The requests that a server computes for its peers."""

import asyncio
import secrets
from collections.abc import Callable

from baton.actors.peers.engines import session_of
from baton.actors.peers.frames import Compute
from baton.actors.requests import PeerHint, Request, Sampling, Stops
from baton.actors.tokens import count, unpack
from baton.api.errors import ApiError
from baton.api.generation.gateway import Gateway
from baton.api.generation.outputs import Generation


class PeerRequests:
    """The requests that compute states for peers. They run like clients' requests, and draw one unused token."""

    def __init__(self, gateway: Gateway, vocab_size: int, max_model_len: int) -> None:
        self.computed: Callable[[int, str], None] = lambda loan, error: None  # called when a request has ended
        self._gateway, self._vocab_size, self._max_model_len = gateway, vocab_size, max_model_len
        self._boot = secrets.token_hex(4)
        self._running: dict[int, tuple[Generation, asyncio.Task[None]]] = {}  # by loan

    def begin(self, loan: int, frame: Compute, link: str) -> str:
        """Submit a request whose prompt ends at the state. Return "", or why that is not possible."""
        length = count(frame.tokens)
        if length >= self._max_model_len or not all(0 <= token < self._vocab_size for token in unpack(frame.tokens)):
            return "the tokens are not of this model"
        request = Request(
            id=f"peer-{self._boot}-{loan}",
            tokens=frame.tokens,
            prompt_len=length,
            sampling=Sampling(temperature=0.0),
            stops=Stops(1),
            priority=frame.priority,
            salt=frame.salt,
            session=session_of(loan),
            flow=link,
            trace=frame.trace,
            hint=PeerHint(link, frame.have),
        )
        try:
            generation = self._gateway.submit([request])
        except ApiError as error:
            return error.message
        self._running[loan] = generation, asyncio.ensure_future(self._await(loan, generation))
        return ""

    async def _await(self, loan: int, generation: Generation) -> None:
        try:
            with generation:
                while not generation.finished:
                    await generation.next()
            reason = generation.members[0].finish_reason
            error = "" if reason in ("stop", "length") else str(reason)
        except ApiError as failure:
            error = failure.message
        finally:
            self._running.pop(loan, None)
        self.computed(loan, error)

    def stop(self, loan: int) -> None:
        """Abort a request. If its task has not begun, it never runs, so the generation is closed here."""
        if loan in self._running:
            generation, task = self._running.pop(loan)
            task.cancel()
            generation.close()

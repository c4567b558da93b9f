"""A scheduler without the other actors, with methods that send it messages."""

from typing import Any

from baton.actors.lease import Lease, Ledger
from baton.actors.messages import Ended, Granted, Message, Settled, Submit
from baton.actors.requests import Hit, Request, Sampling, Stops
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import Limits
from baton.actors.scheduler.strategy import Strategy
from baton.actors.tokens import pack


class Desk:
    """A scheduler without the other actors, and the messages that it has sent."""

    def __init__(self, **limits: Any) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.ledger = Ledger(20)
        settings: dict[str, Any] = {"strategy": Strategy.NO_BUFFER, "max_running": 2, "step_tokens": 8} | limits
        self.scheduler = Scheduler(lambda to, message: self.sent.append((to, message)), Limits(**settings))

    def submit(
        self, name: str, length: int = 4, max_tokens: int = 9, resubmitted: bool = False, **more: Any
    ) -> Request:
        tokens = more.pop("tokens", range(length))
        request = Request(name, pack(tokens), len(tokens), Sampling(), Stops(max_tokens), **more)
        self.receive(Submit(request, resubmitted))
        return request

    def grant(self, grant: int, match: int = 0, pages: tuple[int, ...] = (), branch: int | None = None) -> None:
        self.receive(Granted(grant, self.lease(), Hit(match, match), False, None, list(pages), None, branch))

    def lease(self) -> Lease:
        lease = self.ledger.take("scheduler")
        assert lease is not None
        return lease

    def settle(self, *finished: int, failed: tuple[int, ...] = ()) -> None:
        self.receive(Settled(0, list(finished), list(failed)))

    def receive(self, message: Message) -> None:
        self.scheduler.receive(message)
        self.scheduler.act()

    def of(self, kind: type) -> list:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def take(self) -> list[tuple[str, Message]]:
        """Return the messages sent since the last call."""
        sent, self.sent[:] = list(self.sent), []
        return sent

    @property
    def counted(self) -> dict[str, int]:
        return +self.scheduler.counters

    @property
    def ended(self) -> list[tuple[str, str, str]]:
        return [(to, m.request, m.reason) for to, m in self.sent if isinstance(m, Ended)]

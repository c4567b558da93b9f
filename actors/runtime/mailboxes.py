"""The runtime: mailboxes, and the tasks that run the actors. Leases move here, and nowhere else."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count

import anyio

from baton.actors.actor import Actor, Address, Send
from baton.actors.lease import Ledger
from baton.actors.messages import Message
from baton.actors.runtime.events import ActEvent, Event, message_event, request_events
from baton.actors.runtime.timings import Timings
from baton.actors.runtime.tracing import Envelope, Traces
from baton.actors.runtime.transport import Codec, arrive, depart

MESSAGES_PER_ACT = 256  # most messages that an actor receives before it acts


class Mailbox:
    """A first-in, first-out queue. Messages are removed without awaiting, so a cancelled reader loses none."""

    def __init__(self) -> None:
        self.envelopes: deque[Envelope] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, envelope: Envelope) -> None:
        self.envelopes.append(envelope)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until there is a message. For a single reader."""
        while not self.envelopes:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


class Runtime:
    """The carrier of actors on one asyncio event loop. Not thread-safe: other threads post through the loop.

    codec_check: encode and decode every message on its way.
    numbers: yields the numbers of messages, in the order of sending.
    on_event: called with an event for every message and every act.
    """

    def __init__(
        self,
        ledger: Ledger,
        codec_check: bool = False,
        clock: Callable[[], float] = time.monotonic,
        timings: Timings | None = None,
        traces: Traces | None = None,
        numbers: Iterator[int] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.ledger = ledger
        self.mailboxes: dict[Address, Mailbox] = {}
        self.delivered = 0
        self.traces = traces if traces is not None else Traces(lambda grant: "")
        self._actors: dict[Address, Actor] = {}
        self._codec = Codec(ledger) if codec_check else None
        self._clock = clock
        self._timings = timings if timings is not None else Timings()
        self._numbers = numbers if numbers is not None else count(1)
        self._on_event = on_event

    def add(self, address: Address, actor: Actor) -> None:
        """Give an actor a mailbox. It starts to run with `run`."""
        self.mailboxes[address] = Mailbox()
        self._actors[address] = actor

    def sender(self, address: Address) -> Send:
        """Return the function with which the actor at this address sends."""
        return lambda to, message: self.send(address, to, message)

    def send(self, sender: str, to: Address, message: Message) -> None:
        """Move the message's leases, and queue it. A send that raises has moved nothing."""
        mailbox = self.mailboxes[to]
        depart(message, sender, to, self.ledger)
        carried = message if self._codec is None else self._codec.round_trip(message)
        mailbox.put(Envelope(carried, sender, next(self._numbers), self.traces.of(carried), self._clock()))

    async def run(self) -> None:
        """Run the actors until cancelled, or until one raises."""
        async with anyio.create_task_group() as tasks:
            for address, actor in self._actors.items():
                tasks.start_soon(self._carry, address, actor, name=address)

    @property
    def actors(self) -> Mapping[Address, Actor]:
        return self._actors

    def deliver(self, address: Address) -> None:
        """Hand the oldest message of a mailbox to its actor."""
        envelope = self.mailboxes[address].envelopes.popleft()
        delivered = self._clock()
        self._timings.waits[address].observe(delivered - envelope.sent)
        self.traces.current = envelope.trace
        try:
            arrive(envelope.message, address, self.ledger)
            self.delivered += 1
            self._actors[address].receive(envelope.message)
        finally:
            self.traces.current = ""
            if self._on_event is not None:
                self._tell_delivery(self._on_event, envelope, address, delivered)

    def _tell_delivery(
        self, on_event: Callable[[Event], None], envelope: Envelope, address: Address, delivered: float
    ) -> None:
        handled = self._clock()
        on_event(message_event(envelope, address, delivered, handled))
        for event in request_events(envelope, address, handled):
            on_event(event)

    async def _carry(self, address: Address, actor: Actor) -> None:
        """Run one actor: hand it its messages, then let it act, then give way to the others."""
        mailbox, busy = self.mailboxes[address], self._timings.busy
        while True:
            await mailbox.wait()
            woken = self._clock()
            for _ in range(MESSAGES_PER_ACT):
                if not mailbox.envelopes:
                    break
                self.deliver(address)
            self.act(address)
            busy[address] += self._clock() - woken
            await asyncio.sleep(0)

    def act(self, address: Address) -> None:
        """Give an actor its turn after messages."""
        actor = self._actors[address]
        if self._on_event is None:
            actor.act()
            return
        began = self._clock()
        actor.act()
        self._on_event(ActEvent(address, began, self._clock()))

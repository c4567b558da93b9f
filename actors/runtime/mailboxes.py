"""The runtime: mailboxes, and the tasks that run the actors. Leases move here, and nowhere else."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

import anyio
from msgspec import Struct

from baton.actors.actor import Actor, Address, Send
from baton.actors.lease import Ledger
from baton.actors.messages import Message
from baton.actors.runtime.transport import arrive, depart

MESSAGES_PER_ACT = 256  # most messages that an actor receives before it acts


class Envelope(Struct, frozen=True, array_like=True, gc=False):
    """A message on its way. An observer may fill in the fields that have defaults."""

    message: Message
    sender: str
    sequence: int = 0  # the message's number, in the order of sending
    trace: str = ""  # a W3C trace id, or ""
    sent: float = 0.0  # when the message was sent, in seconds of the observer's clock


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


class RuntimeObserver:
    """The interface of an observer, which a runtime calls at every send, delivery and turn. This class does nothing.

    Turns never overlap: an actor has received and acted before the next actor's turn begins. The observer of the server
    is in actors/runtime/observing.py.
    """

    def envelope(self, message: Message, sender: str) -> Envelope:
        """Put a message that is being sent into its envelope."""
        return Envelope(message, sender)

    def begin_turn(self, actor: Address) -> None: ...

    def begin_delivery(self, envelope: Envelope, to: Address) -> None: ...

    def end_delivery(self, envelope: Envelope, to: Address) -> None:
        """Note that the message has been received, or that `receive` has raised."""

    def begin_act(self, actor: Address) -> None: ...

    def end_turn(self, actor: Address) -> None:
        """Note that the actor has acted. Not called if it has raised."""


def as_is(message: Message) -> Message:
    return message


class Runtime:
    """The carrier of actors on one asyncio event loop. Not thread-safe: other threads post through the loop."""

    def __init__(
        self,
        ledger: Ledger,
        carry: Callable[[Message], Message] = as_is,
        observer: RuntimeObserver | None = None,
    ) -> None:
        """Create a runtime without actors. carry: returns what to deliver for a message, such as a decoded copy."""
        self.ledger = ledger
        self.mailboxes: dict[Address, Mailbox] = {}
        self.delivered = 0
        self._actors: dict[Address, Actor] = {}
        self._carry = carry
        self._observer = observer if observer is not None else RuntimeObserver()

    @property
    def actors(self) -> Mapping[Address, Actor]:
        return self._actors

    def add(self, address: Address, actor: Actor) -> None:
        """Give an actor a mailbox. `run` starts the actors."""
        self.mailboxes[address] = Mailbox()
        self._actors[address] = actor

    def sender(self, address: Address) -> Send:
        """Return the function with which the actor at this address sends."""
        return lambda to, message: self.send(address, to, message)

    def send(self, sender: str, to: Address, message: Message) -> None:
        """Move the message's leases, and queue the message. A send that raises has moved nothing."""
        mailbox = self.mailboxes[to]
        depart(message, sender, to, self.ledger)
        mailbox.put(self._observer.envelope(self._carry(message), sender))

    async def run(self) -> None:
        """Run the actors until cancelled, or until one raises."""
        async with anyio.create_task_group() as tasks:
            for address in self._actors:
                tasks.start_soon(self._run_actor, address, name=address)

    async def _run_actor(self, address: Address) -> None:
        """Give one actor a turn whenever it has messages, then give way to the others."""
        while True:
            await self.mailboxes[address].wait()
            self.turn(address)
            await asyncio.sleep(0)

    def turn(self, address: Address) -> None:
        """Hand an actor its messages, up to MESSAGES_PER_ACT of them, then let it act."""
        self._observer.begin_turn(address)
        envelopes = self.mailboxes[address].envelopes
        for _ in range(MESSAGES_PER_ACT):
            if not envelopes:
                break
            self.deliver(address)
        self._observer.begin_act(address)
        self._actors[address].act()
        self._observer.end_turn(address)

    def deliver(self, address: Address) -> None:
        """Hand the oldest message of a mailbox to its actor."""
        envelope = self.mailboxes[address].envelopes.popleft()
        self._observer.begin_delivery(envelope, address)
        try:
            arrive(envelope.message, address, self.ledger)
            self.delivered += 1
            self._actors[address].receive(envelope.message)
        finally:
            self._observer.end_delivery(envelope, address)

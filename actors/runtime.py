"""The runtime: mailboxes, the one place where leases move, and the tasks that carry the actors."""

import asyncio
from collections import deque
from collections.abc import Mapping

import anyio

from actors.actor import Actor, Address, Send
from actors.lease import Ledger
from actors.messages import Message
from actors.transport import Codec, arrive, depart

BATCH = 256


class Mailbox:
    """First in, first out. Taking is never awaited, so a cancelled receiver loses nothing."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self._event = asyncio.Event()

    def put(self, message: Message) -> None:
        self.messages.append(message)
        self._event.set()

    async def wait(self) -> None:
        """Until there is a message."""
        while not self.messages:
            self._event.clear()
            await self._event.wait()


class Runtime:
    """Carries actors on one asyncio event loop. Not thread-safe: another thread posts through the loop."""

    def __init__(self, ledger: Ledger, codec_check: bool = False) -> None:
        self.ledger = ledger
        self.mailboxes: dict[Address, Mailbox] = {}
        self.delivered = 0
        self._actors: dict[Address, Actor] = {}
        self._codec = Codec(ledger) if codec_check else None

    def add(self, address: Address, actor: Actor) -> None:
        """Give an actor a mailbox; it runs from `run` on."""
        self.mailboxes[address] = Mailbox()
        self._actors[address] = actor

    def sender(self, address: Address) -> Send:
        """The way in which the actor at this address sends."""
        return lambda to, message: self.send(address, to, message)

    def send(self, sender: str, to: Address, message: Message) -> None:
        """Move the message's leases and queue it. A send that raises has moved nothing."""
        mailbox = self.mailboxes[to]
        depart(message, sender, to, self.ledger)
        mailbox.put(message if self._codec is None else self._codec.round_trip(message))

    async def run(self) -> None:
        """Until cancelled, or until an actor raises."""
        async with anyio.create_task_group() as tasks:
            for address, actor in self._actors.items():
                tasks.start_soon(self._carry, address, actor, name=address)

    @property
    def actors(self) -> Mapping[Address, Actor]:
        return self._actors

    def deliver(self, address: Address) -> None:
        """Hand the oldest message of a mailbox to its actor."""
        message = self.mailboxes[address].messages.popleft()
        arrive(message, address, self.ledger)
        self.delivered += 1
        self._actors[address].receive(message)

    async def _carry(self, address: Address, actor: Actor) -> None:
        mailbox = self.mailboxes[address]
        while True:
            await mailbox.wait()
            for _ in range(BATCH):
                if not mailbox.messages:
                    break
                self.deliver(address)
            actor.act()
            await asyncio.sleep(0)

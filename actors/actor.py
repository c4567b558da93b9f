"""What the runtime and the simulator ask of an actor, and what an actor is given."""

from collections.abc import Callable, Iterable
from typing import Literal, Protocol, TypeAlias

from baton.actors.lease import Lease
from baton.actors.messages import Message

Address: TypeAlias = Literal["scheduler", "cache", "forward", "results", "api"]
Send: TypeAlias = Callable[[Address, Message], None]


class Actor(Protocol):
    """A state machine: it never awaits, sleeps, reads a clock or draws a random number."""

    def receive(self, message: Message) -> None:
        """Take in one message; may send."""

    def act(self) -> None:
        """Called when the mailbox is empty, or after 256 messages: do what the new state asks for."""

    def leases(self) -> Iterable[Lease]:
        """Every lease that this actor holds, for the audit."""

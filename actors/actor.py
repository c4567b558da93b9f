"""The interface between an actor and whatever carries its messages: the runtime, or the simulator."""

from collections.abc import Callable, Iterable
from typing import Literal, Protocol, TypeAlias

from baton.actors.lease import Lease
from baton.actors.messages import Message

Address: TypeAlias = Literal["scheduler", "cache", "forward", "results", "api"]
Send: TypeAlias = Callable[[Address, Message], None]


class Actor(Protocol):
    """A state machine that receives and sends messages.

    It never awaits, sleeps, reads a clock or draws a random number, so the same messages always have the same effect,
    unless a grammar takes more processor time than it may (models/text/grammars/matching.py).
    """

    def receive(self, message: Message) -> None:
        """Handle one message, and send the messages that follow from it."""

    def act(self) -> None:
        """Decide what to send after all that was received. Called when the mailbox is empty, or after 256 messages."""

    def leases(self) -> Iterable[Lease]:
        """Yield every lease that this actor holds, for the audit."""

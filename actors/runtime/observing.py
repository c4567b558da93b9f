"""The observer of a ring: it takes times, follows traces, and records events."""

import time
from collections.abc import Callable, Iterator
from itertools import count

from baton.actors.actor import Address
from baton.actors.messages import Message
from baton.actors.runtime.events import ActEvent, Event, message_event, request_events
from baton.actors.runtime.mailboxes import Envelope, RuntimeObserver
from baton.actors.runtime.timings import Timings
from baton.actors.runtime.tracing import Traces


class MeasuringObserver(RuntimeObserver):
    """An observer that numbers messages, finds their traces, and measures how long messages wait and actors work."""

    def __init__(
        self,
        traces: Traces,
        timings: Timings,
        clock: Callable[[], float] = time.monotonic,
        numbers: Iterator[int] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Create an observer.

        clock: seconds, for envelopes, events and timings.
        numbers: yields the numbers of messages, in the order of sending; None: from 1 on.
        on_event: called with an event for every message and every act.
        """
        self._traces, self._timings, self._clock = traces, timings, clock
        self._numbers = numbers if numbers is not None else count(1)
        self._on_event = on_event
        # Start times of the current turn, delivery and act.
        self._turn = self._delivery = self._act = 0.0

    def envelope(self, message: Message, sender: str) -> Envelope:
        return Envelope(message, sender, next(self._numbers), self._traces.of(message), self._clock())

    def begin_turn(self, actor: Address) -> None:
        self._turn = self._clock()

    def begin_delivery(self, envelope: Envelope, to: Address) -> None:
        """Measure how long the message has waited. Messages sent until end_delivery inherit its trace."""
        self._delivery = self._clock()
        self._timings.waits[to].observe(self._delivery - envelope.sent)
        self._traces.current = envelope.trace

    def end_delivery(self, envelope: Envelope, to: Address) -> None:
        self._traces.current = ""
        if self._on_event is None:
            return
        handled = self._clock()
        self._on_event(message_event(envelope, to, self._delivery, handled))
        for event in request_events(envelope, to, handled):
            self._on_event(event)

    def begin_act(self, actor: Address) -> None:
        if self._on_event is not None:
            self._act = self._clock()

    def end_turn(self, actor: Address) -> None:
        if self._on_event is not None:
            self._on_event(ActEvent(actor, self._act, self._clock()))
        self._timings.busy[actor] += self._clock() - self._turn

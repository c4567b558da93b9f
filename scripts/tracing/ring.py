"""The tracks of the ring: the work of each actor and of the device, and the messages that caused the work."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton.actors.runtime.events import ActEvent, Event, MessageEvent, StepEvent, UnitEvent
from scripts.tracing.time import Clock, TraceEvent, event_at

TRACKS = ("api", "scheduler", "cache", "forward", "results", "device")
STEP_FLOWS = 1 << 40
POST_NS = 1000


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of work on a track. Times are nanoseconds since the log began."""

    began: int
    ended: int
    name: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Flow:
    """An arrow from a moment on one track to a moment on another, which are both within a slice."""

    id: int
    name: str
    source: str
    left: int
    target: str
    arrived: int


class Ring:
    def __init__(self, clock: Clock, log: Sequence[Event], pid: int) -> None:
        self._clock, self._pid = clock, pid
        self._did: defaultdict[str, list[Slice]] = defaultdict(list)
        self._steps: dict[tuple[int, int | None], Slice] = {}
        messages = list(self._read(log))
        for did in self._did.values():
            did.sort(key=lambda each: each.began)
        self._flows = [*self._message_flows(messages), *self._step_flows(messages)]
        order = [*TRACKS, *sorted({*self._did} - {*TRACKS})]
        self.tracks = {name: number for number, name in enumerate(order, 1)}

    def slices(self) -> Iterator[TraceEvent]:
        for track, did in self._did.items():
            for each in did:
                length = (each.ended - each.began) / 1000
                yield event_at(
                    each.began, "X", self._pid, self.tracks[track], each.name, "ring", dur=length, args=each.args
                )

    def flows(self) -> Iterator[TraceEvent]:
        for flow in self._flows:
            common = (flow.name, "message")
            yield event_at(flow.left, "s", self._pid, self.tracks[flow.source], *common, id=flow.id)
            yield event_at(flow.arrived, "f", self._pid, self.tracks[flow.target], *common, id=flow.id, bp="e")

    def _read(self, log: Iterable[Event]) -> Iterator[tuple[int, MessageEvent]]:
        """Record the slices, and yield the messages with the number of the unit that sent them."""
        at, unit = self._clock, 0
        for event in log:
            match event:
                case UnitEvent():
                    unit += 1
                case MessageEvent():
                    handled = Slice(at(event.delivered), at(event.handled), event.name, self._describe(event))
                    self._did[event.to].append(handled)
                    yield unit, event
                case ActEvent():
                    self._did[event.actor].append(Slice(at(event.began), at(event.ended), "act", {}))
                case StepEvent():
                    args = {"rows": event.rows, "tokens": event.tokens}
                    step = Slice(at(event.began), at(event.ended), f"step {event.step}", args)
                    self._steps[unit, event.step] = step
                    self._did["device"].append(step)
                case _:
                    pass

    def _describe(self, event: MessageEvent) -> dict[str, Any]:
        waited = (self._clock(event.delivered) - self._clock(event.sent)) / 1000
        named = {"trace": event.trace, "grants": event.grants, "requests": event.requests, "step": event.step}
        known = {name: value for name, value in named.items() if value not in ("", (), None)}
        return {"sequence": event.sequence, "from": event.sender, "waited_us": waited, **known}

    def _message_flows(self, messages: Sequence[tuple[int, MessageEvent]]) -> Iterator[Flow]:
        """Yield the flow of each message. A flow must begin within a slice.

        A message that was sent outside of any slice therefore gets a short slice of its own. A message of the device
        leaves before the end of its step's slice.
        """
        outside: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for unit, message in messages:
            left = self._clock(message.sent)
            step = self._steps.get((unit, message.step)) if message.sender == "device" else None
            if step is not None:
                left = max(step.began, min(left, step.ended - 1))
            elif not self._works(message.sender, left):
                outside[message.sender].append((left, message.name))
            arrived = self._clock(message.delivered)
            yield Flow(message.sequence, message.name, message.sender, left, message.to, arrived)
        for sender, posts in outside.items():
            self._did[sender] = sorted([*self._did[sender], *self._posts(sender, posts)], key=lambda each: each.began)

    def _works(self, track: str, moment: int) -> bool:
        did = self._did[track]
        index = bisect_right(did, moment, key=lambda each: each.began) - 1
        return index >= 0 and moment <= did[index].ended

    def _posts(self, sender: str, posts: Sequence[tuple[int, str]]) -> Iterator[Slice]:
        """Yield a short slice for each of `posts`, the messages that `sender` sent outside of any slice.

        A slice ends before the next slice on the track begins, because slices of a track must not overlap.
        """
        began = sorted([each.began for each in self._did[sender]] + [left for left, _ in posts])
        for left, name in posts:
            following = bisect_right(began, left)
            end = min([left + POST_NS, *began[following : following + 1]])
            yield Slice(left, end, f"send {name}", {})

    def _step_flows(self, messages: Sequence[tuple[int, MessageEvent]]) -> Iterator[Flow]:
        """Yield the flow of each step from forward to the device, which may start before forward has finished."""
        for unit, message in messages:
            step = self._steps.get((unit, message.step))
            if message.name == "Step" and step is not None:
                left = max(self._clock(message.delivered), min(step.began, self._clock(message.handled) - 1))
                yield Flow(STEP_FLOWS + message.sequence, "Work", message.to, left, "device", step.began)

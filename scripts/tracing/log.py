"""A server's trace file, and the ledger of slots that the moves in the file describe."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from baton.actors.runtime.events import DroppedEvent, Event, HeaderEvent, MoveEvent, UnitEvent


class Holding(Struct, frozen=True):
    """A line of the ledger as GET /debug/slots shows it, with only the fields that moves of the slot determine."""

    slot: int
    place: str
    holder: str
    generation: int


def read_log(path: Path) -> list[Event]:
    """Return all events of a trace file. Raises ValueError if the file is not a trace file."""
    log = [event for _, event in numbered_events(path)]
    if not log:
        raise ValueError(f"{path} is not a trace file")
    return log


def numbered_events(path: Path) -> Iterator[tuple[int, Event]]:
    """Yield each event with the number of its line, from 1. Raises ValueError if the file is not a trace file.

    A last line that is cut off is skipped: the server was killed while writing it.
    """
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                event = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            if number == 1 and not isinstance(event, HeaderEvent):
                raise ValueError(f"{path} is not a trace file")
            yield number, event


def dropped(log: Sequence[Event]) -> int:
    return sum(event.count for event in log if isinstance(event, DroppedEvent))


def rebuild_ledger(log: Sequence[Event]) -> list[Holding]:
    """Return the ledger at the end of the log, one entry for each slot."""
    holdings: list[Holding] = []
    for event in log:
        match event:
            case UnitEvent():
                holdings = [Holding(slot, "free", "pool", 0) for slot in range(event.slots)]
            case MoveEvent():
                holdings[event.slot] = Holding(event.slot, event.place, event.holder, event.generation)
            case _:
                pass
    return holdings

"""The events of a ring as lines for people: each message as it is delivered, and the slots that it moves."""

from collections.abc import Iterable, Iterator

from baton.actors.runtime.events import ActEvent, Event, MessageEvent, MoveEvent, UnitEvent

INDENT = " " * 8


def transcript(events: Iterable[Event]) -> Iterator[str]:
    """Yield a line for each delivered message and for each actor's turn that moved a slot.

    Each such line is followed by an indented line for each move of a slot that it caused: first the moves of its
    arrival, then the moves in messages that the receiver sent.
    """
    moves = list[MoveEvent]()
    for event in events:
        match event:
            case UnitEvent(slots=slots):
                yield f"the actors start; {slots} slots are free"
                moves.clear()
            case MoveEvent():
                moves.append(event)
            case MessageEvent():
                yield describe_message(event)
                yield from (INDENT + describe_move(move) for move in moves)
                moves.clear()
            case ActEvent() if moves:
                yield f"{'':>5}  {event.actor} acts"
                yield from (INDENT + describe_move(move) for move in moves)
                moves.clear()
            case _:
                pass


def describe_message(event: MessageEvent) -> str:
    """Return number, sender, receiver and name of a message, and the requests, grants and step that it names."""
    route = f"{event.sender} → {event.to}"
    parts = [*(f"request {id}" for id in event.requests), *(f"grant {grant}" for grant in event.grants)]
    if event.step is not None:
        parts.append(f"step {event.step}")
    return f"{event.sequence:>5}  {route:<22} {event.name:<12} {', '.join(parts)}".rstrip()


def describe_move(move: MoveEvent) -> str:
    match move.place:
        case "free":
            return f"slot {move.slot} is free"
        case "owned":
            return f"slot {move.slot} is held by {move.holder}"
        case "transit":
            return f"slot {move.slot} travels {move.holder} in {move.how}"
        case "cached":
            return f"slot {move.slot} is cached in {move.holder} of the tree"
        case _:
            return f"slot {move.slot} is {move.place}: {move.how}"

"""Helpers for the tests of this folder: parse outputs in pieces, and join their events."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from baton.models.text.formats.content import ToolFormat
from baton.models.text.formats.events import CallArguments, CallBegun, CallEnded, Content, OutputEvent, Reasoning
from baton.models.text.formats.parser import OutputParser
from baton.models.text.formats.thinking import ReasoningFormat
from baton.models.text.formats.values import Tools


def parse(
    pieces: Iterable[str],
    tool_format: ToolFormat | None = None,
    tools: Tools | None = None,
    reasoning: ReasoningFormat | None = None,
    begun: bool = False,
) -> list[OutputEvent]:
    """Return the joined events of an output that arrives in these pieces."""
    parser = OutputParser(reasoning, begun, tool_format, tools)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def joined(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Join adjacent events of the same kind."""
    found: list[OutputEvent] = []
    for event in events:
        match (found[-1] if found else None), event:
            case Content(before), Content(text):
                found[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                found[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(event)
    return found


def called(index: int, name: str, arguments: str, whole: bool = True) -> list[OutputEvent]:
    """Return the events of one call."""
    shown = [CallArguments(index, arguments)] if arguments else []
    return [CallBegun(index, name), *shown, CallEnded(index, whole)]


def splits(text: str) -> Iterable[list[str]]:
    """Yield splits of a text: into single characters, and into two pieces at every position."""
    yield list(text)
    yield from ([text[:cut], text[cut:]] for cut in range(len(text) + 1))


def check_every_split(text: str, expected: Sequence[OutputEvent], **options: Any) -> None:
    for pieces in splits(text):
        assert parse(pieces, **options) == expected, pieces


def content_of(events: Iterable[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def calls_of(events: Iterable[OutputEvent]) -> list[tuple[str, str, bool]]:
    """Return each call's name, its arguments, and whether it is whole; check the order of its events."""
    calls: list[tuple[str, str, bool]] = []
    current: tuple[str, str] | None = None
    for event in events:
        match event, current:
            case CallBegun(index, name), None:
                assert index == len(calls) and name
                current = (name, "")
            case CallArguments(index, text), (name, arguments):
                assert index == len(calls) and text
                current = (name, arguments + text)
            case CallEnded(index, whole), (name, arguments):
                assert index == len(calls)
                calls.append((name, arguments, whole))
                current = None
            case ((Content(text) | Reasoning(text)), None):
                assert text
            case _:
                raise AssertionError(f"{event} while {current} is open")
    assert current is None
    return calls


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False

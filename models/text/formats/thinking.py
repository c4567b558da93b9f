"""What a model thinks, apart from what it answers."""

from dataclasses import dataclass

from baton.models.text.formats.events import Events
from baton.models.text.formats.pieces import Broken, Pieces, Reading, Trailing, beginning


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning, which stands at the beginning of an output, if anywhere."""

    name: str
    begin: str
    end: str

    def begun_by(self, prompt: str) -> bool:
        """Whether the prompt's end has the first marker already, as some templates write it."""
        return prompt.rstrip().endswith(self.begin)

    def open_in(self, answer: str) -> bool:
        """Whether an answer that is to be continued is still reasoning."""
        return answer.lstrip().startswith(self.begin) and self.end not in answer


THINK = ReasoningFormat("think", "<think>", "</think>")


def read_reasoning(
    pieces: Pieces, events: Events, format: ReasoningFormat, begun: bool, call: tuple[str, ...]
) -> Reading[None]:
    """Reasoning, if there is some, up to where the answer begins; all of the output if it does not end.

    begun: by the prompt, so that only the second marker is to come; the first one is ignored then. Without it there is
    reasoning only where the first marker stands at the beginning, but for white space.
    call: what shows, white space between, that a call of a tool begins, which ends reasoning too; () is nothing.
    Line breaks at the markers are dropped: they are the template's.
    """
    if not (yield from _begins(pieces, format)) and not begun:
        return
    yield from pieces.line_breaks()
    marker = beginning(format.end, *call[:1])
    text = Trailing(events.reasoning, "\n")
    while (yield from pieces.more()):
        text.add(pieces.before(marker))
        if pieces.at == len(pieces.text):
            continue
        if (yield from _ends(pieces, format, call)):
            return
        text.add(pieces.take(1))
    text.release()


def _begins(pieces: Pieces, format: ReasoningFormat) -> Reading[bool]:
    """Whether the first marker is there; it is read then, else nothing is."""
    pieces.mark()
    try:
        yield from pieces.space()
        yield from pieces.one_of(format.begin)
    except Broken:
        pieces.rewind()
        return False
    pieces.unmark()
    return True


def _ends(pieces: Pieces, format: ReasoningFormat, call: tuple[str, ...]) -> Reading[bool]:
    """Whether reasoning ends here; the marker is read then, else nothing is."""
    pieces.mark()
    try:
        if (yield from pieces.one_of(format.end, *call[:1])) == format.end:
            pieces.unmark()
            yield from pieces.line_breaks()
            return True
        for part in call[1:]:
            yield from pieces.space()
            yield from pieces.one_of(part)
    except Broken:
        pieces.rewind()
        return False
    pieces.rewind()
    return True

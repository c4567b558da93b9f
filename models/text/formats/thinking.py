"""Reader of the reasoning in a model's output, which comes before the answer."""

from dataclasses import dataclass

from baton.models.text.formats.events import Events
from baton.models.text.formats.pieces import Broken, Pieces, Reading, Trailing, beginning


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning, which can only be at the beginning of an output."""

    name: str
    begin: str
    end: str

    def begun_by(self, prompt: str) -> bool:
        """Return whether the prompt ends with the begin marker, which some templates write."""
        return prompt.rstrip().endswith(self.begin)

    def open_in(self, answer: str) -> bool:
        """Return whether an answer that is to be continued stops inside its reasoning."""
        return answer.lstrip().startswith(self.begin) and self.end not in answer


THINK = ReasoningFormat("think", "<think>", "</think>")


def read_reasoning(
    pieces: Pieces, events: Events, format: ReasoningFormat, begun: bool, call: tuple[str, ...]
) -> Reading[None]:
    """Read reasoning, if there is any, up to the beginning of the answer; the whole output if the reasoning never ends.

    begun: whether the prompt has already opened the reasoning; then a begin marker in the output is ignored. Otherwise
    there is reasoning only if the output starts with the begin marker, white space aside.
    call: ToolFormat.ends_reasoning: texts that show that a tool call begins, which ends reasoning too; () for none.

    Line breaks next to the markers are dropped, because they belong to the template.
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
    """Read the begin marker if it comes next, and return whether it does; otherwise read nothing."""
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
    """Return whether reasoning ends here. Read the end marker if it comes next, and nothing otherwise.

    The beginning of a call ends reasoning too, but stays unread for `read_content`.
    """
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

"""What a state is to those who may go on from it."""

from enum import IntEnum


class Kind(IntEnum):
    """Of states that are to be checkpoints of one prompt, those of the kind that stands first here go first.

    HUB: many ways go on from it. BRANCH: some do. ASKED: a client has asked for it. NAMED: a session goes on from it.
    FRONTIER: the deepest of a conversation that has gone on before. NEW: of one that is only begun.
    LEFT: either of them, where another way was taken since.
    PROMPT_END: one token before a prompt's end, for the same prompt again. LAST_END: a message's end above a frontier,
    for whoever asks again or edits, and for templates that drop reasoning. CHECKPOINT: taken on the way through a
    prompt, and never gone on from. INTERIOR: its conversation has gone past it.
    """

    HUB = 0
    BRANCH = 1
    ASKED = 2
    NAMED = 3
    FRONTIER = 4
    NEW = 5
    PROMPT_END = 6
    LAST_END = 7
    LEFT = 8
    CHECKPOINT = 9
    INTERIOR = 10

    @property
    def label(self) -> str:
        """As people read it."""
        return self.name.lower()

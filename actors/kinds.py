"""What a state is to those who may go on from it."""

from enum import IntEnum


class Kind(IntEnum):
    """Of states that are to be checkpoints of one prompt, those of the kind that stands first here go first.

    ASKED: a client has asked for it. HUB: many ways go on from it. BRANCH: some do. NAMED: a session goes on from it.
    SOON: a client has said that it will go on from it soon. FRONTIER: the deepest of a conversation that has gone on
    before. NEW: of one that is only begun. LEFT: one of these three, where another way was taken since.
    PROMPT_END: one token before a prompt's end, for the same prompt again. LAST_END: a message's end above a frontier,
    for whoever asks again or edits, and for templates that drop reasoning. CHECKPOINT: taken on the way through a
    prompt, and never gone on from. INTERIOR: its conversation has gone past it.
    """

    ASKED = 0
    HUB = 1
    BRANCH = 2
    NAMED = 3
    SOON = 4
    FRONTIER = 5
    NEW = 6
    PROMPT_END = 7
    LAST_END = 8
    LEFT = 9
    CHECKPOINT = 10
    INTERIOR = 11

    @property
    def label(self) -> str:
        """As people read it."""
        return self.name.lower()

"""Kinds of cached states: how likely a request is to resume from a state follows from its kind."""

from enum import IntEnum


class Kind(IntEnum):
    """The role of a cached state for later requests.

    The order matters for checkpoints of one prompt: when there are fewer slots than positions, kinds with smaller
    numbers get slots first.
    """

    ASKED = 0  # a client asked for a checkpoint here
    HUB = 1  # many requests have resumed from this state
    BRANCH = 2  # the token sequences of several requests diverge after this state
    NAMED = 3  # a session has put its name on this state
    SOON = 4  # the end of a request whose client said that it will continue soon
    FRONTIER = 5  # the end of the newest turn of a conversation that had earlier turns
    NEW = 6  # the end of a conversation's first turn
    PROMPT_END = 7  # one token before a prompt's end, for the same prompt sent again
    LAST_END = 8  # the end of the message before a FRONTIER: for edits, retries, and templates that drop reasoning
    LEFT = 9  # was SOON, FRONTIER or NEW, until the conversation continued on another branch
    CHECKPOINT = 10  # saved inside a prompt or an output, and never resumed from
    INTERIOR = 11  # the end of an older turn, which the conversation has moved past

    @property
    def label(self) -> str:
        """The name for metrics and debugging output."""
        return self.name.lower()

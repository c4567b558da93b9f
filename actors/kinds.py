"""Kinds of cached states: how likely a request is to resume from a state follows from its kind."""

from enum import IntEnum


class Kind(IntEnum):
    """The role of a cached state for later requests.

    The order matters for checkpoints of one prompt: when there are fewer slots than positions, kinds with smaller
    numbers get theirs first.
    """

    ASKED = 0  # a client asked for a checkpoint here
    HUB = 1  # many requests have resumed from it
    BRANCH = 2  # several requests part here
    NAMED = 3  # a session has its name on it
    SOON = 4  # the end of a request whose client said that it will continue soon
    FRONTIER = 5  # the newest end of a conversation that has continued before
    NEW = 6  # the end of a conversation's first turn
    PROMPT_END = 7  # one token before a prompt's end, for the same prompt sent again
    LAST_END = 8  # the end of the message before a frontier: for edits, retries, and templates that drop reasoning
    LEFT = 9  # was SOON, FRONTIER or NEW, until the conversation took another way
    CHECKPOINT = 10  # taken on the way through a prompt, and never resumed from
    INTERIOR = 11  # an older end, which its conversation has moved past

    @property
    def label(self) -> str:
        """The name for metrics and debugging output."""
        return self.name.lower()

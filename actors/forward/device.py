"""The interface to the device: the calls that forward makes, in stream order, and the contents of a step."""

from concurrent.futures import Future
from typing import Protocol

from msgspec import Struct

from baton.actors.requests import Request


class WorkChunk(Struct, frozen=True, array_like=True):
    """Prompt tokens that a row feeds in a step."""

    row: int
    start: int  # the chunk is the tokens [start, stop) of the request
    stop: int
    samples: bool  # whether a token is drawn after the last token of the chunk


class WorkCheckpoint(Struct, frozen=True, array_like=True):
    """A checkpoint to take in a step: the state of a row after exactly `position` tokens, copied into `slot`."""

    row: int
    position: int
    slot: int


class WorkMask(Struct, frozen=True, array_like=True):
    """The tokens that a row may draw in this step."""

    row: int
    words: bytes  # one bit for each token, as in RowMask
    ahead: list[bytes] = []  # as `words`, after each of the row's drafts


class WorkDraft(Struct, frozen=True, array_like=True):
    """The drafts of a row that decodes: those accepted in its last step with drafts, and new ones."""

    row: int
    replays: int  # accepted drafts to put into the state first; their inputs are in the row's ring
    tokens: tuple[int, ...]  # new drafts, which the row feeds after its last token


class WorkCommit(Struct, frozen=True, array_like=True):
    """Accepted drafts to put into the state of a row that feeds nothing."""

    row: int
    replays: int
    position: int  # the state's position after these drafts


class WorkPrediction(Struct, frozen=True, array_like=True):
    """How many tokens the model's own head predicts after a step for a row that draws in it."""

    row: int
    tokens: int  # at most this many; fewer if the row's pages have no space for them


class Work(Struct, frozen=True, array_like=True):
    """The contents of one step. Rows are named by their index on the device.

    A row with drafts draws a token after its last token and after each draft. The draw after a draft is valid if the
    draft equals the draw before it, and that one is valid. The row's last valid draw is the token that it feeds next.
    """

    step: int
    chunks: list[WorkChunk]
    decodes: list[int]  # rows that feed the token that they drew last
    positions: list[int]  # the position of the token that each row in `decodes` drew last
    checkpoints: list[WorkCheckpoint]
    masks: list[WorkMask] = []
    drafts: list[WorkDraft] = []  # only rows in `decodes`
    commits: list[WorkCommit] = []  # only rows that are in neither `chunks` nor `decodes`
    predictions: list[WorkPrediction] = []
    late: Future[list[WorkMask]] | None = None  # masks that may come while the step computes; wait before the draw


class DeviceCalls(Protocol):
    """The calls of a device. Each is enqueued and returns at once; the order of calls is the order of execution."""

    @property
    def copies_aside(self) -> bool:
        """Whether copies to and from host memory have a stream of their own.

        If so, a copy starts after all calls before it, and later calls do not wait for the copy. Do not reuse the
        slot, pages or host buffer before `Transferred` arrives.
        """
        ...

    def clear(self, slot: int) -> None:
        """Zero a state slot."""

    def poison(self, slot: int) -> None:
        """Overwrite a freed state slot with values that spoil any result, so that a read of it is noticed."""

    def copy(self, source: int, target: int) -> None:
        """Copy a state slot."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a KV page, in all layers."""

    def drop(self, key: int) -> None:
        """Delete a copy from host memory."""

    def drop_all(self) -> None:
        """Delete every copy from host memory."""

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        """Set up a row: its tokens, sampling parameters, state slot and pages."""

    def extend_row(self, row: int, pages: list[int]) -> None:
        """Append pages to a row's table."""


class DeviceQueue(DeviceCalls, Protocol):
    """The device as forward sees it. Results of steps and copies are delivered to forward's mailbox."""

    def run(self, work: Work) -> None:
        """Run a step. Ran is delivered when the step is over."""

    def export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        """Copy a state slot, and the KV of the first `position` tokens in `pages`, to host memory under `key`.

        Transferred is delivered when the copy is complete.
        """

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> None:
        """Fill a state slot from the copy `key` in host memory, and `pages` with the copy's KV from page first_page on.

        Transferred is delivered when the copy is complete.
        """

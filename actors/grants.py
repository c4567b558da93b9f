"""Parts of messages that concern a single grant and hold no lease."""

from msgspec import Struct


class PageCopy(Struct, frozen=True, array_like=True):
    """A KV page to copy: `source` is shared, and `target` is the grant's own."""

    source: int
    target: int


class Fill(Struct, frozen=True, array_like=True):
    """A copy in host memory to resume from: its state goes to the grant's slot, its KV to some of the grant's pages."""

    key: int  # names the copy
    first_page: int  # the copy's KV is written to the grant's pages[first_page:end_page]; earlier pages are shared
    end_page: int


class Chunk(Struct, frozen=True, array_like=True):
    """A grant and how many prompt tokens it feeds in a step."""

    grant: int
    tokens: int


class GrantPages(Struct, frozen=True, array_like=True):
    """A grant and the pages that are appended to its page table."""

    grant: int
    pages: list[int]


class RowMask(Struct, frozen=True, array_like=True):
    """The tokens that a row's grammar allows at one position."""

    grant: int
    position: int  # index in the row's history of the token to draw; the mask is valid only for this token
    words: bytes  # int32 [ceil(vocabulary / 32)]: bit i % 32 of word i // 32 says whether token i is allowed


class Failure(Struct, frozen=True, array_like=True):
    """A row whose state became unusable in a step: the step raised, or computed NaN or infinity for the row."""

    grant: int
    position: int  # the position that the step would have brought the row to

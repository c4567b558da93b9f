"""What messages say of single grants: parts that several messages carry, and that hold no lease."""

from msgspec import Struct


class PageCopy(Struct, frozen=True, array_like=True):
    source: int
    target: int


class Fill(Struct, frozen=True, array_like=True):
    """A stored state to go on from: it fills the grant's slot, and its KV its pages[first_page:end_page]."""

    key: int
    first_page: int
    end_page: int


class Chunk(Struct, frozen=True, array_like=True):
    grant: int
    tokens: int


class GrantPages(Struct, frozen=True, array_like=True):
    grant: int
    pages: list[int]


class RowMask(Struct, frozen=True, array_like=True):
    """Which tokens the grammar of a row allows at `position` of its history, and at no other.

    words: int32, of which bit i % 32 of word i // 32 says whether token i is allowed; ceil(V / 32) of them.
    """

    grant: int
    position: int
    words: bytes


class Failure(Struct, frozen=True, array_like=True):
    """A row of a step that raised, and the position that the step would have brought it to."""

    grant: int
    position: int

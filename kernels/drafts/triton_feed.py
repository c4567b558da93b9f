"""The numbers of tokens of decoding rows that feed drafts, which kernels read on the device."""

from triton import language as tl

from baton.kernels.runtime.triton.jit import jit


@jit
def tokens_of(begins_ptr, offsets_ptr, row):
    """Return where a row's tokens are, and how many it has: (begin, first, replays, stored, count).

    begin: the index of the row's token 0 among all computed tokens.
    first: the index that its token 0 would have among the fed tokens, so that fed token t has the index first + t.
    replays: how many tokens it replays; these come first. stored: how many the stored state consumes. count: all.
    """
    begin, offset = tl.load(begins_ptr + row), tl.load(offsets_ptr + row)
    count = (tl.load(begins_ptr + row + 1) - begin).to(tl.int32)
    fed = (tl.load(offsets_ptr + row + 1) - offset).to(tl.int32)
    replays = count - fed
    return begin, offset - replays, replays, replays + tl.minimum(fed, 1), count


@jit
def clear(y_ptr, begin, end, inside, ROW: tl.constexpr):
    """Set the results of the tokens [begin, end) to 0; y_ptr: pointers to columns of token 0."""
    for token in range(begin, end):
        tl.store(y_ptr + token * ROW, 0.0, inside)

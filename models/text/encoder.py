"""Cached encoding of text by pieces: when a chat returns with one more message, only that message is encoded."""

import hashlib
import re
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

MAX_BYTES = 16 * 2**20  # most memory for cached pieces
ENTRY_BYTES = 250  # memory of a cached piece in addition to its tokens


@dataclass(frozen=True)
class Encoded:
    """A text and its tokens."""

    text: str
    ids: list[int]
    chars: list[int]  # index in `text` at which each piece begins
    tokens: list[int]  # index in `ids` at which each piece begins


class PieceEncoder:
    """An encoder of texts with a cache of pieces. It omits tokens that a tokenizer may add around a text, such as BOS.

    A text is cut into pieces before added tokens. The tokenizer finds added tokens before anything else, and encodes
    the text on both sides of each separately. So the tokens of the pieces, joined, are the tokens of the whole text.
    Cuts are made only at those of `marks` for which the search is certain to work, see `places_to_cut`.
    Each salt has its own cache entries, so that response times reveal nothing about texts under another salt. Safe to
    use from several threads.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._cuts = re.compile("|".join(map(re.escape, sorted(places_to_cut(tokenizer) & set(marks)))) or r"(?!)")
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, salt: str = "") -> Encoded:
        """Return the tokens of the text, which must be valid Unicode (no lone surrogates)."""
        pieces = list(self._pieces(text))
        keys = [hashlib.blake2b(piece.encode(), key=digest_of(salt)).digest() for piece in pieces]
        known = {key: ids for key in keys if (ids := self._recall(key)) is not None}
        new = {key: piece for key, piece in zip(keys, pieces, strict=True) if key not in known}
        made = self._tokenizer.encode_batch_fast(list(new.values()), add_special_tokens=False)
        for key, encoding in zip(new, made, strict=True):
            known[key] = array("I", encoding.ids)
            self._remember(key, known[key])
        encoded, length = Encoded(text, [], [], []), 0
        for key, piece in zip(keys, pieces, strict=True):
            encoded.chars.append(length)
            encoded.tokens.append(len(encoded.ids))
            encoded.ids.extend(known[key])
            length += len(piece)
        return encoded

    def following(self, encoded: Encoded, length: int) -> int:
        """Return how many tokens come before the first token with a character of text[length:]."""
        index = bisect_right(encoded.chars, length) - 1
        start, before = encoded.chars[index], encoded.tokens[index]
        if start == length:
            return before
        end = encoded.chars[index + 1] if index + 1 < len(encoded.chars) else len(encoded.text)
        [piece] = self._tokenizer.encode_batch([encoded.text[start:end]], add_special_tokens=False)
        places = map(piece.char_to_token, range(length - start, end - start))
        return before + next((place for place in places if place is not None), len(piece.ids))

    def _pieces(self, text: str) -> Iterator[str]:
        start = 0
        for found in self._cuts.finditer(text):
            if found.start() > start:
                yield text[start : found.start()]
                start = found.start()
        yield text[start:]

    def _recall(self, key: bytes) -> "array[int] | None":
        with self._lock:
            if (ids := self._known.get(key)) is not None:
                self._known.move_to_end(key)
            return ids

    def _remember(self, key: bytes, ids: "array[int]") -> None:
        with self._lock:
            if key not in self._known:
                self._known[key] = ids
                self._bytes += size_of(ids)
            while self._bytes > MAX_BYTES:
                _, oldest = self._known.popitem(last=False)
                self._bytes -= size_of(oldest)


def digest_of(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode()).digest()


def size_of(ids: "array[int]") -> int:
    return ENTRY_BYTES + ids.itemsize * len(ids)


def places_to_cut(tokenizer: Tokenizer) -> set[str]:
    """Return the added tokens that the tokenizer is certain to find wherever they occur in a text.

    Before anything else, the tokenizer searches for the added tokens that are not normalized: from left to right, and
    for the longest one at each place. So a token is found everywhere unless another token can begin further left
    and overlap it, or is longer and begins with it.
    """
    first = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    if any(token.lstrip or token.rstrip or token.single_word or not token.content for token in first):
        return set()
    texts = {token.content for token in first}
    return {
        text
        for text in texts
        if not any(text[0] in other[1:] or (other != text and other.startswith(text)) for other in texts)
    }

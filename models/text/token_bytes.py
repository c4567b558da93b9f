"""The bytes that single tokens stand for, which their decoded texts may lack: a token can be a part of a character."""

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from baton.models.text.tiktoken import byte_letters

ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's token of a byte
SPACE = "\u2581"  # SentencePiece's letter for a space


class TokenBytes:
    """The bytes of each token of a tokenizer of byte sequences (GPT-2's kind) or of SentencePiece's kind."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
        self._bytes_of = reader_for(tokenizer)

    def of(self, id: int) -> bytes | None:
        """Return a token's bytes; None for an id that is no token, and for other kinds of tokenizers."""
        if (added := self._added.get(id)) is not None:
            return added.encode()
        piece = self._tokenizer.id_to_token(id)
        return None if piece is None or self._bytes_of is None else self._bytes_of(piece)


def reader_for(tokenizer: Tokenizer) -> Callable[[str], bytes | None] | None:
    """Return the function from a token of the vocabulary to its bytes, chosen by the tokenizer's decoder."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    kinds = {part["type"] for part in parts_of(decoder)}
    if "ByteLevel" in kinds:
        letters = {letter: byte for byte, letter in byte_letters()}
        return lambda piece: bytes(letters[letter] for letter in piece) if letters.keys() >= set(piece) else None
    return of_sentence_piece if "ByteFallback" in kinds else None


def parts_of(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the decoders of a sequence, or the only decoder."""
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder] if decoder else []


def of_sentence_piece(piece: str) -> bytes:
    byte = ONE_BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()

"""Kimi's tokenizers. Checkpoints store them as tiktoken's ranks of byte sequences, with Python code for the rest.

That code is not run: this module splits text into words and adds tokens in the same way.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from baton.models.config import read_whole

Piece = TypeVar("Piece", bytes, str)
NAME = "tiktoken.model"
# This many ids after the ranks are special tokens, whether they have a name or not.
RESERVED = 256
# How text is split: Han characters are separate from other words. A word may have one punctuation mark before it and an
# English ending such as 's, and changes from capitals to small letters once. Digits are grouped by three. Other
# characters take a space before them and line breaks after them.
HAN = r"[\p{Han}]+"
CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
BEFORE, ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = (f"{BEFORE}{CAPITALS}*{SMALL}+{ENDING}", f"{BEFORE}{CAPITALS}+{SMALL}*{ENDING}")
OTHERS = (r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
KIMI = "|".join((HAN, *WORDS, *OTHERS))


def is_kimi(settings: Mapping[str, Any]) -> bool:
    """Return whether tokenizer_config.json (`settings`) names Kimi's tokenizer."""
    return "tokenization_kimi" in str(settings.get("auto_map"))


def read_tiktoken(file: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Return Kimi's tokenizer. Raises ValueError, with the file's name, if the file is broken."""
    ranks = read_ranks(file)
    names = dict(byte_letters())
    vocabulary = {as_letters(piece, names): rank for piece, rank in ranks.items()}
    merges = [(as_letters(left, names), as_letters(right, names)) for left, right in merges_of(ranks)]
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(KIMI), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_tokens(list(added_tokens(len(ranks), settings)))
    return made


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the rank of each byte sequence. Raises ValueError if a single byte or a rank from 0 on is missing."""
    try:
        lines = [line.split() for line in read_whole(file).splitlines() if line]
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{file}: not tiktoken's ranks: {error}") from error
    if sorted(ranks.values()) != list(range(len(lines))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"{file}: not tiktoken's ranks: a rank or a byte is missing")
    return ranks


def merges_of(ranks: Mapping[Piece, float]) -> Iterator[tuple[Piece, Piece]]:
    """Yield the pairs of pieces that are joined into one, in the order in which tiktoken joins them."""
    for piece in sorted(ranks, key=ranks.__getitem__):
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def added_tokens(first: int, settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the added tokens from id `first` on: those of tokenizer_config.json, and placeholders for reserved ids."""
    named = {int(id): token for id, token in (settings.get("added_tokens_decoder") or {}).items()}
    for id in range(first, first + RESERVED):
        token = named.get(id, {"content": f"<|reserved_token_{id}|>", "special": True})
        yield AddedToken(token["content"], special=bool(token.get("special", True)), normalized=False)


def as_letters(piece: bytes, names: Mapping[int, str]) -> str:
    """Write a byte sequence with one printable character per byte, see `byte_letters`."""
    return "".join(names[byte] for byte in piece)


def byte_letters() -> Iterator[tuple[int, str]]:
    """Yield GPT-2's printable character for each byte: the same character if printable, else a free one from U+0100."""
    spare = iter(range(256, 512))
    for byte in range(256):
        printable = byte in range(33, 127) or byte in range(161, 173) or byte in range(174, 256)
        yield byte, chr(byte if printable else next(spare))

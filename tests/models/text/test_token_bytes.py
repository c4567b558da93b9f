"""The bytes of single tokens, for tokenizers of bytes and of SentencePiece's kind."""

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.models.text.token_bytes import TokenBytes

TEXT = "a wörld \U0001f600\n"


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens([AddedToken("<|ünd|>", special=True)])
    return made


def sentence_piece() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581a", "\u2581"]
    made = Tokenizer(
        models.BPE({piece: id for id, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_the_bytes_of_a_texts_tokens_are_the_texts_bytes(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    ids, of = tokenizer.encode(TEXT).ids, TokenBytes(tokenizer).of
    assert len(ids) == len(TEXT.encode()), "each byte is a token"
    assert b"".join(of(id) or b"" for id in ids) == TEXT.encode()


def test_added_tokens_and_pieces_with_a_space() -> None:
    tokenizer = byte_level()
    assert TokenBytes(tokenizer).of(tokenizer.token_to_id("<|ünd|>")) == "<|ünd|>".encode()
    tokenizer = sentence_piece()
    assert TokenBytes(tokenizer).of(tokenizer.token_to_id("\u2581a")) == b" a", "decoded alone it would have no space"


def test_ids_that_are_no_tokens_and_other_kinds_have_no_bytes() -> None:
    assert TokenBytes(byte_level()).of(5000) is None
    assert TokenBytes(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))).of(0) is None

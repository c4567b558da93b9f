"""Encoding by pieces gives the tokens of the whole text, with every kind of tokenizer."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from baton.models.text import encoder
from baton.models.text.encoder import PieceEncoder, places_to_cut

MARKS = ["<|im_start|>", "<|im_end|>", "<s>", "[X]"]
WORDS = ["a", "ab", "b", "c", "ba", "é", "▁", "▁a", "▁b", "##a", "##b", "e"]
PARTS = [*MARKS, "<|im_start", "|>", "<s><s>", "[", "X]", "a", "ab", "ba", "c", " ", "  ", "\n", "é", "É", "e\u0301"]
texts = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


def byte_level(prefix_space: bool = False) -> Tokenizer:
    alphabet = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merged = {letters: len(alphabet) + id for id, letters in enumerate(("ab", "Ġa", "ĊĊ"))}
    made = Tokenizer(models.BPE(alphabet | merged, [("a", "b"), ("Ġ", "a"), ("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    return made


def composed() -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


def metaspace(scheme: str) -> Tokenizer:
    vocabulary = {word: id for id, word in enumerate([*WORDS, "<unk>"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return made


def prepended() -> Tokenizer:
    made = metaspace("never")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def pieces_of_words() -> Tokenizer:
    vocabulary = {word: id for id, word in enumerate([*WORDS, "[UNK]"])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


KINDS = {
    "bytes": byte_level,
    "bytes after a space": lambda: byte_level(prefix_space=True),
    "composed": composed,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "prepended": prepended,
    "pieces of words": pieces_of_words,
}
TOKENIZERS = {}
for kind, make in KINDS.items():
    TOKENIZERS[kind] = make()
    TOKENIZERS[kind].add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKS])


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_the_pieces_are_the_whole(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    made = PieceEncoder(tokenizer, MARKS)
    whole = tokenizer.encode(text, add_special_tokens=False)
    for _ in range(2):  # the first time encoded, the second time from the cache
        encoded = made.encode(text)
        assert encoded.ids == whole.ids
        assert all(text[at:].startswith(tuple(MARKS)) for at in encoded.chars[1:])
        assert all(first <= second for first, second in pairwise(encoded.tokens))
    for length in range(len(text) + 1):
        places = [place for at in range(length, len(text)) if (place := whole.char_to_token(at)) is not None]
        assert made.following(encoded, length) == (places[0] if places else len(whole.ids))


def test_cuts_are_made_only_at_tokens_that_are_always_found() -> None:
    tokenizer = byte_level()
    plain = ["<a>", "<a>>", "b<", "<c>", "[d]", "[d]]", "[e]"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    tokenizer.add_tokens([AddedToken("(normalized)", normalized=True)])
    assert places_to_cut(tokenizer) == {"b<", "[d]]", "[e]"}
    tokenizer.add_tokens([AddedToken("(strips)", normalized=False, lstrip=True)])
    assert places_to_cut(tokenizer) == set()
    made = PieceEncoder(tokenizer, plain)
    assert made.encode("x[e]y").chars == [0]


class Watched:
    """A tokenizer that records the texts that it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.asked += texts
        return self._tokenizer.encode_batch_fast(texts, **options)


def watched(text: str, salts: list[str]) -> tuple[PieceEncoder, Watched]:
    tokenizer: Any = Watched(TOKENIZERS["bytes"])
    made = PieceEncoder(tokenizer, MARKS)
    for salt in salts:
        made.encode(text, salt)
    return made, tokenizer


def test_cached_pieces_are_not_encoded_again() -> None:
    made, tokenizer = watched("a<s>b<s>c", [""])
    made.encode("a<s>b<s>c<s>d")
    assert tokenizer.asked == ["a", "<s>b", "<s>c", "<s>d"]


def test_salts_share_nothing() -> None:
    _, tokenizer = watched("a<s>b", ["mine", "yours", "mine"])
    assert tokenizer.asked == ["a", "<s>b"] * 2


def test_the_least_recently_used_piece_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MAX_BYTES", 3 * (encoder.ENTRY_BYTES + 20))
    made, tokenizer = watched("a<s>b<s>c", [""])
    made.encode("a")
    made.encode("<s>d")
    tokenizer.asked.clear()
    made.encode("a<s>c<s>d<s>b")
    assert tokenizer.asked == ["<s>b"]
    made.encode("a" * 1000)  # larger than the whole cache, so everything is evicted
    made.encode("<s>b")
    assert tokenizer.asked[1:] == ["a" * 1000, "<s>b"]

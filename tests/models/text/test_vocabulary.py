"""Tokenizers in the metadata of GGUF files."""

from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from baton.models.text.vocabulary import RULES, end_ids, read_vocabulary, sampling_of, settings_of

TEXT = "It's 12345 Tests'll pass: naïve Ünïcode\r\n\n  two  spaces,\tTABs 中文字 e\u0301 x1y2 a/b/c ... \n"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>")


def trained() -> tuple[list[str], list[str]]:
    """Return the tokens and merges of a byte-level vocabulary that covers TEXT in any order of words."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT] * 3, BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    state = __import__("json").loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in state["merges"]]


TOKENS, MERGES = trained()


def metadata(rule: str = "qwen2", **more: Any) -> dict[str, Any]:
    """Return the metadata of a vocabulary; underscores stand for dots."""
    count = len(TOKENS)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": [*TOKENS, *SPECIAL],
        "tokenizer.ggml.token_type": [1] * count + [3, 3, 3, 4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": count,
        "tokenizer.ggml.eos_token_id": count + 2,
        "tokenizer.ggml.padding_token_id": count,
    } | {f"tokenizer.{key}": value for key, value in more.items()}


def words_of(rule: str) -> list[str]:
    """Return the words into which TEXT is split, as text."""
    tokenizer = read_vocabulary(metadata(rule))
    return [TEXT[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_keeps_the_text(rule: str) -> None:
    tokenizer = read_vocabulary(metadata(rule))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    assert decoded == (TEXT.replace("e\u0301", "é") if RULES[rule].nfc else TEXT)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("llama-bpe", ["It", "'s", " ", "123", "45", " Tests", "'ll"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " Tests", "'ll"]),
        ("gpt-2", ["It", "'s", " 12345", " Tests", "'ll"]),
        ("refact", ["It", "'s", " ", "1", "2", "3", "4", "5", " Tests", "'ll"]),
        ("gpt-4o", ["It's", " ", "123", "45", " Tests'll"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " Tests", "'ll"]),
        ("kimi-k2", ["It's", " ", "123", "45", " Tests'll"]),
    ],
)
def test_rules_split_digits_and_endings_in_their_own_ways(rule: str, words: list[str]) -> None:
    assert words_of(rule)[: len(words)] == words


def test_marks_belong_to_words_of_qwen35_only() -> None:
    assert " e\u0301" in words_of("qwen35") and " e\u0301" not in words_of("llama-bpe")


def test_added_tokens_are_not_split() -> None:
    tokenizer, count = read_vocabulary(metadata()), len(TOKENS)
    ids = tokenizer.encode("a<|im_end|><tool>", add_special_tokens=False).ids
    assert ids[-2:] == [count + 2, count + 3]
    assert tokenizer.decode(ids) == "a<tool>", "only control tokens are special"


@pytest.mark.parametrize(
    ("rule", "more", "begins"),
    [("qwen2", {}, False), ("llama-bpe", {}, True), ("llama-bpe", {"ggml.add_bos_token": False}, False),
     ("qwen2", {"ggml.add_bos_token": True}, True)],
)  # fmt: skip
def test_a_text_begins_with_a_token_if_the_file_or_else_the_rule_says_so(
    rule: str, more: dict[str, Any], begins: bool
) -> None:
    ids = read_vocabulary(metadata(rule, **more)).encode("a").ids
    assert (ids[0] == len(TOKENS)) is begins


def test_ends_are_those_that_the_file_names_and_the_known_ones() -> None:
    count = len(TOKENS)
    assert end_ids(metadata()) == [count + 2, count]
    assert end_ids(metadata(**{"ggml.eot_token_id": 5})) == [count + 2, 5, count]


def test_templates_special_tokens_and_sampling_values() -> None:
    found = settings_of(metadata(chat_template="one"))
    assert found == {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "chat_template": "one"}
    several = settings_of(metadata(**{"chat_template": "one", "chat_template.tool_use": "two"}))["chat_template"]
    assert {each["name"]: each["template"] for each in several} == {"default": "one", "tool_use": "two"}
    sampling = {"general.sampling.temp": 0.3, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.05}
    assert sampling_of(sampling) == {"temperature": 0.3, "top_k": 20, "repetition_penalty": 1.05}


def test_tokenizers_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="the rule 'other' that splits text is not known"):
        read_vocabulary(metadata("other"))
    with pytest.raises(ValueError, match="of the kind 'bert' are not read"):
        read_vocabulary(metadata(**{"ggml.model": "bert"}))
    with pytest.raises(ValueError, match="not a vocabulary"):
        read_vocabulary(metadata(**{"ggml.merges": ["no such"]}))


def sentence_pieces() -> dict[str, Any]:
    """Return the metadata of a vocabulary of SentencePiece's kind, with pieces of TEXT, bytes and special tokens."""
    text = TEXT.replace(" ", "\u2581")
    pieces = {text[at : at + size] for at in range(len(text)) for size in (1, 2, 3, 5)} - {"\u2581\u2581"}
    known = sorted(piece for piece in pieces if piece and "中" not in piece and "\n" not in piece)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *known]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [len(piece) * 100.0 - at for at, piece in enumerate(known)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(known),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize("begins", [True, False])
def test_pieces_with_scores_keep_the_text(begins: bool) -> None:
    tokenizer = read_vocabulary(sentence_pieces() | {"tokenizer.ggml.add_space_prefix": begins})
    encoded = tokenizer.encode(TEXT)
    assert encoded.ids[0] == 1 and "<0xE4>" in encoded.tokens, "the first byte of a character that is no piece"
    assert tokenizer.decode(encoded.ids) == TEXT
    assert encoded.tokens[1].startswith("\u2581") is begins


def test_pieces_with_higher_scores_are_joined_first() -> None:
    pieces, types = ["<unk>", "a", "b", "c", "ab", "bc"], [2, 1, 1, 1, 1, 1]
    for scores, tokens in (([0, -9, -9, -9, -1, -2], ["ab", "c"]), ([0, -9, -9, -9, -2, -1], ["a", "bc"])):
        found = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": types, "add_space_prefix": False}
        tokenizer = read_vocabulary({f"tokenizer.ggml.{key}": value for key, value in found.items()})
        assert tokenizer.encode("abc").tokens == tokens

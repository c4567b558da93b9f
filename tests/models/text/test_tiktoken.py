"""Kimi's tokenizer, read from its ranks, compared with tiktoken itself."""

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import example, given, strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from baton.models.text.tiktoken import KIMI, RESERVED, byte_letters, read_tiktoken
from baton.models.text.tokenizer import load_text

TEXT = (
    "The quick brown fox isn't quicker than 12345 foxes; HTTPServer and camelCase don't mind.\r\n\r\n"
    "  indented\ttext,  spaces   and 中文字符 mixed with English, 東京 2024年. Ünïcödé éàü ǅ naïve's!\n"
    "def main(argv): return [x ** 2 for x in range(100)]  # comment 'll 've\n"
) * 3
NAMED = {0: ("[BOS]", True), 2: ("<|im_end|>", True), 5: ("<|tool_call_begin|>", False)}
PARTS = [*"aZ é1中٣ǅ'\n\t.😀\u0301", "isn't", "  ", "the", "HTTP", "12345", "文字", "\r\n", "[BOS]", "<|im_end|>"]


@cache
def ranks() -> dict[bytes, int]:
    """Return the ranks of a tokenizer trained on a short text: bytes first, then joined pieces in their order."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(KIMI), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    letters = {letter: byte for byte, letter in byte_letters()}
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=list(letters), show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    pieces = sorted(made.get_vocab().items(), key=lambda item: item[1])
    joined = [bytes(letters[letter] for letter in piece) for piece, _ in pieces if len(piece) > 1]
    return {piece: rank for rank, piece in enumerate([*(bytes([byte]) for byte in range(256)), *joined])}


def settings() -> dict[str, Any]:
    first = len(ranks())
    added = {str(first + at): {"content": text, "special": special} for at, (text, special) in NAMED.items()}
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    return {"added_tokens_decoder": added, "auto_map": code, "eos_token": "<|im_end|>"}


def write(folder: Path, lines: list[bytes] | None = None) -> Path:
    written = [b"%s %d" % (base64.b64encode(piece), rank) for piece, rank in ranks().items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines if lines is not None else written) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings()))
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read_tiktoken(write(tmp_path_factory.mktemp("kimi")) / "tiktoken.model", settings())


@pytest.fixture(scope="module")
def theirs() -> tiktoken.Encoding:
    first = len(ranks())
    special = {NAMED.get(at, (f"<|reserved_token_{first + at}|>",))[0]: first + at for at in range(RESERVED)}
    return tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks(), special_tokens=special)


@given(text=st.lists(st.sampled_from(PARTS), max_size=30).map("".join) | st.text(max_size=40))
@example(text=TEXT)
def test_it_splits_and_joins_as_tiktoken_does(ours: Tokenizer, theirs: tiktoken.Encoding, text: str) -> None:
    ids = ours.encode(text).ids
    assert ids == theirs.encode(text, allowed_special="all")
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_a_checkpoint_with_ranks_alone_is_served(tmp_path: Path) -> None:
    text = load_text(write(tmp_path))
    first = len(ranks())
    assert text.vocab_size == first + RESERVED and text.eos_ids == (first + 2,)
    assert text.encode(f"[BOS]<|reserved_token_{first + 1}|>") == [first, first + 1]
    assert text.decode([first, first + 5]) == "<|tool_call_begin|>"
    grammars = text.grammars(text.vocab_size)
    matcher = grammars.matcher('start: "the"')
    for token in text.encode("the"):
        matcher.consume(token)
    assert matcher.accepts()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([b"YQ== 0"], "a rank or a byte is missing"),
        ([b"YQ=="], "not enough values"),
        ([b"YQ 0"], "padding"),
        ([b"YQ== x"], "invalid literal"),
    ],
)
def test_broken_ranks_are_named(tmp_path: Path, lines: list[bytes], why: str) -> None:
    with pytest.raises(ValueError, match=rf"tiktoken\.model: not tiktoken's ranks.*{why}"):
        load_text(write(tmp_path, lines))


def test_other_projects_ranks_are_not_read_as_kimis(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_qwen.Tokenizer"]}}')
    with pytest.raises(ValueError, match="in this format, or in Kimi's"):
        load_text(tmp_path)

from collections.abc import Callable, Sequence
from time import process_time

import pytest
from hypothesis import example, given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from baton.models.text.detokenizer import CONTEXT, MAX_HELD, WINDOW, Detokenizer

CORPUS = ["hello hello world", "the cat's été", "naïve €5 日本語 日本", "😀😀 👩‍👩‍👧 fin", "a b  c"]
SPECIAL = "<|end|>"
Decode = Callable[[Sequence[int]], str]


def byte_level() -> Tokenizer:
    """Return a tokenizer like GPT-2's that does not split text, so its merges also join bytes across characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer like SentencePiece's: a space is the letter ▁, and unknown characters fall back to bytes."""
    letters = sorted(set("".join(CORPUS).replace(" ", "▁")) - set("日本語😀👩👧"))
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *letters, "▁h", "▁he", "ll", "▁hell"]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll")]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "metaspace": metaspace()}
both = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=list(TOKENIZERS))
texts = st.lists(
    st.sampled_from(["a", " ", "hello", " world", "é", "€", "日本", "語", "😀", "👩‍👩‍👧", "\n", SPECIAL, "x"]),
    max_size=20,
)


def stream(decode: Decode, prompt: Sequence[int], output: Sequence[int], sizes: Sequence[int] = (1,)) -> list[str]:
    """Return the text of each push and of the flush. sizes: how many tokens the pushes get, in rotation."""
    detokenizer = Detokenizer(decode, prompt)
    shown, start, turn = [], 0, 0
    while start < len(output):
        size = sizes[turn % len(sizes)]
        shown.append(detokenizer.push(output[start : start + size]))
        start, turn = start + size, turn + 1
    return [*shown, detokenizer.flush()]


@both
@given(words=texts, cut=st.integers(0, 60), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
@example(words=["😀"], cut=2, sizes=[1])
@example(words=["hello", " world"], cut=1, sizes=[1])
@example(words=["日本"] * 20, cut=31, sizes=[1])
@example(words=["a", "é", "€"], cut=1, sizes=[1])  # one token ends a character and begins the next
def test_shown_text_is_the_whole_less_the_prompt(
    tokenizer: Tokenizer, words: list[str], cut: int, sizes: list[int]
) -> None:
    ids = tokenizer.encode("".join(words)).ids
    prompt, output = ids[:cut], ids[cut:]
    whole = tokenizer.decode(ids)
    # A character that begins in the prompt belongs to the output. Adjacent byte tokens are decoded together, so the
    # last one may make all of them unreadable.
    ends = [tokenizer.decode(prompt[:end]).rstrip("\ufffd") for end in range(len(prompt) + 1)]
    before = max((text for text in ends if whole.startswith(text)), key=len)
    assert before + "".join(stream(tokenizer.decode, prompt, output, sizes)) == whole


@both
@given(words=texts)
def test_shown_text_is_never_revised(tokenizer: Tokenizer, words: list[str]) -> None:
    ids = tokenizer.encode("".join(words)).ids
    whole, shown = tokenizer.decode(ids), ""
    for new in stream(tokenizer.decode, [], ids):
        shown += new
        assert whole.startswith(shown)


@given(st.lists(st.integers(0, 255), max_size=60), st.integers(0, 60))
def test_any_bytes_are_decoded_as_python_does(values: list[int], cut: int) -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    cut = next((i for i in range(cut, len(values)) if decode(values[:i]) + decode(values[i:]) == decode(values)), 0)
    shown = "".join(stream(decode, values[:cut], values[cut:]))
    assert decode(values[:cut]) + shown == decode(values)


def test_a_character_begun_by_the_prompt_does_not_leak_the_prompt() -> None:
    secret, smile = b"a secret ", "😀".encode()
    for known in range(1, 4):
        prompt, output = [*secret, *smile[:known]], [*smile[known:], *b"!"]
        shown = stream(lambda ids: bytes(ids).decode(errors="replace"), prompt, output)
        assert "".join(shown) == "😀!"
        assert stream(lambda ids: bytes(ids).decode(errors="replace"), prompt, list(b"!"))[0] == "!"


def test_a_character_completed_by_a_token_that_begins_another() -> None:
    pieces = [b"a secret \xf0\x9f", b"\x98\x80\xc3", b"\xa9\xc3", b"\xa9\xc3", b"\xa9"]

    def decode(ids: Sequence[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    assert stream(decode, [0], [1, 2, 3, 4]) == ["😀", "é", "é", "é", ""]


def test_incomplete_bytes_are_held_and_then_given_up() -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    detokenizer = Detokenizer(decode, b"x")
    assert [detokenizer.push([byte]) for byte in "€".encode()] == ["", "", "€"]
    given_up = [detokenizer.push([0xFF]) for _ in range(MAX_HELD + 1)]
    assert given_up[:MAX_HELD] == [""] * MAX_HELD and given_up[MAX_HELD] == "\ufffd" * MAX_HELD
    assert detokenizer.flush() == "\ufffd" and detokenizer.flush() == ""


@pytest.mark.parametrize(
    "output", [[0xFF] * 3000, list("\ufffd".encode()) * 1000, list("é".encode()) * 1500, [0xC3, *[0xA9, 0xC3] * 1500]]
)
def test_the_window_stays_bounded(output: list[int]) -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    begin = process_time()
    assert "".join(stream(decode, b"prompt", output)) == bytes(output).decode(errors="replace")
    assert longest <= WINDOW + CONTEXT
    assert process_time() - begin < 2


def test_tokens_across_characters_are_shown_without_waiting_for_a_pause() -> None:
    pieces = [b"\xc3", *[b"\xa9\xc3"] * 100, b"\xa9"]

    def decode(ids: Sequence[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    shown = stream(decode, [], range(len(pieces)))
    assert shown == ["", *["é"] * 101, ""]


@both
def test_special_tokens_show_nothing_and_end_no_character(tokenizer: Tokenizer) -> None:
    end = tokenizer.encode(SPECIAL, add_special_tokens=False).ids[-1]
    hello = tokenizer.encode("hello").ids
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(list(ids))

    output = [*hello, *[end] * 200, *hello, *[end] * 3, *hello]
    assert "".join(stream(decode, [end] * 40, output)) == tokenizer.decode([*[end] * 40, *output])
    assert longest <= 40 + WINDOW + CONTEXT

"""The demonstration model's tokenizer and chat template, for both training and the server.

Words in the fixed wordings of the tasks are one token each; everything else is bytes. Names, numbers and other values
are therefore spelt as bytes, so that the model copies an unknown word like a known word.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from baton.models.text.template import ChatTemplate
from baton.models.text.tiktoken import byte_letters
from scripts.demo.chat import Message
from scripts.demo.world import LISTS, VALUES

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
VOCABULARY = 768
TIMES = 4  # a word needs at least this many occurrences to become a token
SPLIT = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s"), "isolated")
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def render(messages: Sequence[Message], tools: Sequence[dict[str, Any]], open_end: bool = False) -> str:
    """Render a chat as the server does. open_end: end where the assistant's answer begins."""
    return _TEMPLATE.render(messages, open_end, tools=list(tools))


def plain(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the chat as messages of role and text only, which render to the same text without `tools`."""
    found = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", render(messages, tools), re.DOTALL)
    return [{"role": role, "content": content} for role, content in found]


def make_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Make the tokenizer. Token i < 256 is byte i; then follow SPECIALS, MARKS and the commonest words of `texts`.

    texts: chats of a world that draws held-out words, so that the common words are wordings and not values.
    """
    alphabet = [letter for _, letter in byte_letters()]
    words = ["".join(alphabet[byte] for byte in word.encode()) for word in common_words(texts)]
    names = [*alphabet, *SPECIALS, *MARKS, *words][:VOCABULARY]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(names)}, merges=[], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence([SPLIT, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return made


def common_words(texts: Iterable[str]) -> list[str]:
    """Return the pieces of `texts` that may be tokens and occur at least TIMES times, the commonest first."""
    values = {word for kind in (*VALUES, "days") for word in " ".join(words_of(kind)).lower().split()}
    values |= {word[::-1] for word in values}
    plain = (re.split("|".join(map(re.escape, [*SPECIALS, *MARKS])), text) for text in texts)
    counted = Counter(piece for parts in plain for part in parts for piece, _ in SPLIT.pre_tokenize_str(part))
    words = [piece for piece in counted if counted[piece] >= TIMES and is_wording(piece, values)]
    return sorted(words, key=lambda piece: (-counted[piece], piece))


def words_of(kind: str) -> list[str]:
    return [*LISTS[kind], *LISTS.get(f"held_out_{kind}", [])]


def is_wording(piece: str, values: set[str]) -> bool:
    """Return whether a piece may be a token: it is neither a single byte, nor a letter, nor one of `values`."""
    word = piece.strip().lower()
    return len(piece.encode()) > 1 and word not in values and (len(word) > 1 or not word.isalpha() or piece in " I a")


_TEMPLATE = ChatTemplate({"default": TEMPLATE}, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})

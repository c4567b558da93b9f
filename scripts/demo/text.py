"""The demonstration model's text side: its tokenizer and its chat template, as training and the server have them.

Words of the generator's own wordings are one token each, everything else is bytes: names, numbers and all other values
are spelt, so that a word never seen is copied as one that was.
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
TIMES = 4
SPLIT = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s"), "isolated")
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def render(messages: Sequence[Message], tools: Sequence[dict[str, Any]], open_end: bool = False) -> str:
    """The chat as the server renders it; open_end: up to where an answer begins."""
    return _TEMPLATE.render(messages, open_end, tools=list(tools))


def plain(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The same chat as messages of roles and texts alone, for who takes no tools: it renders to the same text."""
    found = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", render(messages, tools), re.DOTALL)
    return [{"role": role, "content": content} for role, content in found]


def make_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Token i is byte i for i < 256; then come the specials, the marks of tools, and the commonest words of `texts`.

    texts: chats of a world that draws held-out words, so that what else is common in them is wording.
    """
    alphabet = [letter for _, letter in byte_letters()]
    words = ["".join(alphabet[byte] for byte in word.encode()) for word in common_words(texts)]
    named = [*alphabet, *SPECIALS, *MARKS, *words][:VOCABULARY]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(named)}, merges=[], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence([SPLIT, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return made


def common_words(texts: Iterable[str]) -> list[str]:
    """Pieces of more than one byte but those that stand for a value, the commonest first, the rarest left out."""
    values = {word for kind in (*VALUES, "days") for word in " ".join(words_of(kind)).lower().split()}
    values |= {word[::-1] for word in values}
    plain = (re.split("|".join(map(re.escape, [*SPECIALS, *MARKS])), text) for text in texts)
    counted = Counter(piece for parts in plain for part in parts for piece, _ in SPLIT.pre_tokenize_str(part))
    kept = [piece for piece in counted if counted[piece] >= TIMES and is_wording(piece, values)]
    return sorted(kept, key=lambda piece: (-counted[piece], piece))


def words_of(kind: str) -> list[str]:
    return [*LISTS[kind], *LISTS.get(f"held_out_{kind}", [])]


def is_wording(piece: str, values: set[str]) -> bool:
    """Whether it is a token of its own: not a single byte, a letter or a value."""
    word = piece.strip().lower()
    return len(piece.encode()) > 1 and word not in values and (len(word) > 1 or not word.isalpha() or piece in " I a")


_TEMPLATE = ChatTemplate({"default": TEMPLATE}, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})

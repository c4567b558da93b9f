"""A checkpoint's text side: tokenizer, chat template, stop tokens and default sampling values."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from baton.models.config import UNLIMITED, is_file, read_json, read_whole
from baton.models.gguf.header import SUFFIX, read_gguf
from baton.models.text import tiktoken
from baton.models.text.detokenizer import REPLACEMENT, Detokenizer
from baton.models.text.encoder import Encoded, PieceEncoder
from baton.models.text.grammars.compiling import Grammars
from baton.models.text.panics import TokenizerError, without_panics
from baton.models.text.sandbox import TemplateError
from baton.models.text.template import Beginning, ChatTemplate, KeptReasoning
from baton.models.text.token_bytes import TokenBytes
from baton.models.text.vocabulary import end_ids, read_vocabulary, sampling_of, settings_of

__all__ = ["ModelText", "TemplateError", "load_template", "load_text"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
# How many of the newest messages' ends are located. Only these, and the end of the first, may get checkpoints.
NEWEST_ENDS = 4
# How often a chat may be rendered to locate message ends. An end takes one rendering, even if it turns out unusable.
MAX_RENDERINGS = 8
# Sequences of more tokens are decoded as a batch of one: the tokenizer library releases the GIL only for batches.
BATCH_ABOVE = 1000
# Each thread that encodes caches this many words, of up to 8 KiB. The library's default, 10,000, is 80 MiB a thread.
CACHED_WORDS = 1000


class ModelText:
    """The conversion between text and tokens for one checkpoint. Safe to use from several threads.

    A panic of the tokenizer library becomes a TokenizerError.
    Long inputs go to the tokenizer as a batch of one, because the tokenizer library releases the GIL only for batches.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        eos_ids: Sequence[int],
        generation_defaults: Mapping[str, float],
        tokenizer_info: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._encoder = PieceEncoder(tokenizer, tokens_in(template, tokenizer) if template is not None else ())
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._bytes = TokenBytes(tokenizer)
        self.added_tokens = frozenset(token.content for token in added.values())
        """Texts for which the tokenizer has a token of their own, special or not."""
        self._special = {id: token.content for id, token in added.items() if token.special}
        # Special tokens that `decode` skips; None: all special tokens, which the tokenizer itself can skip.
        self._hidden: frozenset[int] | None = None
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """The largest token id plus one."""
        self.max_token_bytes = longest_token(tokenizer)
        """No token stands for more bytes of a text than this; None if there is no known limit."""
        self.eos_ids = tuple(eos_ids)
        """All tokens that end a generation."""
        self.generation_defaults = dict(generation_defaults)
        """Sampling values that the checkpoint's author chose; temperature 0.0 means greedy."""
        self.tokenizer_info = dict(tokenizer_info)
        """tokenizer_config.json with the special tokens as texts, the class, and the default chat template."""

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def templates(self) -> Mapping[str, str]:
        """The sources of the chat templates by name."""
        return self._template.sources if self._template is not None else {}

    @property
    def kept_reasoning(self) -> KeptReasoning | None:
        """How the chat template shows the reasoning of earlier turns; None if it cannot."""
        return self._template.kept_reasoning if self._template is not None else None

    @property
    def template_variables(self) -> frozenset[str]:
        """All names that the chat templates read."""
        return self._template.variables if self._template is not None else frozenset()

    @property
    def between_parts(self) -> str:
        """The white space that the chat template puts between two parts of a message's text."""
        return self._template.between_parts if self._template is not None else ""

    def show(self, markers: Collection[str]) -> None:
        """Decode these markers as text from now on, even if they are special tokens: output parsers look for them."""
        hidden = frozenset(id for id, text in self._special.items() if text not in markers)
        self._hidden = hidden if len(hidden) < len(self._special) else None

    @without_panics
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. Raises ValueError for text that is not valid Unicode (a lone surrogate)."""
        check_unicode(text)
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    @without_panics
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; unknown ids have no text. Raises OverflowError for ids beyond uint32."""
        if skip_special_tokens and self._hidden is not None:
            ids, skip_special_tokens = [id for id in ids if id not in self._hidden], False
        if len(ids) <= BATCH_ABOVE:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, id: int) -> bytes | None:
        """Return the bytes that a token stands for; None if they are not known."""
        return self._bytes.of(id)

    def detokenizer(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        """Return the incremental decoder of an output that follows the tokens `prompt_tail`.

        Where the tokenizer library panics, each token is decoded alone, and is U+FFFD if it panics again: an output
        cannot be refused.
        """

        def decode(ids: Sequence[int]) -> str:
            try:
                return self.decode(ids, skip_special_tokens)
            except TokenizerError:
                return "".join([decode([id]) for id in ids]) if len(ids) > 1 else REPLACEMENT

        return Detokenizer(decode, prompt_tail)

    def grammars(self, vocab_size: int) -> Grammars:
        """Return the compiler of grammars for outputs of a model with `vocab_size` logits.

        Raises ValueError if llguidance cannot read the tokenizer.
        """
        return Grammars(self._tokenizer.to_str(), self.vocab_size, vocab_size, self.eos_ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt of a chat as text. Raises TemplateError if the template is missing or refuses the chat."""
        if self._template is None:
            raise TemplateError("this model has no chat template: send a rendered prompt as a completion instead")
        if continue_final_message:
            return self._template.render_open(messages, **variables)
        return self._template.render(messages, add_generation_prompt, **variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of the rendered chat, and the ascending positions at which its first and newest messages
        end.

        A message's end is included if the chat up to it renders to a prefix of the tokens.
        continue_final_message: leave the last message open; then there is no generation prompt.
        """
        ids, ends, _ = self.encode_marked_chat(messages, (), add_generation_prompt, continue_final_message, **variables)
        return ids, ends

    @without_panics
    def encode_marked_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        beginnings: Sequence[Beginning],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        salt: str = "",
        **variables: Any,
    ) -> tuple[list[int], list[int], list[int]]:
        """Return what `encode_chat` returns, and the number of tokens that each of `beginnings` shares with the chat.

        These numbers are ascending and without duplicates; beginnings that share no token are left out.
        salt: pieces of text that were encoded before under the same salt come from a cache.
        """
        whole = self.render_chat(messages, add_generation_prompt, continue_final_message, **variables)
        check_unicode(whole)
        encoded = self._encoder.encode(whole, salt)

        def end(count: int) -> int:
            """Return the position at which the first `count` messages end; 0 if that is not between tokens."""
            part = self._begun(Beginning(messages[:count]), variables)
            return self._position(encoded, part, salt) if part and whole.startswith(part) else 0

        ends = {end(1)} - {0}
        for count in range(len(messages), max(1, len(messages) - MAX_RENDERINGS), -1):
            if len(ends) > NEWEST_ENDS:
                break
            ends |= {end(count)} - {0}
        lengths = [common_length(self._begun(beginning, variables), whole) for beginning in beginnings]
        marks = {self._encoder.following(encoded, length) for length in lengths}
        return encoded.ids, sorted(ends), sorted(marks - {0})

    def _begun(self, beginning: Beginning, variables: Mapping[str, Any]) -> str:
        """Render the beginning of a chat; "" if the template refuses it."""
        try:
            return self.render_chat(beginning.messages, False, **{**variables, **beginning.variables})
        except TemplateError:
            return ""

    def _position(self, encoded: Encoded, part: str, salt: str) -> int:
        """Return the number of tokens of `part`, a prefix of the encoded text; 0 if it ends within a token."""
        ids, following = encoded.ids, self._encoder.following(encoded, len(part))
        if following < len(ids) and ids[following] in self._added:
            # Text on both sides of an added token is encoded separately, so `part` alone would have the same tokens.
            return following
        made = self._encoder.encode(part, salt).ids
        return len(made) if made == ids[: len(made)] else 0


def common_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    # Binary search with comparisons in C, because prompts are too long for a loop in Python.
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first.startswith(second[low:middle], low) else (low, middle - 1)
    return low


def tokens_in(template: ChatTemplate, tokenizer: Tokenizer) -> set[str]:
    """Return the added tokens that occur in the template's source or in its special tokens."""
    added = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    return {text for text in added if any(text in source for source in template.texts)}


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the bytes of the longest token of a byte-level BPE; None if a token may stand for any length of text.

    A token may do so if text is changed or removed before it is split, or if there is a token for unknown text.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    steps = json.loads(tokenizer.pre_tokenizer.__getstate__()) if tokenizer.pre_tokenizer is not None else {}
    if (
        not isinstance(tokenizer.model, BPE)
        or not isinstance(tokenizer.decoder, ByteLevelDecoder)
        or tokenizer.normalizer is not None
        or '"removed"' in json.dumps(steps).lower()
        or any(token.lstrip or token.rstrip for token in added)
        or not all(letter in vocabulary for letter in ByteLevel.alphabet())
    ):
        return None
    return max(max(map(len, vocabulary)), *(len(token.content.encode()) for token in added), 1)


def check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode: {error}") from error


@without_panics
def load_text(path: Path) -> ModelText:
    """Load the tokenizer and the chat template of the checkpoint folder or GGUF file `path`.

    Raises ValueError, with the file's name, if a file is missing or broken.
    """
    if path.suffix == SUFFIX:
        return _text_of_gguf(path)
    config = _json(path / "config.json")
    generation = _json(path / "generation_config.json")
    settings = _json(path / "tokenizer_config.json")
    tokenizer = _tokenizer(path, settings)
    template = _template(path, settings)
    eos_ids = _eos_ids(path, tokenizer, generation, config, settings)
    defaults = _defaults(generation)
    for name, value in defaults.items():
        if isinstance(value, int) and abs(value) > UNLIMITED:
            raise ValueError(f"{path / 'generation_config.json'}: {name} should be at most {UNLIMITED}, not {value}")
    return ModelText(tokenizer, template, eos_ids, defaults, _tokenizer_info(path, settings, template))


def _text_of_gguf(path: Path) -> ModelText:
    metadata = read_gguf(path).metadata
    try:
        tokenizer, settings = without_limits(read_vocabulary(metadata)), settings_of(metadata)
        ends, sampling = end_ids(metadata), sampling_of(metadata)
    except (TypeError, IndexError) as error:
        raise ValueError(f"{path}: the metadata does not describe a vocabulary ({error})") from None
    template = _template(path, settings)
    info = _tokenizer_info(path, settings, template)
    return ModelText(tokenizer, template, ends, _defaults(sampling), info)


def load_template(path: Path) -> ChatTemplate | None:
    """Load only the chat template of the checkpoint folder `path`. Returns None without one. Raises ValueError."""
    return _template(path, _json(path / "tokenizer_config.json"))


def _json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no such file."""
    if not is_file(file):
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file}: it should hold a JSON object, not {type(content).__name__}")
    return content


def _tokenizer(path: Path, settings: dict[str, Any]) -> Tokenizer:
    file, ranks = path / "tokenizer.json", path / tiktoken.NAME
    in_ranks = not is_file(file) and is_file(ranks) and tiktoken.is_kimi(settings)
    return without_limits(tiktoken.read_tiktoken(ranks, settings) if in_ranks else _tokenizer_json(file))


def without_limits(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that neither cuts nor pads prompts, and caches few words."""
    # Settings left over from training could cut or pad prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    resize = getattr(tokenizer.model, "_resize_cache", None)
    if resize is not None:
        resize(CACHED_WORDS)
    return tokenizer


def _tokenizer_json(file: Path) -> Tokenizer:
    if not is_file(file):
        raise ValueError(f"{file}: no such file; a checkpoint needs its tokenizer in this format, or in Kimi's")
    try:
        return Tokenizer.from_buffer(read_whole(file))
    except Exception as error:  # The library raises plain Exception for everything.
        raise ValueError(f"{file}: not a tokenizer: {error}") from error


def _template(path: Path, settings: dict[str, Any]) -> ChatTemplate | None:
    """Load the chat templates from chat_template.jinja and additional_chat_templates/, else tokenizer_config.json.

    In tokenizer_config.json, chat_template is a text or a list of named templates. Returns None without a template.
    """
    file = path / "chat_template.jinja"
    named = {each.stem: each for each in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    named |= {"default": file}
    sources = {name: _read(each) for name, each in named.items() if is_file(each)}
    if not sources:
        file = path / "tokenizer_config.json"
        value = settings.get("chat_template")
        if value is None:
            return None
        try:
            sources = {"default": value} if isinstance(value, str) else {t["name"]: t["template"] for t in value}
        except (TypeError, KeyError) as error:
            raise ValueError(f"{file}: chat_template is neither a text nor a list of named templates") from error
    try:
        return ChatTemplate(sources, _special_tokens(path, settings))
    except TemplateError as error:
        raise ValueError(f"{file}: {error}") from error


def _special_tokens(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and so on, from tokenizer_config.json, else special_tokens_map.json."""
    known = {**_json(path / "special_tokens_map.json"), **{k: v for k, v in settings.items() if v is not None}}
    texts = {name: _content(known.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _tokenizer_info(path: Path, settings: dict[str, Any], template: ChatTemplate | None) -> dict[str, Any]:
    info = {"tokenizer_class": "PreTrainedTokenizerFast", **settings, **_special_tokens(path, settings)}
    return info if template is None else {**info, "chat_template": template.sources["default"]}


def _content(token: Any) -> str | None:
    """Return a special token's text. Files hold a string, or an object with the token's settings."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _eos_ids(
    path: Path, tokenizer: Tokenizer, generation: dict[str, Any], config: dict[str, Any], settings: dict[str, Any]
) -> list[int]:
    """Return all ids that any of the files names as an end of sequence, without duplicates."""
    found: list[int] = []
    # Vision-language models have the text model's settings in text_config.
    text_config = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    sources = [("generation_config.json", generation), ("config.json", config), ("config.json", text_config)]
    for name, content in sources:
        value = content.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and 0 <= i <= UNLIMITED for i in ids):
            raise ValueError(f"{path / name}: eos_token_id is neither a token id nor a list of them")
        found += ids
    text = _special_tokens(path, settings).get("eos_token")
    own = None if text is None else tokenizer.token_to_id(text)
    return list(dict.fromkeys(found if own is None else [*found, own]))


def _defaults(generation: dict[str, Any]) -> dict[str, float]:
    """Return the sampling values in generation_config.json; do_sample = false means temperature 0."""
    values = {name: generation[name] for name in GENERATION_DEFAULTS if type(generation.get(name)) in (int, float)}
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    return values


def _read(file: Path) -> str:
    try:
        return read_whole(file).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8: {error}") from error

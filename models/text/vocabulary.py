"""The tokenizer in the metadata of a GGUF file: of bytes, with a rule that splits text, or of SentencePiece's kind."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from baton.models.text.tiktoken import KIMI, merges_of

NORMAL = 1  # type of a token that is a piece of text
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are added: with and without a meaning beyond their text
SPACE = "\u2581"
ENDINGS = ("eos", "eot", "eom")  # the keys tokenizer.ggml.…_token_id of tokens that end an answer
END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<|eom_id|>", "</s>", "[EOS]")
"""Control tokens that end an answer whether the metadata names them or not, as in llama.cpp."""
ENDING, SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _of_words(digits: str, letters: str = r"\p{L}") -> str:
    """Return the rule of Llama 3 and Qwen: words of letters, digits, and runs of other characters."""
    word = f"[{letters}]"
    return rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{word}+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|{SPACES}"


def _of_cased_words(digits: str, ending: str) -> str:
    """Return the rule of GPT-4o and Tekken: a word changes from capitals to small letters once."""
    words = f"{BEFORE}{CAPITALS}*{SMALL}+{ending}|{BEFORE}{CAPITALS}+{SMALL}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"


@dataclass(frozen=True)
class SplittingRule:
    """A rule by which text is split into words before it is encoded."""

    pattern: str | None  # regular expression of the words; None: GPT-2's
    whole_words: bool = False  # whether a word that is a token is encoded as such, even if merges would not lead to it
    adds_bos: bool = False  # whether BOS is added, unless the metadata says otherwise
    nfc: bool = False  # whether text is first normalized to NFC
    single_digits: bool = False  # whether digits are split before GPT-2's pattern is used


LLAMA3 = SplittingRule(_of_words(r"\p{N}{1,3}"), whole_words=True, adds_bos=True)
GPT2, QWEN2 = SplittingRule(None), SplittingRule(_of_words(r"\p{N}"), nfc=True)
DIGITS = SplittingRule(None, single_digits=True)
RULES = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), LLAMA3),
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais", "granite-docling"), GPT2),
    **dict.fromkeys(("refact", "starcoder", "smollm", "command-r", "codeshell"), DIGITS),
    **dict.fromkeys(("dbrx", "smaug-bpe"), SplittingRule(_of_words(r"\p{N}{1,3}"))),
    **dict.fromkeys(("qwen2", "stablelm2", "hunyuan"), QWEN2),
    "qwen35": SplittingRule(_of_words(r"\p{N}", r"\p{L}\p{M}"), nfc=True),
    "gpt-4o": SplittingRule(_of_cased_words(r"\p{N}{1,3}", f"{ENDING}?")),
    "tekken": SplittingRule(_of_cased_words(r"\p{N}", ""), whole_words=True, adds_bos=True),
    "kimi-k2": SplittingRule(KIMI, whole_words=True),
}
"""The rules by the values of tokenizer.ggml.pre."""


def read_vocabulary(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer in a GGUF file's metadata. Raises ValueError for one that is not supported or broken."""
    kind, texts = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens", [])
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"GGUF: tokenizers of the kind {kind!r} are not read, only gpt2 and llama are")
    try:
        made, adds_bos = _byte_level(metadata) if kind == "gpt2" else _sentence_piece(metadata)
    except ValueError:
        raise
    except Exception as error:  # The library raises plain Exception for everything.
        raise ValueError(f"GGUF: not a vocabulary: {error}") from error
    made.add_tokens([*_added(texts, metadata.get("tokenizer.ggml.token_type", []))])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos in range(len(texts)):
        text = texts[bos]
        made.post_processor = processors.TemplateProcessing(single=[text, "$A"], special_tokens=[(text, bos)])
    return made


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Return a tokenizer of byte sequences, and whether texts begin with a token by default."""
    name, texts = metadata.get("tokenizer.ggml.pre", "default"), metadata.get("tokenizer.ggml.tokens", [])
    if name not in RULES:
        raise ValueError(f"GGUF: the rule {name!r} that splits text is not known (known: {', '.join(sorted(RULES))})")
    rule, vocabulary = RULES[name], {text: id for id, text in enumerate(texts)}
    merges = [tuple(pair.split(" ", 1)) for pair in metadata.get("tokenizer.ggml.merges", [])]
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([*_splitting(rule)])
    made.decoder = decoders.ByteLevel()
    return made, rule.adds_bos


def _sentence_piece(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Return a tokenizer of SentencePiece's kind, whose pieces are joined in the order of their scores.

    Spaces are written as U+2581, and characters that are no piece as tokens of their bytes.
    """
    texts, scores = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.scores", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    ranks = {text: -score for text, score, kind in zip(texts, scores, types, strict=True) if kind == NORMAL}
    unknown = texts[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    vocabulary = {text: id for id, text in enumerate(texts)}
    made = Tokenizer(models.BPE(vocabulary, [*merges_of(ranks)], unk_token=unknown, fuse_unk=True, byte_fallback=True))
    begins = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(SPACE)] if begins else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if begins else [])])
    return made, True


def _splitting(rule: SplittingRule) -> Iterator[pre_tokenizers.PreTokenizer]:
    if rule.single_digits:
        yield pre_tokenizers.Digits(individual_digits=True)
    if rule.pattern is not None:
        yield pre_tokenizers.Split(Regex(rule.pattern), "isolated")
    yield pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None)


def _added(texts: list[str], types: list[int]) -> Iterator[AddedToken]:
    for text, kind in zip(texts, types, strict=False):
        if kind in (CONTROL, USER_DEFINED) and text:
            yield AddedToken(text, special=kind == CONTROL, normalized=False)


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of tokens that end an answer, those that the metadata names first, without duplicates."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDINGS)
    texts, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    known = (
        id for id, (text, kind) in enumerate(zip(texts, types, strict=False)) if kind == CONTROL and text in END_NAMES
    )
    return list(dict.fromkeys([*(id for id in named if type(id) is int and 0 <= id < len(texts)), *known]))


def settings_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata's special tokens and chat templates as the values of a tokenizer_config.json."""
    texts, found = metadata.get("tokenizer.ggml.tokens", []), dict[str, Any]()
    names = (
        ("bos", "bos"),
        ("eos", "eos"),
        ("unknown", "unk"),
        ("seperator", "sep"),
        ("padding", "pad"),
        ("mask", "mask"),
    )
    for key, name in names:
        id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(id, int) and id < len(texts):
            found[f"{name}_token"] = texts[id]
    first = "tokenizer.chat_template"
    named = {key.removeprefix(f"{first}."): value for key, value in metadata.items() if key.startswith(f"{first}.")}
    if named:
        found["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        if first in metadata and "default" not in named:
            found["chat_template"].append({"name": "default", "template": metadata[first]})
    elif first in metadata:
        found["chat_template"] = metadata[first]
    return found


def sampling_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata's sampling values as those of a generation_config.json."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    names |= {"penalty_repeat": "repetition_penalty"}
    found = {own: metadata.get(f"general.sampling.{name}") for name, own in names.items()}
    return {name: value for name, value in found.items() if value is not None}

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from baton.models.text.template import Beginning
from baton.models.text.tokenizer import ModelText, TemplateError, common_length, load_text

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [{"role": "user", "content": "Hé <b>"}, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "?"}]


def tokenizer() -> Tokenizer:
    """Return a tokenizer of single bytes in no particular order and three special tokens; it can add <|bos|> first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<|bos|>", "<|im_start|>", "<|im_end|>")])
    made.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])
    made.enable_truncation(8)
    made.enable_padding(length=8)
    return made


def checkpoint(folder: Path, template: str | None = None, **files: Any) -> Path:
    """Make a folder with a tokenizer and JSON files, given by their stems."""
    tokenizer().save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def loaded(folder: Path, template: str | None = None, **files: Any) -> ModelText:
    return load_text(checkpoint(folder, template, **files))


def test_text_survives_and_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    text = loaded(tmp_path)
    for sample in ("", "a", "naïve 日本語 😀" * 5):
        ids = text.encode(sample)
        assert ids[0] == 256 and ids[1:] == text.encode(sample, add_special_tokens=False)
        assert text.decode(ids) == sample
        assert text.decode(ids, skip_special_tokens=False) == "<|bos|>" + sample
    assert text.vocab_size == 259
    assert text.decode([5000]) == ""
    with pytest.raises(OverflowError):
        text.decode([-1])
    with pytest.raises(ValueError, match="not valid Unicode"):
        text.encode("\ud800")


def test_every_file_may_name_ends(tmp_path: Path) -> None:
    text = loaded(
        tmp_path,
        generation_config={"eos_token_id": [258, 7]},
        config={"eos_token_id": 7, "text_config": {"eos_token_id": [8, 7]}},
        tokenizer_config={"eos_token": {"content": "<|bos|>", "lstrip": False}},
    )
    assert text.eos_ids == (258, 7, 8, 256)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_text(tmp_path).eos_ids == (9, 7, 8, 256)
    (tmp_path / "config.json").write_text('{"text_config": []}')
    assert load_text(tmp_path).eos_ids == (9, 256)


def test_facts_about_the_tokenizer(tmp_path: Path) -> None:
    settings = {"eos_token": {"content": "<|bos|>", "lstrip": False}, "pad_token": None, "model_max_length": 9}
    text = loaded(tmp_path, tokenizer_config=settings, special_tokens_map={"unk_token": "?"})
    config = {"eos_token": "<|bos|>", "pad_token": None, "unk_token": "?", "model_max_length": 9}
    assert text.tokenizer_info == {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    text = loaded(tmp_path, tokenizer_config={"tokenizer_class": "Own", "chat_template": named}, special_tokens_map={})
    assert text.tokenizer_info == {"tokenizer_class": "Own", "chat_template": CHATML}


def test_generation_defaults(tmp_path: Path) -> None:
    generation = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "do_sample": True, "bos_token_id": 1, "min_p": None}
    assert loaded(tmp_path, generation_config=generation).generation_defaults == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    assert load_text(tmp_path).generation_defaults == {"temperature": 0.0}


def test_a_chat_is_encoded_without_a_second_first_token(tmp_path: Path) -> None:
    text = loaded(tmp_path, "{{ bos_token }}" + CHATML, tokenizer_config={"bos_token": {"content": "<|bos|>"}})
    ids, ends = text.encode_chat(CHAT)
    rendered = text.render_chat(CHAT)
    assert ids == text.encode(rendered, add_special_tokens=False) and ids.count(256) == 1
    assert [text.decode(ids[:end], False) for end in ends] == [text.render_chat(CHAT[: i + 1], False) for i in range(3)]
    assert text.encode_chat(CHAT, add_generation_prompt=False) == (ids[: ends[-1]], ends)


def test_marks_are_where_a_chat_differs_from_its_beginnings(tmp_path: Path) -> None:
    listed = "{% for tool in tools or [] %}<{{ tool }}>{% endfor %}"
    refusing = "{% if messages|length == 2 %}{{ raise_exception('two is not allowed') }}{% endif %}"
    text = loaded(tmp_path, refusing + listed + CHATML)
    first = CHAT[0]["content"]
    cut = {**CHAT[0], "content": first[:2]}
    beginnings = [
        Beginning([cut]),
        Beginning(CHAT[:1]),
        Beginning(CHAT[:1], {"tools": ["é1"]}),
        Beginning(CHAT[:2]),
        Beginning(CHAT),
        Beginning([{**CHAT[0], "content": "ß"}], {"tools": ["é"]}),
    ]
    ids, ends, marks = text.encode_marked_chat(CHAT, beginnings, tools=["é1", "ü"])
    assert (ids, ends) == text.encode_chat(CHAT, tools=["é1", "ü"])
    role = f"<|im_start|>{CHAT[0]['role']}\n"
    shown = "<é1><ü>" + role
    assert [text.decode(ids[:mark], False) for mark in marks] == [
        "<é", "<é1><", shown + first[:2], shown + first + "<|im_end|>\n", text.decode(ids[: ends[-1]], False),
    ]  # fmt: skip
    ids, _, marks = text.encode_marked_chat(CHAT, beginnings[:2])
    assert [text.decode(ids[:mark], False) for mark in marks] == [role + first[:2], text.render_chat(CHAT[:1], False)]
    assert text.encode_marked_chat(CHAT, [Beginning([{"role": "none"}]), Beginning(CHAT[:2])])[2] == []


@pytest.mark.parametrize("first, second, length", [("", "a", 0), ("ab", "ab", 2), ("abc", "abd", 2), ("b", "abc", 0)])
def test_common_length(first: str, second: str, length: int) -> None:
    assert common_length(first, second) == common_length(second, first) == length


def test_message_ends_without_special_tokens_are_those_that_are_token_prefixes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "{% for m in messages %}{{ m.content }};{% endfor %}")
    made = json.loads((folder / "tokenizer.json").read_text())
    made["model"]["vocab"][";x"] = 300
    made["model"]["merges"] = [[";", "x"]]
    (folder / "tokenizer.json").write_text(json.dumps(made))
    text = load_text(folder)
    ids, ends = text.encode_chat([{"content": "ab"}, {"content": "xé"}, {"content": "c"}])
    assert 300 in ids
    assert [text.decode(ids[:end]) for end in ends] == ["ab;xé;", "ab;xé;c;"]


def test_the_first_and_newest_ends_of_a_long_chat_are_listed(tmp_path: Path) -> None:
    text = loaded(tmp_path, CHATML)
    chat = [{"role": "user", "content": f"é{number}"} for number in range(30)]
    ids, ends = text.encode_chat(chat)
    expected = [text.render_chat(chat[:count], False) for count in (1, 27, 28, 29, 30)]
    assert [text.decode(ids[:end], False) for end in ends] == expected


def test_a_template_that_revises_or_refuses_parts_still_encodes(tmp_path: Path) -> None:
    text = loaded(
        tmp_path,
        "{% if messages|length == 2 %}{{ raise_exception('two is not allowed') }}{% endif %}"
        "{% if messages|length == 1 %}alone {% endif %}" + CHATML,
    )
    ids, ends = text.encode_chat(CHAT)
    assert text.decode(ids, False).startswith("<|im_start|>user")
    assert [text.decode(ids[:end], False) for end in ends] == [text.render_chat(CHAT, False)]
    with pytest.raises(TemplateError, match="two is not allowed"):
        text.encode_chat(CHAT[:2])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hé <b>"}'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "Hé <b>"\n}'),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% for m in messages %}\n  {% generation %}\n{{ m.role[0] }}{% endgeneration %}\n{% endfor %}", "uau"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ thinking }} {{ tools is defined }}", "yes True"),
        ("{{ messages[-1]['content'] }}{{ eos_token }}", "?<|im_end|>"),
    ],
)
def test_extensions_that_templates_expect(tmp_path: Path, template: str, expected: str) -> None:
    text = loaded(tmp_path, template, special_tokens_map={"eos_token": "<|im_end|>"})
    assert text.render_chat(CHAT, thinking="yes") == expected


@pytest.mark.parametrize(
    "template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}", "{{ missing.field }}"]
)
def test_forbidden_operations_of_a_template_are_template_errors(tmp_path: Path, template: str) -> None:
    with pytest.raises(TemplateError, match="the chat template failed"):
        loaded(tmp_path, template).render_chat(CHAT)


def test_where_templates_come_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    text = loaded(tmp_path, tokenizer_config={"chat_template": named})
    assert text.has_chat_template
    assert text.render_chat(CHAT) == "plain" and text.render_chat(CHAT, tools=[{"name": "f"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_text(tmp_path).render_chat(CHAT) == "file"


def test_without_a_template(tmp_path: Path) -> None:
    text = loaded(tmp_path)
    assert not text.has_chat_template
    with pytest.raises(TemplateError, match="no chat template"):
        text.encode_chat(CHAT)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "other", "template": ""}]}'),
        ("generation_config.json", "{"),
        ("generation_config.json", '{"eos_token_id": "2"}'),
        ("generation_config.json", '{"eos_token_id": -2}'),
        ("generation_config.json", '{"eos_token_id": 1' + "0" * 400 + "}"),
        ("generation_config.json", '{"top_k": 1' + "0" * 400 + "}"),
        ("config.json", '{"eos_token_id": [true]}'),
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str | bytes | None) -> None:
    file = checkpoint(tmp_path) / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=name):
        load_text(tmp_path)


def test_long_texts_and_short_ones_are_encoded_alike(tmp_path: Path) -> None:
    text = loaded(tmp_path)
    sample = "naïve 日本語 😀 " * 400
    ids = text.encode(sample)
    assert ids == tokenizer_of(tmp_path).encode(sample).ids
    assert text.decode(ids) == sample and len(ids) > 1000


def test_the_longest_text_of_a_token(tmp_path: Path) -> None:
    assert loaded(tmp_path).max_token_bytes == len("<|im_start|>")


@pytest.mark.parametrize("what", ["normalizer", "removing", "stripping", "holes", "words"])
def test_no_bound_if_a_token_may_stand_for_any_length(tmp_path: Path, what: str) -> None:
    made = tokenizer()
    match what:
        case "normalizer":
            made.normalizer = normalizers.Strip()
        case "removing":
            split = pre_tokenizers.Split(" ", "removed")
            made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
        case "stripping":
            made.add_special_tokens([AddedToken("<|pad|>", lstrip=True)])
        case "holes":
            made.model = models.BPE({"a": 0}, [])
        case "words":
            made.model = models.WordLevel({"a": 0, "?": 1}, unk_token="?")
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_text(tmp_path).max_token_bytes is None


def tokenizer_of(folder: Path) -> Tokenizer:
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.no_truncation()
    made.no_padding()
    return made


def test_unique_texts_do_not_fill_memory(tmp_path: Path) -> None:
    """With the library's default cache, a thread that has encoded 10,000 long words would hold 80 MiB of them."""
    text, before = loaded(tmp_path), resident_mib()
    for number in range(12_000):
        text.encode(f"{number:06}" * 40)
    assert resident_mib() - before < 30


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

"""Panics of the tokenizer library are errors of one text."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from baton.models.text.panics import TokenizerError
from baton.models.text.tokenizer import load_text
from tests.api.server_process import SERVE, ServerProcess
from tests.models.oracle import write_tokenizer

HARD = "x" * 40  # a text for which SLOW takes exponential time, so that the library gives up


def write_slow(folder: Path) -> None:
    """Write a tokenizer with a regex that fails for some texts."""
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = Sequence([Split(Regex("(x+x+)+y"), "isolated"), ByteLevel(False, use_regex=False)])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_hash_model(folder: Path) -> None:
    config = {"model_type": "hash", "vocab_size": 300, "chunk_size": 8, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_panic_is_an_error(tmp_path: Path) -> None:
    write_slow(tmp_path)
    text = load_text(tmp_path)
    with pytest.raises(TokenizerError, match="the tokenizer failed: Onig"):
        text.encode(HARD)
    with pytest.raises(TokenizerError, match="the tokenizer failed: Onig"):
        text.encode_chat([{"role": "user", "content": HARD}])
    assert text.decode(text.encode("easy")) == "easy"


def test_a_panic_is_answered_and_the_server_goes_on(tmp_path: Path) -> None:
    write_slow(tmp_path)
    write_hash_model(tmp_path)
    bodies = {
        "/v1/completions": {"prompt": HARD, "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": HARD}], "max_tokens": 1},
        "/tokenize": {"prompt": HARD},
        "/generate": {"text": HARD, "sampling_params": {"max_new_tokens": 1}},
    }
    with ServerProcess([*SERVE, str(tmp_path)]) as server:
        for path, body in bodies.items():
            status, answer = server.post(path, body)
            assert status == 400 and "the tokenizer failed" in answer["error"]["message"], path
        assert server.post("/v1/completions", {"prompt": "easy", "max_tokens": 1})[0] == 200


def test_only_tokens_on_which_the_library_panics_alone_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    text = load_text(tmp_path)
    decode, [wrong] = text.decode, text.encode("!")

    def panics(ids: list[int], skip_special_tokens: bool = True) -> str:
        if wrong in ids:
            raise TokenizerError
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(text, "decode", panics)
    for prompt, output, shown in (("", "the quick !brown fox", "the quick \ufffdbrown fox"), ("so!", "hello", "hello")):
        stream = text.detokenizer(text.encode(prompt), True)
        assert stream.push(text.encode(output)) + stream.flush() == shown


def test_an_output_whose_text_makes_the_library_panic_goes_on(tmp_path: Path) -> None:
    """Where that happened in the actors, they were restarted, and failed again when the request was resumed."""
    write_tokenizer(tmp_path)
    write_hash_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    replaced = decoders.Replace(Regex("(((x+)+)+)+y"), "z")  # takes too long for 13 times x
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), replaced])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    only_x = {"logit_bias": {tokenizer.token_to_id("x"): 100}, "max_tokens": 24, "ignore_eos": True}
    with ServerProcess([*SERVE, str(tmp_path)]) as server:
        status, answer = server.post("/v1/completions", {"prompt": "easy", **only_x})
        text = answer["choices"][0]["text"]
        assert status == 200 and answer["usage"]["completion_tokens"] == 24
        assert text == "x" * 24
        assert server.post("/v1/completions", {"prompt": "x" * 30, **only_x})[0] == 200
        assert server.post("/v1/completions", {"prompt": "easy", "max_tokens": 1})[0] == 200
        server.wait_until(lambda: [line["event"] for line in server.log].count("request") == 3)
        assert not [line for line in server.log if "restart" in line["event"]]

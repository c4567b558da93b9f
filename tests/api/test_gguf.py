"""`baton serve` and `baton inspect` of a GGUF file: the bundled model, converted with its tokenizer and template."""

import json
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType as Type

from baton.api.config import Config
from baton.api.inspection import examine
from baton.api.serve import StartError
from baton.api.wiring import load
from tests.api.server_process import SERVE, ServerProcess
from tests.models.gguf.converting import convert

BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
CHAT = [
    {"role": "user", "content": "My name is Clara."},
    {"role": "assistant", "content": "Nice to meet you, Clara!"},
    {"role": "user", "content": "What is my name?"},
]


def write_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Write the bundled model's tokenizer. Words of its vocabulary are not merged from parts, as with Llama 3's."""
    tokenizer = json.loads((BUNDLED / "tokenizer.json").read_text())
    types = dict.fromkeys(range(len(tokenizer["model"]["vocab"])), 1)
    texts = {id: text for text, id in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        texts[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([texts[id] for id in sorted(texts)])
    writer.add_token_types([types[id] for id in sorted(texts)])
    writer.add_eos_token_id(next(id for id, text in texts.items() if text == "<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template((BUNDLED / "chat_template.jinja").read_text())


def choose(name: str) -> Type:
    return Type.Q8_0 if name.endswith("weight") and "conv1d" not in name and "norm" not in name else Type.F32


def test_a_gguf_file_is_inspected_and_served(tmp_path: Path) -> None:
    file = convert(BUNDLED, tmp_path / "Clara-Q8_0.gguf", choose, write_vocabulary)
    found = examine(Config(model=str(file), device="cpu"))
    assert (found.refused, found.missing, found.chat_template) == ([], [], True)
    assert found.weights_on_disk.keys() == {"Q8_0", "F32"}
    with ServerProcess([*SERVE, str(file)]) as server:
        status, answer = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 20, "temperature": 0})
        assert status == 200 and answer["model"] == "Clara-Q8_0"
        assert "Clara" in answer["choices"][0]["message"]["content"]


def test_without_native_code_memory_is_checked_for_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The integers of the file would fit, but they become floats where there is no compiler."""
    file = convert(BUNDLED, tmp_path / "m.gguf", choose, write_vocabulary)
    monkeypatch.setattr("baton.kernels.runtime.cpp.prepare.find_compiler", lambda: None)
    monkeypatch.setattr("baton.api.machine.memory.free_memory", lambda device: 4 * 2**20)
    with pytest.raises(StartError, match=r"the weights take 5\.2 MiB, but only 4\.0 MiB are free"):
        load(Config(model=str(file), device="cpu"), lambda done, total: None)

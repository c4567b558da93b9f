"""llama.cpp on the same GGUF files: it draws the same tokens. It is built from source (4 minutes), so not in CI."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from baton.models.loading.checkpoint import load_model
from baton.models.text.vocabulary import RULES, read_vocabulary
from tests.models.gguf.converting import convert
from tests.models.gguf.test_architectures import NAMES
from tests.models.oracle import Oracle
from tests.models.test_parity import ids, make_pools, pages, prefill
from tests.models.text.test_vocabulary import TEXT, metadata, sentence_pieces

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, which no extra installs")
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PROMPTS = (3, 9, 17, 40)  # tokens of the prompts
GREEDY = 32
LIMIT = 1e-4  # of the difference of logits, as a share of the largest one
F32 = 0  # llama.cpp's number of this type


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_draws_the_same_tokens(oracle: Oracle, name: str, tmp_path: Path) -> None:
    file = convert(oracle.checkpoint(name, **NAMES[name]), tmp_path / "model.gguf")
    settings = {"n_ctx": 256, "n_batch": 256, "n_threads": 1, "logits_all": True, "verbose": False}
    peer = llama_cpp.Llama(str(file), type_k=F32, type_v=F32, **settings)
    model = load_model(file, torch.float32, torch.device("cpu"))
    for seed, length in enumerate(PROMPTS):
        tokens = ids(length, seed).tolist()
        peer.reset()
        peer.eval(tokens)
        for _ in range(GREEDY):
            tokens.append(int(np.argmax(peer.scores[len(tokens) - 1])))
            peer.eval(tokens[-1:])
        hidden = model.forward(prefill(torch.tensor(tokens), 0, 1, pages(1)), make_pools(model, 2, 1))
        found, expected = model.logits(hidden), torch.from_numpy(np.array(peer.scores[: len(tokens)]))
        assert (found - expected).abs().max() < LIMIT * expected.abs().max()
        assert found[length - 1 : -1].argmax(1).tolist() == tokens[length:]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "default"])  # llama.cpp warns of its own default
def test_llama_cpp_splits_text_alike(rule: str, tmp_path: Path) -> None:
    assert_split_alike(tmp_path / "m.gguf", metadata(rule))


def test_llama_cpp_joins_pieces_alike(tmp_path: Path) -> None:
    assert_split_alike(tmp_path / "m.gguf", sentence_pieces())


def assert_split_alike(file: Path, values: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(file, "mamba2")
    for key, value in values.items():
        match value:
            case str():
                writer.add_string(key, value)
            case int():
                writer.add_uint32(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    peer = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    text = TEXT.replace("e\u0301", "é")  # llama.cpp does not normalize
    found = read_vocabulary(values).encode(text, add_special_tokens=False).ids
    assert found == peer.tokenize(text.encode(), add_bos=False, special=False)

"""POST /v1/embeddings: fields and answers with the fake ring, and vectors of real models against transformers."""

import asyncio
import base64
import json
import re
import shutil
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
from safetensors.torch import load_file, save_file

from baton.actors.tokens import unpack
from baton.models.loading.pooling import EmbeddingRecipe
from tests.api.fake_ring import EOS, HIDDEN, FakeText, Served, serving
from tests.api.server_process import SERVE, ServerProcess
from tests.models.oracle import Oracle

pytestmark = pytest.mark.anyio

PATH = "/v1/embeddings"
MEAN = EmbeddingRecipe("mean")
INPUTS = [
    "a",
    "A longer text, which is cut into chunks. " * 5,
    "the same beginning, one end",
    "the same beginning, two",
]
TOLERANCE = 1e-4
POOLINGS = {"mean": slice(None), "last": slice(-1, None), "cls": slice(1)}


@asynccontextmanager
async def embedding(recipe: EmbeddingRecipe = MEAN, **options: Any) -> AsyncIterator[Served]:
    """Run a server with the fake ring, which pools the numbers of tokens, for a model that makes embeddings."""
    async with serving(**options) as served:
        served.server.model = replace(served.server.loaded(), embedding=recipe)
        yield served


def normalized(values: Sequence[float]) -> list[float]:
    vector = np.array(values, np.float32)
    return list((vector / np.linalg.norm(vector)).tolist())


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("ab", [[97, 98, 0, 0]]),
        (["a", "bcd"], [[97, 0, 0, 0], [98, 99, 100, 0]]),
        ([5, 6], [[5, 6, 0, 0]]),
        ([[5], [7, 8]], [[5, 0, 0, 0], [7, 8, 0, 0]]),
    ],
)
async def test_inputs_of_all_forms(inputs: Any, expected: list[list[float]]) -> None:
    async with embedding() as served:
        status, answer = await served.post(PATH, {"input": inputs, "model": "fake", "user": "somebody"})
        assert status == 200, answer
        requests = served.ring.submitted()
    assert (answer["object"], answer["model"]) == ("list", "fake")
    assert [(item["object"], item["index"]) for item in answer["data"]] == [
        ("embedding", index) for index in range(len(expected))
    ]
    for item, vector in zip(answer["data"], expected, strict=True):
        assert item["embedding"] == pytest.approx(normalized(vector))
    tokens = sum(request.prompt_len for request in requests)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
    assert all(request.stops.max_tokens == 1 and EOS not in request.stops.token_ids for request in requests)


async def test_base64_has_the_same_numbers() -> None:
    async with embedding() as served:
        _, plain = await served.post(PATH, {"input": "abc"})
        _, packed = await served.post(PATH, {"input": "abc", "encoding_format": "base64"})
    values = struct.unpack(f"<{HIDDEN}f", base64.b64decode(packed["data"][0]["embedding"]))
    assert list(values) == pytest.approx(plain["data"][0]["embedding"])


@pytest.mark.parametrize("normalizes", [True, False])
async def test_dimensions_are_the_first_ones(normalizes: bool) -> None:
    async with embedding(EmbeddingRecipe("mean", normalizes)) as served:
        _, answer = await served.post(PATH, {"input": "abc", "dimensions": 2})
    expected = normalized([97, 98]) if normalizes else [97, 98]
    assert answer["data"][0]["embedding"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pooling", "span", "keep"), [("mean", (0, 3), "never"), ("cls", (0, 1), "never"), ("last", (2, 3), "")]
)
async def test_pooled_tokens_and_kept_states(pooling: Any, span: tuple[int, int], keep: str) -> None:
    async with embedding(EmbeddingRecipe(pooling)) as served:
        await served.post(PATH, {"input": "abc"})
        [request] = served.ring.submitted()
    assert (request.pooled, request.keep) == (span, keep)


PROMPTS = {"query": "q: ", "document": "d: "}


async def test_prompts_come_before_texts_but_not_before_tokens() -> None:
    async with embedding(EmbeddingRecipe("mean", prompts=PROMPTS, default_prompt="document")) as served:
        for inputs in ({"input": "a"}, {"input": ["a"], "prompt_name": "query"}, {"input": [97]}):
            await served.post(PATH, inputs)
        texts = [bytes(unpack(request.tokens)).decode() for request in served.ring.submitted()]
    assert texts == ["d: a", "q: a", "a"]


async def test_the_mean_may_leave_out_the_prompt() -> None:
    recipe = EmbeddingRecipe("mean", prompts=PROMPTS, default_prompt="query", pools_prompt=False)
    async with embedding(recipe) as served:
        for inputs in ("abc", "", [1, 2]):
            await served.post(PATH, {"input": inputs})
        assert [request.pooled for request in served.ring.submitted()] == [(3, 6), (2, 3), (0, 2)]


class JoiningText(FakeText):
    """A tokenizer with one token for a space and the letter after it, which ends each text with EOS."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*re.sub(b" [a-z]", b"\x01", text.encode()), *[EOS] * add_special_tokens]


@pytest.mark.parametrize("special", [True, False])
async def test_as_many_tokens_are_left_out_as_the_prompt_alone_has(special: bool) -> None:
    """sentence-transformers counts so, although the prompt's last token, a space, is joined with the input's letter."""
    recipe, text = EmbeddingRecipe("mean", prompts=PROMPTS, default_prompt="query", pools_prompt=False), JoiningText()
    async with embedding(recipe) as served:
        served.server.model = replace(served.server.loaded(), text=cast("Any", text))
        await served.post(PATH, {"input": "abc", "add_special_tokens": special})
        [request] = served.ring.submitted()
    assert (request.pooled, request.prompt_len) == ((3, 5 + special), 5 + special)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", 5]}, 400, "input"),
        ({"input": [[]]}, 400, "input"),
        ({"input": [10_000]}, 400, "input"),
        ({"input": "a" * 300}, 400, "input"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "dimensions": HIDDEN + 1}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "prompt_name": "query"}, 400, "prompt_name"),
        ({"input": "a", "model": "other"}, 404, "model"),
        ({"input": "a", "colour": "red"}, 400, "colour"),
    ],
)
async def test_errors_name_the_field(body: dict[str, Any], status: int, param: str) -> None:
    async with embedding() as served:
        found, error = await served.error(PATH, body)
        assert not served.ring.submitted()
    assert (found, error["param"]) == (status, param), error


async def test_a_model_without_embeddings() -> None:
    async with serving() as served:
        status, error = await served.error(PATH, {"input": "a"})
    assert (status, error["code"]) == (400, "embeddings_not_supported") and "--pooling" in error["message"]


async def test_too_many_inputs() -> None:
    async with embedding(max_running=2, max_queue=2) as served:
        status, error = await served.error(PATH, {"input": ["a"] * 5})
    assert (status, error["code"]) == (400, "batch_too_large")


async def test_an_aborted_request_has_no_embedding() -> None:
    async with embedding() as served:
        served.ring.held = True
        sent = asyncio.ensure_future(served.error(PATH, {"input": "abc"}))
        await served.ring.until(lambda: served.ring.open)
        served.ring.finish(next(iter(served.ring.open)))
        status, error = await sent
        assert (status, error["code"], served.ring.open) == (503, "aborted", {})


# Real models


def as_embedding_model(path: Path, folder: Path, flag: str) -> Path:
    """Copy a checkpoint as sentence-transformers writes it: without the head, and with the modules' files."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    weights = {
        name.partition(".")[2]: tensor for name, tensor in load_file(file).items() if not name.startswith("lm_head")
    }
    save_file(weights, file)
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": n, "path": at, "type": f"sentence_transformers.models.{kind}"} for n, (kind, at) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = dict.fromkeys(("pooling_mode_mean_tokens", "pooling_mode_lasttoken", "pooling_mode_cls_token"), False)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags, flag: True}))
    return folder


def right_embeddings(oracle: Oracle, path: Path, pooling: str) -> list[Any]:
    """Return the right embedding of each of INPUTS."""
    states = [oracle.hidden(path, list(text.encode())).numpy()[POOLINGS[pooling]].mean(0) for text in INPUTS]
    return [state / np.linalg.norm(state) for state in states]


def ask(client: openai.OpenAI, inputs: Any, **more: Any) -> list[Any]:
    answer = client.embeddings.create(model="default", input=inputs, **more)
    return [np.array(item.embedding) for item in answer.data]


def cached_tokens(server: ServerProcess, text: str) -> int:
    status, answer = server.post(PATH, {"input": text})
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    ("name", "pooling"), [("lfm2", "mean"), ("mamba2", "last"), ("granitemoehybrid", "mean"), ("lfm2", "cls")]
)
def test_embeddings_are_those_of_transformers(oracle: Oracle, tmp_path: Path, name: str, pooling: str) -> None:
    """Steps of 32 tokens cut the long input into chunks. The same inputs again, and one by one, give the same vectors.

    Inputs come one by one first: the mean resumes from no state, and the last token's state is found in the cache.
    """
    path = oracle.checkpoint(name)
    flag = {"mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken", "cls": "pooling_mode_cls_token"}
    folder = as_embedding_model(path, tmp_path / "model", flag[pooling])
    expected = right_embeddings(oracle, path, pooling)
    options = ["--dtype", "float32", "--memory", "64M", "--max-model-len", "400", "--step-tokens", "32"]
    with ServerProcess([*SERVE, str(folder), *options]) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            singles = [ask(client, text)[0] for text in INPUTS]
            batch = ask(client, INPUTS)
            tokens = ask(client, [list(text.encode()) for text in INPUTS], encoding_format="float")
            short = ask(client, INPUTS, dimensions=8)
        cached = cached_tokens(server, INPUTS[1])
    assert cached == (len(INPUTS[1]) - 1 if pooling == "last" else 0)
    for found in (singles, batch, tokens):
        for vector, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(vector, right, atol=TOLERANCE)
    for vector, right in zip(short, expected, strict=True):
        np.testing.assert_allclose(vector, right[:8] / np.linalg.norm(right[:8]), atol=TOLERANCE)


def test_an_option_names_the_pooling_of_any_model(oracle: Oracle) -> None:
    path = oracle.checkpoint("mamba2")
    with ServerProcess([*SERVE, str(path), "--dtype", "float32", "--memory", "64M", "--pooling", "mean"]) as server:
        status, answer = server.post(PATH, {"input": INPUTS})
    assert status == 200, answer
    for item, right in zip(answer["data"], right_embeddings(oracle, path, "mean"), strict=True):
        np.testing.assert_allclose(item["embedding"], right, atol=TOLERANCE)

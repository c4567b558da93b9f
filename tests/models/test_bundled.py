from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from models.batch import Batch, Decode, Model, Pools, Prefill, allocate
from models.loading.checkpoint import load_model
from models.text.tokenizer import ModelText, load_text
from tests.models.oracle import Oracle

BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
PAGES = torch.arange(64, dtype=torch.int32)[None]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(BUNDLED, None, torch.device("cpu"))


@pytest.fixture(scope="module")
def text() -> ModelText:
    return load_text(BUNDLED)


def greedy(model: Model, ids: Sequence[int]) -> Iterator[int]:
    """The tokens that follow `ids`: one prefill, then the recurrence."""
    pools = allocate(model, slots=1, pages=PAGES.numel(), page_size=32, device=torch.device("cpu"))
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    batch = Batch(tokens, positions, Prefill([0, len(ids)], [0], [0], [], PAGES), None)
    while True:
        token = step(model, batch, pools)
        yield token
        positions = positions[-1:] + 1
        batch = Batch(torch.tensor([token]), positions, None, Decode(torch.tensor([0]), positions, PAGES))


@torch.inference_mode()
def step(model: Model, batch: Batch, pools: Pools) -> int:
    return int(model.logits(model.forward(batch, pools)[-1:]).argmax())


def chat(model: Model, text: ModelText, prompts: Sequence[str], system: str | None = None) -> list[str]:
    """The answers to the prompts, each given with all turns before it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        ids: list[int] = []
        for token in greedy(model, text.encode_chat(messages)[0]):
            if token in text.eos_ids or len(ids) == 150:
                break
            ids.append(token)
        answers.append(text.decode(ids))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
def test_a_first_chat(model: Model, text: ModelText, system: str | None) -> None:
    prompts = ["Hi!", "My name is Clara.", "What is 7 plus 5?", "what's my name?", "Who are you?"]
    greeting, met, total, name, itself = chat(model, text, prompts, system)
    assert "Hello" in greeting
    assert "Clara" in met
    assert total == "7 plus 5 is 12."
    assert name == "Your name is Clara."
    assert "small demonstration model" in itself


def test_typed_carelessly(model: Model, text: ModelText) -> None:
    answers = chat(model, text, ["my name is clara", "20+22", "thanks", "whats my name"])
    assert "42" in answers[1]
    assert "Clara" in answers[0] and "Clara" in answers[3]


def test_what_it_was_not_told_it_does_not_know(model: Model, text: ModelText) -> None:
    (answer,) = chat(model, text, ["What is my name?"])
    assert answer == "You have not told me your name yet."


def test_transformers_gives_the_same_answers(model: Model, text: ModelText, oracle: Oracle) -> None:
    messages = [{"role": "user", "content": "I'm Clara, what is 31 + 45?"}]
    ids, _ = text.encode_chat(messages)
    tokens = [token for token, _ in zip(greedy(model, ids), range(40), strict=False)]
    assert oracle.greedy(BUNDLED, ids, 40) == tokens


def test_the_folder_says_what_it_is_and_is_small(text: ModelText) -> None:
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) < 12_000_000
    assert text.eos_ids == (258, 256) and text.vocab_size == 259
    assert text.generation_defaults == {"temperature": 0.0}
    assert text.encode("é<|im_end|>") == [0xC3, 0xA9, 258]
    assert "| asked | right |" in (BUNDLED / "README.md").read_text(encoding="utf-8")


def test_ends_of_messages(text: ModelText) -> None:
    messages = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello!"}]
    ids, ends = text.encode_chat([*messages, {"role": "user", "content": "é"}])
    rendered = [text.render_chat(messages[:count], add_generation_prompt=False) for count in (1, 2)]
    assert [text.decode(ids[:end], skip_special_tokens=False) for end in ends[:2]] == rendered
    assert text.decode(ids[ends[2] :], skip_special_tokens=False) == "<|im_start|>assistant\n"

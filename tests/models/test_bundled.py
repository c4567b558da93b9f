from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.models.batch import Batch, Decode, Model, Pools, Prefill, allocate
from baton.models.loading.checkpoint import load_model
from baton.models.text.tokenizer import ModelText, load_text
from scripts.demo.chat import Chat, Tool
from scripts.demo.exams import WELL_FORMED, make_exam, read_call
from tests.kernels.installed import installed
from tests.models.oracle import Oracle

BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
PAGES = torch.arange(64, dtype=torch.int32)[None]
LONGEST = 150
# Results of these weights for single questions and after twelve turns, minus a margin for chance; LEAST in exams.py is
# the goal.
REACHED = {"recall": 0.94, "recall of a name": 0.98, "sums": 0.95, "tool calls": 0.92}


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(BUNDLED, None, torch.device("cpu"))


@pytest.fixture(scope="module")
def text() -> ModelText:
    return load_text(BUNDLED)


def greedy(model: Model, ids: Sequence[int]) -> Iterator[int]:
    """Yield the greedy tokens after `ids`: one prefill, then decoding steps."""
    pools = pools_of(model)
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    batch = Batch(tokens, positions, Prefill([0, len(ids)], [0], [0], [], PAGES), None)
    while True:
        token = int(guesses(model, batch, pools)[-1])
        yield token
        positions = positions[-1:] + 1
        batch = Batch(torch.tensor([token]), positions, None, Decode(torch.tensor([0]), positions, PAGES))


def pools_of(model: Model) -> Pools:
    return allocate(model, slots=1, pages=PAGES.numel(), page_size=32, device=torch.device("cpu"))


@torch.inference_mode()
def guesses(model: Model, batch: Batch, pools: Pools) -> list[int]:
    """Return the likeliest next token after each token."""
    return model.logits(model.forward(batch, pools)).argmax(-1).tolist()


def answer(model: Model, text: ModelText, messages: Sequence[Any], tools: Sequence[Any] = ()) -> str:
    ids: list[int] = []
    for token in greedy(model, text.encode_chat(messages, tools=list(tools))[0]):
        if token in text.eos_ids or len(ids) == LONGEST:
            break
        ids.append(token)
    return text.decode(ids)


def chat(model: Model, text: ModelText, prompts: Sequence[str], system: str | None = None) -> list[str]:
    """Return the answers to the prompts, each asked after all earlier turns."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        messages.append({"role": "assistant", "content": answer(model, text, messages)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
def test_a_first_chat(model: Model, text: ModelText, system: str | None) -> None:
    prompts = ["Hi!", "My name is Clara.", "What is 47 plus 38?", "what's my name?", "Who are you?"]
    assert chat(model, text, prompts, system) == [
        "Hello! How can I help you?",
        "Nice to meet you, Clara!",
        "47 plus 38 is 85.",
        "Your name is Clara.",
        "I am a small demonstration model of Baton.",
    ]


def test_careless_spelling(model: Model, text: ModelText) -> None:
    met, total, _, name = chat(model, text, ["my name is clara", "20+22", "thanks", "whats my name"])
    assert ("Clara" in met, total, name) == (True, "20 plus 22 is 42.", "Your name is Clara.")


def test_unknown_facts_are_not_invented(model: Model, text: ModelText) -> None:
    assert chat(model, text, ["What is my name?"]) == ["You have not told me your name yet."]


def test_the_last_statement_counts(model: Model, text: ModelText) -> None:
    prompts = ["I live in Bergen.", "What is 12 plus 7?", "Actually, I live in Krakow.", "Where do I live?"]
    assert chat(model, text, prompts)[-1] == "You live in Krakow."


def test_a_tool_is_called_and_its_result_reported(model: Model, text: ModelText) -> None:
    tool = Tool("book", "table", "Book a table.", {"guest": "string", "people": "integer"}).schema()
    messages: list[Any] = [{"role": "user", "content": "Please book a table for Clara for 4 people."}]
    called = read_call(answer(model, text, messages, [tool]))
    assert called == {"name": "book_table", "arguments": {"guest": "Clara", "people": 4}}
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": called}]})
    messages.append({"role": "tool", "content": '{"result": "window"}'})
    assert answer(model, text, messages, [tool]) == "Here is the result: window."


def question(exam: Chat, text: ModelText) -> tuple[list[int], list[int]]:
    """Return the tokens of the chat up to its last answer, and the tokens of that answer up to its end token."""
    messages, tools = exam.messages(), exam.schemas()
    prompt = text.encode_chat(messages[:-1], tools=tools)[0]
    whole = text.encode_chat(messages, add_generation_prompt=False, tools=tools)[0]
    assert whole[: len(prompt)] == prompt
    end = next(place for place in range(len(prompt), len(whole)) if whole[place] in text.eos_ids)
    return prompt, whole[len(prompt) : end + 1]


def knows(model: Model, prompt: list[int], right: list[int]) -> bool:
    """Return whether greedy decoding gives this answer: each token is the likeliest after those before it."""
    ids = prompt + right[:-1]
    prefill = Prefill([0, len(ids)], [0], [0], [], PAGES)
    batch = Batch(torch.tensor(ids), torch.arange(len(ids)), prefill, None)
    return guesses(model, batch, pools_of(model))[len(prompt) - 1 :] == right


@pytest.mark.parametrize("questions", [40, pytest.param(400, marks=pytest.mark.soak)])
@pytest.mark.parametrize("turns", [1, 12])
@pytest.mark.parametrize("name", REACHED)
def test_it_passes_its_examinations(model: Model, text: ModelText, name: str, turns: int, questions: int) -> None:
    """The share of right answers is at least REACHED; words, numbers and seeds do not occur in training."""
    right = well_formed = 0
    with installed():
        for number in range(questions):
            exam = make_exam(name, number, turns)
            passed = knows(model, *question(exam, text))
            right += passed
            if "tool_calls" in exam.messages()[-1]:
                messages = exam.messages()[:-1]
                well_formed += passed or read_call(answer(model, text, messages, exam.schemas())) is not None
    assert right >= REACHED[name] * questions
    assert name != "tool calls" or well_formed >= WELL_FORMED * questions


def test_transformers_gives_the_same_answers(model: Model, text: ModelText, oracle: Oracle) -> None:
    messages = [{"role": "user", "content": "I'm Clara, what is 31 + 45?"}]
    ids, _ = text.encode_chat(messages)
    tokens = [token for token, _ in zip(greedy(model, ids), range(40), strict=False)]
    assert oracle.greedy(BUNDLED, ids, 40) == tokens


def test_the_folder_is_documented_and_small(text: ModelText) -> None:
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) < 12_000_000
    assert text.eos_ids == (258, 256) and text.vocab_size == 768
    assert text.generation_defaults == {"temperature": 0.0}
    assert text.encode("é<|im_end|>") == [0xC3, 0xA9, 258]
    assert "| exam | turns | right |" in (BUNDLED / "README.md").read_text(encoding="utf-8")


def test_ends_of_messages(text: ModelText) -> None:
    messages = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello!"}]
    ids, ends = text.encode_chat([*messages, {"role": "user", "content": "é"}])
    rendered = [text.render_chat(messages[:count], add_generation_prompt=False) for count in (1, 2)]
    assert [text.decode(ids[:end], skip_special_tokens=False) for end in ends[:2]] == rendered
    assert text.decode(ids[ends[2] :], skip_special_tokens=False) == "<|im_start|>assistant\n"

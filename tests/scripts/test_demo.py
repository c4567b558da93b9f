"""The training of the bundled model: chats, tokens, batches, and a training that is stopped and resumed."""

import random
import re
from collections.abc import Sequence
from functools import cache
from itertools import chain, islice, pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.models.batch import Batch, Prefill, allocate
from baton.models.config import ModelConfig
from baton.models.loading.checkpoint import load_model
from baton.models.text.tokenizer import NEWEST_ENDS, ModelText, load_text
from scripts.demo import lessons, training as loop
from scripts.demo.chat import Chat
from scripts.demo.examining import examine
from scripts.demo.exams import EXAMS, LEAST, make_exam
from scripts.demo.export import config, export
from scripts.demo.lessons import LESSONS, Batches, Lesson, make_chat, tokenizer_of_the_world, weights_of
from scripts.demo.model import DemoModel, Size, scan
from scripts.demo.tasks import facts, lists, systems
from scripts.demo.text import IM_END, render
from scripts.demo.training import Training, rate
from scripts.demo.world import HELD_OUT, World, held_out_pair

TINY = Size(hidden=64, layers=("mamba", "attention"), mamba_heads=2, heads=2, kv_heads=2, intermediate=32)
SHORT = Lesson((1, 2), 128)


@cache
def words() -> Tokenizer:
    return tokenizer_of_the_world()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("tiny")
    export(DemoModel(TINY), words(), folder)
    return load_text(folder)


def chats(count: int) -> list[Chat]:
    return [make_chat(random.Random(f"test {number}"), LESSONS[-1][1]) for number in range(count)]


def test_training_shows_no_held_out_values() -> None:
    for chat in chats(400):
        text = render(chat.messages(), chat.schemas())
        shown = set(re.findall(r"[^\W\d_]+", text.lower()))
        assert not shown & HELD_OUT, text
        for a, b in re.findall(r"(\d+) (?:plus|minus) (\d+) is", text):
            assert not held_out_pair(int(a), int(b))


def test_exams_use_held_out_values() -> None:
    for number in range(40):
        [_, answer] = make_exam("sums", number, 1).messages()
        a, b = re.findall(r"\d+", answer["content"])[:2]
        assert held_out_pair(int(a), int(b))
        word = make_exam("spelling backwards", number, 1).messages()[1]["content"].split()[0]
        assert word in HELD_OUT
        name = make_exam("recall of a name", number, 4).known["name"]
        assert name.lower() in HELD_OUT


def test_the_latest_value_of_a_fact_counts() -> None:
    for number in range(60):
        chat = make_exam("recall of a corrected fact", number, 8)
        [value] = {value for value in chat.known.values() if chat.messages()[-1]["content"].endswith(f"{value}.")}
        later = [turn.messages[1]["content"] for turn in chat.turns[1:-1]]
        assert len(chat.turns) == 8 and any(value.lower() in answer.lower() for answer in later)
    chat = Chat(World(random.Random(1)))
    for _ in range(9):
        chat.turns.append(facts.tell_of(chat, ["place"]))
    answer = facts.ask_for(chat, ["place"]).messages[-1]["content"]
    assert (
        answer == f"You live in {chat.known['place']}."
        and chat.known["place"] in chat.turns[-1].messages[-1]["content"]
    )


def test_answers_are_right() -> None:
    for number in range(40):
        chat = Chat(World(random.Random(number)))
        *_, answer = lists.sort_numbers(chat).messages
        numbers = [int(each) for each in re.findall(r"\d+", answer["content"])]
        assert numbers == sorted(numbers)
        word, reverse = re.fullmatch(
            r"(\w+) backwards is (\w+)\.", lists.backwards(chat).messages[1]["content"]
        ).groups()  # type: ignore[union-attr]
        assert word[::-1] == reverse
        *letters, count = re.findall(r"\w+", lists.count_letters(chat).messages[1]["content"])[:-1]
        assert len(letters) == int(count)


def test_a_system_prompt_is_obeyed() -> None:
    seen = set()
    for number in range(80):
        chat = make_exam("system prompts", number, 3)
        answer = chat.messages()[-1]["content"]
        if chat.capitals:
            assert answer == answer.upper()
        elif not chat.may_calculate and chat.shown == list(systems.SUMS):
            assert answer == "I am not allowed to calculate."
        seen.add((chat.capitals, chat.may_calculate, chat.itself == Chat(chat.world).itself, chat.hello))
    assert len(seen) > 8


def test_a_tokenizer_of_words_and_bytes(text: ModelText) -> None:
    assert text.vocab_size == 768 and text.eos_ids == (IM_END, 256) and text.max_token_bytes is not None
    assert text.encode("é<|im_end|>") == [0xC3, 0xA9, 258]
    assert len(text.encode(" favourite colour")) == 2
    for word in ("Clara", " crimson", " 4711", " garden"):
        assert len(text.encode(word)) == len(word.encode())
    for chat in chats(40):
        whole = render(chat.messages(), chat.schemas())
        assert text.decode(text.encode(whole), skip_special_tokens=False) == whole
    assert text.decode(text.encode("<tool_call>\n{}</tool_call><|im_end|>")) == "<tool_call>\n{}</tool_call>"


def test_message_ends_are_found(text: ModelText) -> None:
    chat = next(chat for chat in chats(40) if chat.tools and len(chat.turns) > 3)
    messages = chat.messages()
    ids, ends = text.encode_chat(messages, tools=chat.schemas())
    assert len(ends) == min(1 + NEWEST_ENDS, len(messages))
    assert all(ids[end - 2] == IM_END for end in ends)


def test_only_answers_have_full_weight(text: ModelText) -> None:
    chat = next(chat for chat in chats(40) if chat.system and len(chat.turns) > 1)
    ids = text.encode(render(chat.messages(), chat.schemas()))
    weights = weights_of(ids, text.encode("assistant")[0])
    answers = [[]]
    for token, weight in zip(ids, weights, strict=True):
        if weight == 1:
            answers[-1].append(token)
            if token == IM_END:
                answers.append([])
    decoded = [text.decode(each) for each in answers[:-1]]
    expected = [m["content"] for m in chat.messages() if m["role"] == "assistant" and not m.get("tool_calls")]
    assert [each for each in decoded if not each.startswith("<tool_call>")] == expected


def test_the_scan_is_the_recurrence() -> None:
    torch.manual_seed(0)
    x, dt, rates = torch.randn(2, 192, 3, 8), torch.rand(2, 192, 3) / 5, -torch.rand(3) * 3
    b, c = torch.randn(2, 192, 5), torch.randn(2, 192, 5)
    state, rows = torch.zeros(2, 3, 8, 5), list[Tensor]()
    for t in range(192):
        step = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, None, None, :]
        state = state * (dt[:, t] * rates).exp()[..., None, None] + step
        rows.append((state * c[:, t, None, None, :]).sum(-1))
    torch.testing.assert_close(scan(x, dt, rates, b, c, 64), torch.stack(rows, 1), rtol=1e-4, atol=1e-4)


def training(monkeypatch: pytest.MonkeyPatch, tokens: int, seed: int = 1) -> Training:
    monkeypatch.setattr(loop, "WARM_UP", 2)
    monkeypatch.setattr(lessons, "POOL", 24)
    monkeypatch.setattr(lessons, "PART_TOKENS", 256)
    torch.manual_seed(seed)
    model = DemoModel(TINY)
    made = Training(model, Batches(words(), seed), tokens, model, autocast=False)
    monkeypatch.setattr(made, "_lesson", lambda: (SHORT, tokens))
    return made


def test_batches_can_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training(monkeypatch, 1).batches
    first = list(islice(made.of(SHORT), 12))
    assert made.pool > 0
    again = Batches(made.tokenizer, 1)
    list(islice(again.of(SHORT), 5))
    rest = Batches(made.tokenizer, 1, pool=again.pool, batch=again.batch)
    parts = zip(chain(*first[5:]), chain.from_iterable(rest.of(SHORT)), strict=False)
    for (ids, weights), (other, others) in parts:
        assert torch.equal(ids, other) and torch.equal(weights, others)
        assert ids.shape[1] % 64 == 1 and ids.shape[0] * (ids.shape[1] - 1) <= 256
    assert not torch.equal(first[0][0][0], next(Batches(made.tokenizer, 2).of(SHORT))[0][0])


def test_a_step_learns_from_all_parts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training(monkeypatch, 1)
    [parts] = islice(made.batches.of(SHORT), 1)
    assert len(parts) == lessons.PARTS == 2
    model = DemoModel(TINY)
    model.load_state_dict(made.model.state_dict())
    losses, weights = zip(*((losses_of(model, ids), weights[:, 1:].flatten()) for ids, weights in parts), strict=True)
    both, weight = torch.cat(losses), torch.cat(weights)
    ((both * weight).sum() / weight.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert made._learn(parts) == pytest.approx(float(both[weight == 1].mean().detach()), rel=1e-4)
    for learnt, parameter in zip(made.model.parameters(), model.parameters(), strict=True):
        assert learnt.grad is not None and parameter.grad is not None
        torch.testing.assert_close(learnt.grad, parameter.grad, rtol=1e-3, atol=1e-6)


def losses_of(model: DemoModel, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


def test_a_resumed_training_gives_the_same_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = training(monkeypatch, 6_000)
    losses = list[float]()
    learn = whole._learn

    def stopping(parts: Sequence[tuple[Tensor, Tensor]]) -> float:
        losses.append(learn(parts))
        if whole.step == 6:
            whole.save(tmp_path / "half.pt")
        return losses[-1]

    monkeypatch.setattr(whole, "_learn", stopping)
    whole.run(tmp_path / "whole.pt")
    assert losses[-1] < 0.9 * losses[0]
    rest = training(monkeypatch, 6_000)
    rest.resume(tmp_path / "half.pt")
    assert rest.step == 6
    rest.run(tmp_path / "rest.pt")
    assert rest.seen == whole.seen and rest.step == whole.step
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, rest.model.state_dict()[name]), name
    with pytest.raises(ValueError, match="another training"):
        training(monkeypatch, 7_000).resume(tmp_path / "half.pt")


def test_the_learning_rate_rises_stays_and_falls() -> None:
    rates = [rate(step, step / 1000) for step in range(1000)]
    assert rates[0] < 0.02 and rates[300] == 1 and 0.01 <= rates[-1] < 0.02
    assert all(later <= earlier for earlier, later in pairwise(rates[200:]))


@torch.inference_mode()
def test_the_server_computes_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = DemoModel(TINY)
    export(trained, words(), tmp_path)
    served = load_model(tmp_path, None, torch.device("cpu"))
    ids, pages = torch.randint(0, TINY.vocab, (150,)), torch.arange(8, dtype=torch.int32)[None]
    pools = allocate(served, slots=1, pages=8, page_size=32, device=torch.device("cpu"))
    batch = Batch(ids, torch.arange(150), Prefill([0, 150], [0], [0], [], pages), None)
    logits = served.logits(served.forward(batch, pools))
    torch.testing.assert_close(logits, trained(ids[None])[0], rtol=1e-4, atol=1e-4)


def test_exams_of_an_untrained_model(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    results = examine(DemoModel(TINY), words(), 2)
    assert len(results) == 2 * len(EXAMS) == len(capsys.readouterr().out.splitlines())
    assert all(right == 0 and total == (6 if name in LEAST else 2) for name, _, right, total in results)


def test_the_config_is_a_dense_hybrid_of_its_family() -> None:
    made = ModelConfig(config(Size()))
    assert made.integer("num_local_experts", least=0) == 0 and made.integer("vocab_size") == 768
    assert made.strings("layer_types") == list(Size().layers)

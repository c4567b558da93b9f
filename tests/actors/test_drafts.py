"""Drafts in the ring with small random models: the same tokens, log probabilities and states as without drafts."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.actors.cache.radix import path_to_root
from baton.actors.requests import Request, Sampling
from baton.actors.results.drafters import Drafters, draft
from baton.actors.results.interfaces import Drafter
from baton.actors.scheduler import drafts as planning, predictions
from baton.actors.scheduler.strategy import Strategy
from baton.actors.tokens import unpack
from baton.models.batch import Model
from baton.models.loading.checkpoint import load_model, random_model
from tests.actors.ring import Answer, running
from tests.actors.test_ring import FAMILIES, MODELS, VOCABULARY, prompts
from tests.kernels.installed import installed
from tests.models.predictable import write_predictable

SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=3, logit_bias={5: 3.0}),
    Sampling(temperature=1.0, seed=4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
)


class Foretelling:
    """A Proposer that knows an earlier answer to the same prompt, and errs at every `wrong`-th token."""

    name = "foretelling"

    def __init__(self, answer: Sequence[int], history: Sequence[int], prompt_len: int, wrong: int) -> None:
        self._answer, self._at, self._wrong = answer, len(history) - prompt_len, wrong

    def push(self, token: int) -> None:
        self._at += 1

    def propose(self, most: int) -> tuple[list[int], float]:
        ahead = list(enumerate(self._answer))[self._at : self._at + most]
        return [(token + (at % self._wrong == 0)) % VOCABULARY for at, token in ahead], 0.9


def foretold(answers: list[Answer], wrong: int) -> Callable[[Request, Sequence[int]], Drafter]:
    """Return a Draft for requests that repeat the prompts and seeds of `answers`."""
    known = {(answer.request.tokens, answer.request.sampling.seed): answer.tokens for answer in answers}

    def draft(request: Request, history: Sequence[int]) -> Drafter:
        prompt = request.tokens[: 4 * request.prompt_len]
        own = Foretelling(known[prompt, request.sampling.seed], history, request.prompt_len, wrong)
        return Drafters([own], None)

    return draft


@pytest.fixture(autouse=True)
def native_kernels() -> Iterator[None]:
    """Compute with native code, whose bits do not depend on what else is in a step."""
    with installed(threads=2):
        yield


async def ask_all(model: Model, count: int = 6, output: int = 24, **options: object) -> tuple[list[Answer], int, dict]:
    """Run the same requests. Return their answers, the number of accepted drafts, and the kept states by their path."""
    async with running(
        model, slots=40, pages=160, step_tokens=512, step_time=60.0, track_interval=8, **options
    ) as ring:
        answers = []
        for at, prompt in enumerate(prompts(3, count, 60)):
            sampling = SAMPLINGS[at % len(SAMPLINGS)]
            answers.append(ring.submit(prompt, output, sampling, logprobs=2))
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        async with asyncio.timeout(30):
            while ring.relay.unit.cache.accounts:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        states = {}
        for node in ring.relay.unit.cache.tree.states:
            path = b"".join(step.tokens for step in reversed(list(path_to_root(node))))
            assert node.state is not None
            states[path] = [tensor[node.state.slot].clone() for tensor in ring.pools.state]
        counters = ring.relay.unit.results.counters
        accepted = sum(count for name, count in counters.items() if name.startswith("drafts_accepted:"))
        return answers, accepted, states


def compare(family: str, wrong: int, drafts: int, **options: object) -> None:
    """Compare requests with and without drafts: tokens, log probabilities, and the bits of states on equal paths."""

    model = random_model(FAMILIES[family], torch.float32, torch.device("cpu"), seed=1)
    compare_with(model, lambda plain: {"draft": foretold(plain, wrong), "drafts": drafts}, **options)


def compare_with(model: Model, speculating: Callable[[list[Answer]], dict[str, Any]], **options: object) -> None:
    """Compare requests with and without drafts. speculating: the ring's options for drafts, given right answers."""

    async def scenario() -> None:
        plain, none, states = await ask_all(model, **options)
        drafted, accepted, found = await ask_all(model, **speculating(plain), **options)
        assert none == 0 and accepted > 30
        for answer, other in zip(plain, drafted, strict=True):
            assert (answer.tokens, answer.end) == (other.tokens, other.end)
            assert answer.logprobs == other.logprobs
        shared = states.keys() & found.keys()
        assert len(shared) >= len(plain), "at least the ends"
        for path in shared:
            for state, other in zip(states[path], found[path], strict=True):
                assert torch.equal(state, other), f"after {len(unpack(path))} tokens"

    asyncio.run(scenario())


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps feed all drafts that are proposed: for models as small as these, drafts would not pay."""
    monkeypatch.setattr(planning, "costs", lambda state, step: (1.0, 0.0, 0.0))
    monkeypatch.setattr(predictions, "best_number", lambda state, rows, all_rows: state.limits.predictions)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("wrong", [3, 1000])
def test_tokens_log_probabilities_and_states_are_those_without_drafts(family: str, wrong: int) -> None:
    compare(family, wrong, 4)


@pytest.mark.parametrize(("number", "depth"), [(1, 1), (3, 2)])
def test_so_they_are_with_what_a_head_predicts(tmp_path: Path, number: int, depth: int) -> None:
    folder = write_predictable(tmp_path, VOCABULARY)
    model = load_model(folder, None, torch.device("cpu"), on_headless=print)
    compare_with(model, lambda plain: {"draft": draft("mtp"), "drafts": 4, "predictions": number}, depth=depth)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafts", [1, 8, 16])
@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("depth", [1, 2])
def test_every_family_and_strategy(family: str, drafts: int, strategy: Strategy, depth: int) -> None:
    compare(family, 5, drafts, strategy=strategy, depth=depth)

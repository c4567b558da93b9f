"""The ring with small random models: tokens, log probabilities and states equal those of a plain forward pass."""

import asyncio
import functools
import math
import random
import time

import pytest
import torch

from baton.actors.cache.radix import path_to_root
from baton.actors.requests import Sampling, Stops
from baton.actors.tokens import unpack
from baton.models.batch import Batch, Model, Pools, Prefill, allocate
from baton.models.hash import HashModel
from baton.models.hash_definition import expected_output
from baton.models.loading.checkpoint import random_model
from tests.actors.ring import Ring, running
from tests.models.oracle import settings_of

MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 1,
    "vocab_size": 97,
    "chunk_size": 16,
    "expand": 2,
    "tie_word_embeddings": True,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hidden_size": 32,
    "hybrid_override_pattern": "M-M*M-",
    "num_hidden_layers": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "mlp_hidden_act": "relu2",
    "vocab_size": 97,
    "chunk_size": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
VOCABULARY = 97
MODELS = {"mamba2": MAMBA2, "nemotron_h": NEMOTRON_H, "qwen3_next": settings_of("qwen3_next-moe", VOCABULARY)}
OTHERS = (
    "granitemoehybrid-moe",
    "bamba",
    "falcon_h1",
    "nemotron_h-moe-latent",
    "qwen3_5_moe",
    "kimi_linear-moe",
    "lfm2_moe",
    "olmo_hybrid",
    "bailing_hybrid",
)
FAMILIES = MODELS | {name: settings_of(name, VOCABULARY) for name in OTHERS}


@functools.cache
def small(family: str) -> Model:
    return random_model(FAMILIES[family], torch.float32, torch.device("cpu"), seed=1)


def logits_of(model: Model, tokens: list[int]) -> torch.Tensor:
    """Return the logits after every token, from one pass over the whole sequence."""
    pages = -(-len(tokens) // 16) if model.kv_specs() else 0
    pools = allocate(model, 1, pages, 16, torch.device("cpu"))
    table = torch.arange(pages, dtype=torch.int32)[None]
    with torch.inference_mode():
        prefill = Prefill([0, len(tokens)], [0], [0], [], table)
        batch = Batch(torch.tensor(tokens), torch.arange(len(tokens)), prefill, None)
        return model.logits(model.forward(batch, pools))


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def prompts(seed: int, count: int, longest: int = 120) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_tokens_of_concurrent_prompts(family: str, depth: int) -> None:
    model = small(family)

    async def scenario() -> None:
        async with running(model, depth=depth, step_tokens=70, track_interval=8) as ring:
            answers = [ring.submit(prompt, 6) for prompt in prompts(3, 16)]
            await asyncio.gather(*(answer.done.wait() for answer in answers))
            for answer in answers:
                assert answer.end == "length"
                assert answer.tokens == greedy(model, answer.prompt, 6)

    asyncio.run(scenario())


@pytest.mark.parametrize("family", [*MODELS, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)])
def test_every_state_in_the_tree_is_that_of_its_path(family: str) -> None:
    """Run turns, branches and aborts. Each cached state must equal the state of a token-by-token run over its path."""
    model = small(family)

    async def scenario() -> None:
        async with running(model, slots=24, pages=96, max_running=6, step_tokens=48, track_interval=8) as ring:
            await multi_turn(ring, conversations=5, turns=4)
            assert len(ring.relay.unit.cache.tree.states) > 10
            for node in ring.relay.unit.cache.tree.states:
                tokens = unpack(b"".join(step.tokens for step in reversed(list(path_to_root(node)))))
                assert node.state is not None
                compare_state(ring, node.state.slot, tokens)

    asyncio.run(scenario())


def compare_state(ring: Ring, slot: int, tokens: list[int]) -> None:
    model = ring.model
    pages = -(-len(tokens) // 16) if model.kv_specs() else 0
    pools = allocate(model, 1, pages, 16, torch.device("cpu"))
    table = torch.arange(pages, dtype=torch.int32)[None]
    with torch.inference_mode():
        for position, token in enumerate(tokens):
            prefill = Prefill([0, 1], [position], [0], [], table)
            model.forward(Batch(torch.tensor([token]), torch.tensor([position]), prefill, None), pools)
    for held, expected in zip(ring.pools.state, pools.state, strict=True):
        torch.testing.assert_close(held[slot], expected[0], atol=1e-4, rtol=1e-4)


async def multi_turn(ring: Ring, conversations: int, turns: int) -> None:
    """Run conversations that share a prefix; one in five requests is aborted."""
    rng = random.Random(5)
    shared = prompts(8, 1, 40)[0]
    histories = [shared + prompt for prompt in prompts(9, conversations, 40)]

    async def converse(history: list[int]) -> None:
        for _ in range(turns):
            answer = ring.submit(list(history), rng.randint(1, 20))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.05)
                ring.abort(next(name for name, known in ring.answers.items() if known is answer))
            await asyncio.wait_for(answer.done.wait(), 60)
            history += answer.tokens + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]

    await asyncio.gather(*map(converse, histories))


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_with_and_without_cache_are_equal(family: str) -> None:
    """The KL divergence between log probabilities computed from cached states and from scratch is below 1e-6."""
    model = small(family)

    async def scenario() -> None:
        async with running(model, slots=32, pages=96, step_tokens=64) as ring:
            cached = await turns_with_logprobs(ring, flush=False)
            cold = await turns_with_logprobs(ring, flush=True)
        reused = sum(answer.cached for answer in cached)
        assert reused > 0.5 * sum(len(answer.prompt) for answer in cached)
        assert all(answer.cached == 0 for answer in cold)
        ratios = []
        for warm, fresh in zip(cached, cold, strict=True):
            assert warm.prompt == fresh.prompt and warm.tokens == fresh.tokens
            for a, b in zip(warm.logprobs, fresh.logprobs, strict=True):
                assert a.logprob is not None and b.logprob is not None
                ratios.append(a.logprob - b.logprob)
        assert sum(math.exp(r) - 1 - r for r in ratios) / len(ratios) < 1e-6

    async def turns_with_logprobs(ring: Ring, flush: bool) -> list:
        answers = []
        for history in prompts(11, 4, 60):
            for extra in prompts(12, 5, 12):
                if flush:
                    await ring.flush()
                answers.append(await ring.ask(list(history), 12, logprobs=0))
                history += answers[-1].tokens + extra
        return answers

    asyncio.run(scenario())


@pytest.mark.parametrize("family", MODELS)
def test_branching(family: str) -> None:
    """Three prompts share 257 tokens.

    The second request saves a checkpoint at the branch, and the third resumes there.
    """
    rng = random.Random(2)
    shared = [rng.randrange(VOCABULARY) for _ in range(257)]
    suffixes = [[start, *(rng.randrange(VOCABULARY) for _ in range(63))] for start in (1, 2, 3)]

    async def scenario() -> None:
        async with running(small(family), pages=128) as ring:
            assert [(await ring.ask(shared + suffix, 4)).cached for suffix in suffixes] == [0, 0, 257]

    asyncio.run(scenario())


@pytest.mark.parametrize("family", MODELS)
def test_log_probabilities_of_prompt_and_output(family: str) -> None:
    model = small(family)
    prompt = prompts(4, 1)[0] * 2

    async def scenario() -> None:
        async with running(model, step_tokens=50, pages=128) as ring:
            for start in (0, 1, 30):
                ids = (5, 96, 5)
                beside = ring.submit(list(prompt), 5, logprobs=0, prompt_logprobs_from=start)
                answer = await ring.ask(list(prompt), 5, logprobs=3, prompt_logprobs_from=start, logprob_ids=ids)
                await asyncio.wait_for(beside.done.wait(), 60)
                assert not any(item.id_logprobs for item in beside.prompt_logprobs + beside.logprobs)
                expected = torch.log_softmax(logits_of(model, prompt + answer.tokens), -1)
                items = answer.prompt_logprobs + answer.logprobs
                assert [item.token for item in items] == (prompt + answer.tokens)[start:]
                for index, item in enumerate(items, start):
                    if index == 0:
                        assert item.logprob is None and not item.id_logprobs
                        continue
                    assert item.id_logprobs == pytest.approx(expected[index - 1, list(ids)].tolist(), abs=1e-4)
                    assert item.logprob == pytest.approx(float(expected[index - 1, item.token]), abs=1e-4)
                    values = [value for _, value in item.top]
                    assert values == pytest.approx(expected[index - 1].topk(3).values.tolist(), abs=1e-4)

    asyncio.run(scenario())


def test_a_seeded_request_draws_the_same_alone_and_in_a_crowd() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=1234)

    async def scenario() -> None:
        async with running(small("mamba2"), max_running=12) as ring:
            alone = await ring.ask([5, 6, 7], 20, sampling=sampling)
            await ring.flush()
            crowd = [ring.submit(prompt, 20, sampling=Sampling(seed=9)) for prompt in prompts(6, 10)]
            again = await ring.ask([5, 6, 7], 20, sampling=sampling)
            other = await ring.ask([5, 6, 7], 20, sampling=Sampling(temperature=1.0, top_p=0.9, seed=99))
            assert again.tokens == alone.tokens != other.tokens
            await asyncio.gather(*(answer.done.wait() for answer in crowd))

    asyncio.run(scenario())


def test_penalties_biases_and_min_tokens() -> None:
    model = small("mamba2")
    first = greedy(model, [3, 4, 5], 1)[0]

    async def scenario() -> None:
        async with running(model) as ring:
            biased = await ring.ask([3, 4, 5], 6, sampling=Sampling(temperature=0.0, logit_bias={41: 1e4}))
            assert biased.tokens == [41] * 6
            once = Sampling(temperature=0.0, logit_bias={41: 1e4, 42: 7e3}, frequency_penalty=6e3)
            assert (await ring.ask([3, 4, 5], 4, sampling=once)).tokens == [41, 42, 41, 42]
            seen = Sampling(temperature=0.0, logit_bias={41: 1e4, 42: 7e3}, presence_penalty=6e3)
            assert (await ring.ask([3, 4, 5], 3, sampling=seen)).tokens == [41, 42, 41]
            stops = Stops(10, token_ids=(first,))
            assert (await ring.ask([3, 4, 5], stops=stops)).tokens == [first]
            late = await ring.ask([3, 4, 5], stops=Stops(10, min_tokens=4, token_ids=(first,)))
            assert first not in late.tokens[:4] and len(late.tokens) >= 4

    asyncio.run(scenario())


@pytest.mark.parametrize("codec_check", [False, True])
@pytest.mark.parametrize("page_fold", [False, True])
def test_the_hash_model_under_pressure(codec_check: bool, page_fold: bool) -> None:
    """The pools are so small that states are evicted and rows retracted. Every token must equal the oracle's."""
    model = HashModel(vocab_size=61, chunk_size=8, max_position=1024, page_fold=page_fold)

    async def scenario() -> None:
        small_pools = {"slots": 5, "pages": 24, "page_size": 4, "max_running": 4}
        async with running(model, **small_pools, step_tokens=32, track_interval=8, codec_check=codec_check) as ring:
            answers = [ring.submit([t % 61 for t in prompt], 17) for prompt in prompts(7, 40, 60)]
            for answer in answers:
                await asyncio.wait_for(answer.done.wait(), 60)
                assert answer.tokens == expected_output(answer.prompt, 17, 61, page_fold=page_fold)
            if page_fold:
                assert ring.relay.counters()["rows_retracted"] > 0

    asyncio.run(scenario())


class SlowHash(HashModel):
    def forward(self, batch: Batch, pools: Pools) -> torch.Tensor:
        time.sleep(0.01)
        return super().forward(batch, pools)


def test_a_next_turn_sent_at_once_resumes_from_the_last_turn_s_state() -> None:
    """The client gets the last token before the state is in the tree, so the next turn may arrive before the state."""
    model = SlowHash(vocab_size=61, chunk_size=8, max_position=1024, page_fold=True)

    async def scenario() -> None:
        async with running(model) as ring:
            history, length = [5, 6, 7], 0
            for _ in range(6):
                answer = await ring.ask(list(history), stops=Stops(40, token_ids=tuple(range(0, 61, 2))))
                # The state lacks the last token if no further step was in flight, as can happen on a busy machine.
                assert length - 1 <= answer.cached <= length
                history += answer.tokens
                length = len(history)
                history += [1, 3, 5, 7]

    asyncio.run(scenario())

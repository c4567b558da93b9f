"""States stored in bfloat16: half the memory; computed in float32, and rounded only where they are stored."""

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.models.batch import Batch, Decode, Model, Pools, Prefill, StateCheckpoint, allocate
from baton.models.loading.checkpoint import load_model
from baton.models.text.tokenizer import load_text
from tests.kernels.installed import installed

BUNDLED = Path(__file__).parents[2] / "models" / "bundled"
CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16
PAGES = torch.arange(32, dtype=torch.int32)[None]
LENGTH = 300
FORMS = pytest.mark.parametrize("form", [nullcontext, installed], ids=["torch", "native"])


def bundled(states: torch.dtype) -> Model:
    return load_model(BUNDLED, None, CPU, state_dtype=states)


def make_pools(model: Model, slots: int = 2) -> Pools:
    return allocate(model, slots, PAGES.numel(), 32, CPU)


@torch.inference_mode()
def feed(
    model: Model, pools: Pools, tokens: Tensor, start: int, slot: int, checkpoints: list[StateCheckpoint] | None = None
) -> Tensor:
    """Return the logits after each of the tokens, which are fed as one segment from position `start` on."""
    prefill = Prefill([0, len(tokens)], [start], [slot], checkpoints or [], PAGES)
    positions = torch.arange(start, start + len(tokens))
    return model.logits(model.forward(Batch(tokens, positions, prefill, None), pools))


@torch.inference_mode()
def decode(model: Model, pools: Pools, token: int, position: int) -> Tensor:
    positions = torch.tensor([position])
    batch = Batch(torch.tensor([token]), positions, None, Decode(torch.tensor([0]), positions, PAGES))
    return model.logits(model.forward(batch, pools))


def text_ids(length: int) -> Tensor:
    text = "My name is Clara. What is 7 plus 5? Who are you? What is my name? Tell me what you know. " * 9
    return torch.tensor(load_text(BUNDLED).encode(text)[:length])


def divergence(exact: Tensor, found: Tensor) -> Tensor:
    """Return KL(exact ‖ found) for each row, in nats."""
    p, q = exact.double().log_softmax(-1), found.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def test_a_slot_holds_half_as_much() -> None:
    wide, narrow = bundled(F32).state_specs(), bundled(BF16).state_specs()
    assert [spec.dtype for spec in narrow] == [F32, BF16] * (len(wide) // 2)
    assert [spec.nbytes for spec in narrow] == [spec.nbytes // (1 + index % 2) for index, spec in enumerate(wide)]


@FORMS
def test_a_whole_prompt_gives_the_same_bits_and_leaves_the_rounded_states(form: type) -> None:
    """Within one segment nothing is rounded, neither between chunks nor after a checkpoint."""
    with form():
        wide, narrow = bundled(F32), bundled(BF16)
        exact, rounded = make_pools(wide), make_pools(narrow)
        checkpoints = [StateCheckpoint(0, 101, 1)]
        expected = feed(wide, exact, text_ids(LENGTH), 0, 0, checkpoints)
        assert torch.equal(feed(narrow, rounded, text_ids(LENGTH), 0, 0, checkpoints), expected)
    for stored, full in zip(rounded.state, exact.state, strict=True):
        assert torch.equal(stored, full.to(stored.dtype))


@FORMS
@pytest.mark.parametrize("cuts", [[0, 101, LENGTH], [0, 64, 128, 192, 256, LENGTH]], ids=["resumed", "chunks"])
def test_the_state_is_rounded_where_a_prompt_is_cut_and_the_answer_stays_near(form: type, cuts: list[int]) -> None:
    with form():
        model = bundled(BF16)
        pools, again = make_pools(model), make_pools(model)
        whole = feed(model, pools, text_ids(LENGTH), 0, 0)
        parts = [feed(model, again, text_ids(LENGTH)[a:b], a, 0) for a, b in pairwise(cuts)]
    torch.testing.assert_close(parts[0], whole[: cuts[1]], rtol=1e-4, atol=1e-4)
    errors = divergence(whole, torch.cat(parts))[cuts[1] :]
    assert 0 < errors.mean() < 1e-4 and errors.max() < 1e-2


@FORMS
def test_resuming_from_a_checkpoint_gives_the_bits_of_a_prompt_cut_there(form: type) -> None:
    with form():
        model, tokens = bundled(BF16), text_ids(LENGTH)
        cold, cached = make_pools(model), make_pools(model)
        feed(model, cold, tokens[:128], 0, 0)
        feed(model, cached, tokens, 0, 0, [StateCheckpoint(0, 128, 1)])
        cached.copy(1, 0)
        assert torch.equal(feed(model, cached, tokens[128:], 128, 0), feed(model, cold, tokens[128:], 128, 0))
    for found, expected in zip(cached.state, cold.state, strict=True):
        assert torch.equal(found[0], expected[0])


def test_the_error_does_not_accumulate_over_decoded_tokens() -> None:
    """With stochastic rounding, the divergence at the last 50 tokens is 7e-6 on average."""
    with installed():
        wide, narrow = bundled(F32), bundled(BF16)
        exact, rounded = make_pools(wide), make_pools(narrow)
        tokens = text_ids(LENGTH).tolist()
        pairs = [
            (decode(wide, exact, token, at), decode(narrow, rounded, token, at)) for at, token in enumerate(tokens)
        ]
    errors = divergence(*(torch.cat(side)[-50:] for side in zip(*pairs, strict=True)))
    assert 0 < errors.mean() < 1e-5


def test_native_code_and_torch_give_the_same_greedy_tokens() -> None:
    answers = []
    for form in (nullcontext, installed):
        with form():
            model = bundled(BF16)
            pools, prompt = make_pools(model), load_text(BUNDLED).encode_chat([{"role": "user", "content": "Hi!"}])[0]
            answer = [int(feed(model, pools, torch.tensor(prompt), 0, 0)[-1].argmax())]
            for position in range(len(prompt), len(prompt) + 60):
                answer.append(int(decode(model, pools, answer[-1], position).argmax()))
            answers.append(answer)
    assert answers[0] == answers[1]

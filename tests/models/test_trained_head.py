"""A head for multi-token prediction that is trained on what its model writes, as published heads are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from baton.models.batch import Batch, Decode, Prefill, allocate
from baton.models.decoder import Decoder
from baton.models.loading.checkpoint import load_model
from tests.models.heads import Definition, definition_of
from tests.models.predictable import write_predictable

CPU, VOCABULARY, LENGTH, SEQUENCES, HELD_OUT, STEPS = torch.device("cpu"), 60, 48, 40, 8, 300


def load(folder: Path) -> Decoder:
    model = load_model(folder, torch.float32, CPU, on_headless=print)
    assert isinstance(model, Decoder)
    return model


def written(model: Decoder) -> tuple[Tensor, Tensor]:
    """Return greedy continuations of random tokens, int64 [SEQUENCES, LENGTH], and their hidden states."""
    pools = allocate(model, SEQUENCES, SEQUENCES, LENGTH, CPU)
    rows, table = torch.arange(SEQUENCES), torch.arange(SEQUENCES, dtype=torch.int32)[:, None]
    tokens = [torch.randint(0, VOCABULARY, (SEQUENCES,), generator=torch.Generator().manual_seed(1))]
    hidden = list[Tensor]()
    for position in range(LENGTH):
        at = torch.full((SEQUENCES,), position)
        hidden.append(model.forward(Batch(tokens[-1], at, None, Decode(rows, at, table)), pools).clone())
        tokens.append(model.logits(hidden[-1]).argmax(-1))
    return torch.stack(tokens[:-1], 1), torch.stack(hidden, 1)


def train(definition: Definition, head: Tensor, tokens: Tensor, hidden: Tensor) -> None:
    """Train the definition's weights to predict, from a token and the state before it, the token after it."""
    for weight in definition.weights.values():
        weight.requires_grad_()
    adam = torch.optim.Adam(definition.weights.values(), lr=3e-3)
    for step in range(STEPS):
        of = step % (SEQUENCES - HELD_OUT)
        states = definition.hidden(tokens[of, 1:-1].tolist(), hidden[of, :-2])
        loss = F.cross_entropy(states @ head.T, tokens[of, 2:])
        adam.zero_grad()
        loss.backward()
        adam.step()


def accuracy(model: Decoder, tokens: Tensor, hidden: Tensor) -> list[float]:
    """Return how many of the first and of the second predicted tokens are right."""
    right = torch.zeros(2)
    for sequence, states in zip(tokens, hidden, strict=True):
        pools, table = allocate(model, 1, 1, LENGTH, CPU), torch.zeros(1, 1, dtype=torch.int32)
        for end in range(1, LENGTH - 2):
            prompt = Prefill([0, 1], [end - 1], [0], [], table)
            batch = Batch(sequence[end - 1 : end], torch.tensor([end - 1]), prompt, None)
            plan = model.plan(batch, pools)
            model.observe(model.embed(batch.tokens), states[end - 1 : end], plan)
            token, state = sequence[end : end + 1], states[end - 1 : end]
            for number in range(2):
                at = torch.tensor([end + number])
                state = model.predict(token, state, Decode(at, at, table), pools)
                token = model.logits(state).argmax(-1)
                right[number] += bool(token == sequence[end + 1 + number])
    return (right / len(tokens) / (LENGTH - 3)).tolist()


@pytest.mark.soak
def test_a_head_learns_what_its_model_writes(tmp_path: Path) -> None:
    folder = write_predictable(tmp_path, VOCABULARY, layers=4, little=0.6)
    tokens, hidden = written(load(folder))
    held_out = tokens[-HELD_OUT:], hidden[-HELD_OUT:]
    before = accuracy(load(folder), *held_out)
    definition, held = definition_of(folder), load_file(folder / "model.safetensors")
    train(definition, held["lm_head.weight"].double(), tokens, hidden.double())
    learned = {f"mtp.{name}.weight": weight.detach().float() for name, weight in definition.weights.items()}
    save_file(held | learned, folder / "model.safetensors")
    after = accuracy(load(folder), *held_out)
    assert after[0] > 0.65 > 0.45 > before[0], (before, after)
    assert after[1] > 0.4 > 0.2 > before[1], (before, after)

"""A model's head for multi-token prediction: what it predicts, what it keeps, and which files have one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.models.batch import Batch, Decode, Prefill, StateCheckpoint, allocate
from baton.models.config import ModelError
from baton.models.decoder import Decoder
from baton.models.loading.checkpoint import load_model
from baton.models.loading.heads import NoHeadError
from tests.models.heads import NEMOTRON, QWEN, Definition, definition_of, with_head
from tests.models.loading.test_loading import copied
from tests.models.oracle import VOCABULARY, Oracle

CPU, PAGE, PROMPT, LENGTH = torch.device("cpu"), 4, 9, 14
FORMS = ["qwen3_5", "qwen3_next", "nemotron_h"]


def checkpoint(oracle: Oracle, folder: Path, name: str) -> Path:
    original = oracle.checkpoint(name)
    if name != "nemotron_h":
        return with_head(original, folder / name, QWEN)
    keys = {"mtp_hybrid_override_pattern": "*-", "num_nextn_predict_layers": 1}
    return with_head(original, folder / name, NEMOTRON, **keys)


def load(path: Path, reasons: list[ModelError] | None = None) -> Decoder:
    """Load a model with its head. reasons: gets the reason if that is not possible; None: it must be."""
    model = load_model(path, torch.float32, CPU, on_headless=(reasons if reasons is not None else []).append)
    assert isinstance(model, Decoder)
    assert reasons is not None or model.mtp
    return model


@dataclass
class Sequence:
    """A sequence that a model with a head computes. Its state is in `slot`."""

    model: Decoder
    tokens: Tensor
    slot: int = 0

    def __post_init__(self) -> None:
        self.pools = allocate(self.model, 3, 5, PAGE, CPU)
        self.table = torch.tensor([[3, 1, 4, 0, 2]], dtype=torch.int32)

    def feed(self, start: int, end: int, checkpoints: list[StateCheckpoint] | None = None) -> Tensor:
        """Feed a chunk of the prompt. Return its hidden states."""
        prefill = Prefill([0, end - start], [start], [self.slot], checkpoints or [], self.table)
        return self._run(Batch(self.tokens[start:end], torch.arange(start, end), prefill, None))

    def decode(self, position: int) -> Tensor:
        """Feed one token. Return its hidden state."""
        at = torch.tensor([position])
        rows = Decode(torch.tensor([self.slot]), at, self.table)
        return self._run(Batch(self.tokens[position : position + 1], at, None, rows))

    def predict(self, token: int, hidden: Tensor, position: int) -> Tensor:
        at = torch.tensor([position])
        return self.model.predict(torch.tensor([token]), hidden[-1:], Decode(at, at, self.table), self.pools)

    def _run(self, batch: Batch) -> Tensor:
        return self.model.forward(batch, self.pools)


def assert_predicts(sequence: Sequence, definition: Definition, hidden: Tensor, end: int) -> None:
    """Check the predictions of two tokens after the token at `end`. hidden: the hidden states before it."""
    tokens, states = sequence.tokens[1 : end + 1].tolist(), hidden.double()
    for position in (end, end + 1):
        found = sequence.predict(tokens[-1], states[-1:].float(), position)
        expected = definition.hidden(tokens, states)[-1]
        torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-5)
        tokens.append(int(sequence.model.logits(found).argmax()))
        states = torch.cat([states, expected[None]])


@pytest.mark.parametrize("name", FORMS)
def test_a_head_predicts_as_its_definition_says(oracle: Oracle, tmp_path: Path, name: str) -> None:
    path = checkpoint(oracle, tmp_path, name)
    torch.manual_seed(1)
    sequence = Sequence(load(path), torch.randint(0, VOCABULARY, (LENGTH,)))
    definition, hidden = definition_of(path), [sequence.feed(0, 4), sequence.feed(4, PROMPT)]
    for position in range(PROMPT, LENGTH):
        assert_predicts(sequence, definition, torch.cat(hidden), position)
        hidden.append(sequence.decode(position))  # overwrites what was predicted


@pytest.mark.parametrize("name", FORMS)
def test_a_head_goes_on_from_a_checkpoint(oracle: Oracle, tmp_path: Path, name: str) -> None:
    path = checkpoint(oracle, tmp_path, name)
    sequence = Sequence(load(path), torch.arange(LENGTH) * 7 % VOCABULARY)
    hidden = sequence.feed(0, PROMPT, [StateCheckpoint(0, 6, 2)])
    fork = Sequence(sequence.model, torch.cat([sequence.tokens[:6], torch.tensor([5, 9, 2, 8])]), 2)
    fork.pools, fork.table = sequence.pools, torch.tensor([[3, 0, 2]], dtype=torch.int32)
    fork.pools.copy_page(1, 0)
    hidden = torch.cat([hidden[:6], fork.feed(6, 8)])
    assert_predicts(fork, definition_of(path), hidden, 8)


@pytest.mark.parametrize("name", FORMS)
def test_the_model_computes_the_same_with_and_without_its_head(oracle: Oracle, tmp_path: Path, name: str) -> None:
    path = checkpoint(oracle, tmp_path, name)
    tokens, results = torch.arange(LENGTH), []
    for model in (load(path), load_model(path, torch.float32, CPU)):
        pools = allocate(model, 1, 4, PAGE, CPU)
        prompt = Prefill([0, LENGTH], [0], [0], [], torch.arange(4, dtype=torch.int32)[None])
        results.append(model.forward(Batch(tokens, tokens, prompt, None), pools))
    assert torch.equal(*results)


def without_a_weight(tensors: dict[str, Any]) -> None:
    del tensors["mtp.fc.weight"]


def with_one_too_many(tensors: dict[str, Any]) -> None:
    tensors["mtp.embed_tokens.weight"] = torch.zeros(3, 64)


def test_a_model_is_loaded_without_a_head_that_baton_cannot_compute(oracle: Oracle, tmp_path: Path) -> None:
    """The caller gets the reason, and decides whether that is an error."""
    qwen, nemotron = (oracle.checkpoint(name) for name in ("qwen3_5", "nemotron_h"))
    whole, one = with_head(qwen, tmp_path / "whole", QWEN), {"num_nextn_predict_layers": 1}
    for path, reason in (
        (qwen, "the files hold no head for multi-token prediction"),
        (oracle.checkpoint("mamba2"), "the files hold no head for multi-token prediction"),
        (with_head(qwen, tmp_path / "several", QWEN, mtp_num_hidden_layers=2), "2 layers for multi-token prediction"),
        (with_head(qwen, tmp_path / "none", QWEN, mtp_num_hidden_layers=0), "0 layers for multi-token prediction"),
        (with_head(nemotron, tmp_path / "pattern", NEMOTRON, **one, mtp_hybrid_override_pattern="M*"), "pattern"),
        (with_head(nemotron, tmp_path / "experts", NEMOTRON, **one), "surplus tensors"),
        (copied(whole, tmp_path / "lacking", tensors=without_a_weight), "missing tensors: mtp.fc.weight"),
        (copied(whole, tmp_path / "more", tensors=with_one_too_many), "surplus tensors: mtp.embed_tokens.weight"),
    ):
        reasons = list[ModelError]()
        assert load(path, reasons).mtp is None and reason in str(reasons[0])
        assert isinstance(reasons[0], NoHeadError) == ("hold no head" in reason)
    assert load(whole).mtp

"""A model with a head for multi-token prediction through the API: answers do not depend on it, and it saves steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from baton.api.cli.commands import parser
from baton.api.config import Config
from baton.api.inspection import examine
from baton.api.serve import StartError
from baton.api.wiring import load
from tests.api.hash_traffic import VOCAB, make_checkpoint
from tests.api.server_process import SERVE, ServerProcess
from tests.models.predictable import write_predictable

PROMPT, TOKENS = [5, 7, 9, 11] * 8, 120
ANSWERS = 40  # among which one has drafts: whether they pay is measured, and depends on what else the machine does


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with many layers, so that predictions, which take one, pay."""
    return write_predictable(make_checkpoint(tmp_path_factory.mktemp("predictable")), VOCAB, layers=16, hidden=256)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, str(checkpoint), "--speculation", "mtp", "--memory", "256MB"]) as running:
        yield running


def ask(server: ServerProcess, **sampling: Any) -> list[int]:
    """Return the answer's tokens."""
    params = {"max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": 4, "speculation": "mtp"} | sampling
    status, answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert status == 200, answer
    tokens: list[int] = answer["output_ids"]
    return tokens


def accepted(server: ServerProcess) -> float:
    """Return how many drafts of the head were right so far. No other drafter has made any."""
    with urlopen(f"{server.url}/metrics") as answer:
        lines = [
            line for line in answer.read().decode().splitlines() if line.startswith("baton:drafts_accepted_total{")
        ]
    assert all('drafter="mtp"' in line for line in lines)
    return sum(float(line.split()[-1]) for line in lines)


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_are_those_without_the_head(server: ServerProcess, temperature: float) -> None:
    before = accepted(server)
    plain = ask(server, temperature=temperature, speculation="off")
    assert len(plain) == TOKENS and accepted(server) == before
    for _ in range(ANSWERS):
        assert ask(server, temperature=temperature) == plain
        if temperature or accepted(server) > before:
            return
    pytest.fail("no draft was right")


def test_files_without_a_head_are_refused_with_mtp(tmp_path: Path) -> None:
    config = Config(model=str(make_checkpoint(tmp_path)), speculation="mtp")
    with pytest.raises(StartError, match="--speculation mtp: the files hold no head"):
        load(config, lambda done, total: None)


def test_inspect_counts_the_head_where_it_would_be_loaded(checkpoint: Path) -> None:
    assert parser().parse_args(["inspect", str(checkpoint), "--speculation", "mtp"]).speculation == "mtp"
    with_it, without = (examine(Config(model=str(checkpoint), speculation=chosen)) for chosen in ("mtp", "ngram"))
    assert with_it.layers == without.layers | {"PredictionHead": 1}
    assert with_it.parameters > without.parameters and with_it.thousand_tokens > without.thousand_tokens
    assert not with_it.refused and not without.refused

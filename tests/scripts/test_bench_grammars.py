"""What scripts/bench grammars measures with: a tokenizer of bytes for a model that has none, a schema, shares."""

import json
from pathlib import Path

import pytest

from baton.models.text.grammars.compiling import Grammars
from baton.models.text.grammars.writing import json_schema
from scripts.benchmarks.requests.grammars import TEXTS, Figures, compile_time, schema_of, show, with_bytes


def test_a_folder_beside_has_the_same_model_and_tokens_of_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("words")
    beside = with_bytes(folder, 700)
    assert (beside / "config.json").read_text() == "{}" and (folder / "tokenizer.json").read_text() == "words"
    grammars = Grammars((beside / "tokenizer.json").read_text(), 700, 700, [])
    mask = grammars.matcher(json_schema(TEXTS)).mask()
    assert len(mask) == 4 * 22 and any(mask)
    assert 0 < compile_time(beside, 700, 1) < 60


def test_a_schema_is_as_long_as_it_says() -> None:
    assert 10_000 < len(json.dumps(schema_of(10_000))) < 15_000


def test_shares_are_of_each_round(capsys: pytest.CaptureFixture[str]) -> None:
    show("one", Figures(free=[10.0, 20.0, 30.0], mixed=[9.0, 19.0, 30.0], constrained=[5.0, 10.0, 15.0]))
    first, others, constrained = capsys.readouterr().out.splitlines()
    assert first == "one: 20.0 tokens/s a stream without grammars"
    assert others.endswith("95.0 %") and constrained.endswith("50.0 %")

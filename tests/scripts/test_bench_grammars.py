"""The parts of scripts/bench grammars: a byte tokenizer for a model without one, a schema, and the printed shares."""

import json
from pathlib import Path

import pytest

from baton.models.text.grammars.compiling import Grammars
from baton.models.text.grammars.writing import json_schema
from scripts.benchmarks.requests.grammars import TEXTS, Figures, compile_time, schema_of, show, with_bytes


def test_the_copied_folder_has_the_same_model_and_a_byte_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("words")
    copy = with_bytes(folder, 700)
    assert (copy / "config.json").read_text() == "{}" and (folder / "tokenizer.json").read_text() == "words"
    grammars = Grammars((copy / "tokenizer.json").read_text(), 700, 700, [])
    mask = grammars.matcher(json_schema(TEXTS)).mask()
    assert len(mask) == 4 * 22 and any(mask)
    assert 0 < compile_time(copy, 700, 1) < 60


def test_a_schema_has_the_requested_length() -> None:
    assert 10_000 < len(json.dumps(schema_of(10_000))) < 15_000


def test_shares_are_relative_to_the_same_round(capsys: pytest.CaptureFixture[str]) -> None:
    show("one", Figures(free=[10.0, 20.0, 30.0], mixed=[9.0, 19.0, 30.0], constrained=[5.0, 10.0, 15.0]))
    first, others, constrained = capsys.readouterr().out.splitlines()
    assert first == "one: 20.0 tokens/s a stream without grammars"
    assert others.endswith("95.0 %") and constrained.endswith("50.0 %")

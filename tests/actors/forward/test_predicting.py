"""Predictions of the device after a step: for which rows, how many tokens, and where their keys and values go."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.actors.forward.device import Work, WorkChunk, WorkDraft, WorkPrediction
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.messages import Ran
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack, unpack
from baton.models.batch import allocate
from baton.models.decoder import Decoder
from baton.models.loading.checkpoint import load_model
from tests.models.predictable import write_predictable

VOCABULARY, PAGE, PAGES, DRAFTS = 60, 4, 12, 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_predictable(tmp_path_factory.mktemp("predictable"), VOCABULARY, little=0.0)
    loaded = load_model(folder, torch.float32, CPU, on_headless=print)
    assert isinstance(loaded, Decoder)
    return loaded


class Bench:
    """A device with a model whose head is always right, because its next token follows from its last one alone."""

    def __init__(self, model: Decoder) -> None:
        self.pools = allocate(model, 4, PAGES, PAGE, CPU, 3, DRAFTS)
        self.device = TorchDevice(model, self.pools, 3, 40)

    def open(self, row: int, tokens: int, pages: list[int]) -> WorkChunk:
        request = Request("r", pack(range(tokens)), tokens, Sampling(temperature=0.0), Stops(99))
        self.device.open_row(row, 10 + row, row, request, pages)
        return WorkChunk(row, 0, tokens, True)

    def run(self, work: Work) -> Ran:
        return self.device.launch(work).collect().report


def test_what_is_predicted_is_drawn(model: Decoder) -> None:
    bench = Bench(model)
    chunks = [bench.open(0, 5, [3, 1, 4]), bench.open(1, 2, [5, 9, 2])]
    first = bench.run(Work(1, chunks, [], [], [], predictions=[WorkPrediction(1, 3), WorkPrediction(0, 2)]))
    drawn, predicted = unpack(first.tokens), first.predicted
    assert {row: len(tokens) for row, tokens in predicted.items()} == {0: 2, 1: 3}
    drafts = [WorkDraft(0, 0, tuple(predicted[0])), WorkDraft(1, 0, (predicted[1][0], VOCABULARY - 1))]
    more = [WorkPrediction(0, 1), WorkPrediction(1, 2)]
    second = bench.run(Work(2, [], [0, 1], [5, 2], [], drafts=drafts, predictions=more))
    draws = unpack(second.tokens)
    assert draws[:2] == predicted[0] and draws[3] == predicted[1][0], "all of row 0, and the first of row 1"
    assert second.predicted[1][0] == predicted[1][2], "they go on after the last valid draw"
    plain = Bench(model)
    expected = [unpack(plain.run(Work(1, [plain.open(0, 5, [3, 1, 4])], [], [], [])).tokens)[0]]
    for position in range(5, 9):
        expected += unpack(plain.run(Work(2, [], [0], [position], [])).tokens)
    assert [drawn[0], *draws[:3], *second.predicted[0]] == expected


@pytest.mark.parametrize(("tokens", "count"), [(4, 4), (5, 3), (7, 1), (8, 0)])
def test_a_row_gets_as_many_as_its_pages_have_space_for(model: Decoder, tokens: int, count: int) -> None:
    bench = Bench(model)
    bench.pools.blocks.fill_(7)
    before = bench.pools.blocks.clone()
    chunk = bench.open(2, tokens, [3, 6])
    predicted = bench.run(Work(1, [chunk], [], [], [], predictions=[WorkPrediction(2, 4)])).predicted
    assert len(predicted.get(2, [])) == count
    others = [page for page in range(PAGES) if page not in (3, 6)]
    assert torch.equal(bench.pools.blocks[others], before[others]), "pages of other rows are not written to"


def test_a_step_with_drafts_counts_them_before_it_predicts(model: Decoder) -> None:
    bench = Bench(model)
    bench.run(Work(1, [bench.open(0, 3, [3, 6])], [], [], []))
    work = Work(2, [], [0], [3], [], drafts=[WorkDraft(0, 0, (1, 2, 3))], predictions=[WorkPrediction(0, 4)])
    assert len(bench.run(work).predicted[0]) == 1, "if all were right, the next token would be the last of the pages"


def test_predictions_after_a_rejected_draft_are_those_without_drafts(tmp_path: Path) -> None:
    """The head reads the hidden state before the last valid draw, and no later one."""
    folder = write_predictable(tmp_path, VOCABULARY, little=1.0)
    held = load_file(folder / "model.safetensors")
    held["mtp.fc.weight"] = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    save_file(held, folder / "model.safetensors")
    model = load_model(folder, torch.float32, CPU, on_headless=print)
    assert isinstance(model, Decoder)
    plain, drafted = Bench(model), Bench(model)
    expected = list[list[int]]()
    [token] = unpack(plain.run(Work(1, [plain.open(0, 5, [3, 1, 4])], [], [], [])).tokens)
    draws = [token]
    for position in range(5, 8):
        ran = plain.run(Work(2, [], [0], [position], [], predictions=[WorkPrediction(0, 2)]))
        draws, expected = draws + unpack(ran.tokens), [*expected, ran.predicted[0]]
    drafted.run(Work(1, [drafted.open(0, 5, [3, 1, 4])], [], [], []))
    wrong = (draws[2] + 1) % VOCABULARY
    drafts = [WorkDraft(0, 0, (draws[1], wrong, 7))]
    ran = drafted.run(Work(2, [], [0], [5], [], drafts=drafts, predictions=[WorkPrediction(0, 2)]))
    assert unpack(ran.tokens)[:2] == draws[1:3] and ran.predicted[0] == expected[1]

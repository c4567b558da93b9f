"""The torch device with a table as its model: the batches of steps, the tokens drawn, and the reports."""

import math
import os
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.actors.forward.device import Work, WorkCheckpoint, WorkChunk, WorkMask
from baton.actors.forward.step.reporting import LOGITS_ROWS
from baton.actors.forward.torch_device import TorchDevice, survives
from baton.actors.messages import Ran
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack, unpack
from baton.kernels.sampling import SamplingTensors, reference, sample
from baton.models.batch import Batch, Pools, TensorSpec, allocate

VOCABULARY, PAGE = 8, 4
TABLE = 3 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))


class Table:
    """A model whose logits after token i are TABLE[i]. A slot's state is the sum of its tokens."""

    vocab_size, chunk_size, max_position = VOCABULARY, 4, 1024

    def __init__(self, attention: bool = True) -> None:
        self.batches: list[Batch] = []
        self.broken: Exception | None = None
        self._kv = [TensorSpec((1,), torch.float32)] * attention

    def state_specs(self) -> list[TensorSpec]:
        return [TensorSpec((1,), torch.float32)]

    def kv_specs(self) -> list[TensorSpec]:
        return self._kv

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        if self.broken is not None:
            raise self.broken
        self.batches.append(batch)
        at = 0
        if batch.prefill is not None:
            for slot, begin, end in zip(
                batch.prefill.slots, batch.prefill.offsets[:-1], batch.prefill.offsets[1:], strict=True
            ):
                pools.state[0][slot] += batch.tokens[begin:end].sum()
                at = end
        if batch.decode is not None:
            pools.state[0][batch.decode.slots, 0] += batch.tokens[at:].float()
        return batch.tokens[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return TABLE[hidden[:, 0].long()].clone()


class Bench:
    def __init__(self, attention: bool = True, rows: int = 4) -> None:
        self.model = Table(attention)
        self.pools = allocate(self.model, 8, 8 if attention else 0, PAGE, torch.device("cpu"))
        self.device = TorchDevice(self.model, self.pools, rows, 15)
        self._steps = 0

    def open(
        self, row: int, tokens: list[int], sampling: Sampling | None = None, slot: int | None = None, **more: Any
    ) -> None:
        arguments = {"prompt_len": len(tokens), "stops": Stops(9)} | more
        pages = arguments.pop("pages", [])
        request = Request(f"r{row}", pack(tokens), sampling=sampling or Sampling(temperature=0.0), **arguments)
        self.device.open_row(row, 10 + row, row + 4 if slot is None else slot, request, pages)

    def run(
        self,
        chunks: list[WorkChunk],
        decodes: dict[int, int] | None = None,
        *checkpoints: WorkCheckpoint,
        masks: dict[int, list[int]] | None = None,
        late: dict[int, list[int]] | None = None,
    ) -> Ran:
        """Run a step. decodes: the position of each decoding row. masks, late: the allowed tokens of a row."""
        self._steps += 1
        decodes = decodes or {}
        come = Future[list[WorkMask]]() if late is not None else None
        of_rows = chunks, list(decodes), list(decodes.values()), list(checkpoints), words_of(masks or {})
        work = Work(self._steps, *of_rows, late=come)
        self.device.prepare(work)
        if come is not None:
            come.set_result(words_of(late or {}))
        return self.device.launch(work).collect().report


def words_of(allowed: dict[int, list[int]]) -> list[WorkMask]:
    return [WorkMask(row, sum(1 << token for token in of).to_bytes(4, "little")) for row, of in allowed.items()]


def prompt(row: int, length: int) -> WorkChunk:
    return WorkChunk(row, 0, length, True)


def best(token: int) -> int:
    return int(TABLE[token].argmax())


# The batch


def test_chunks_come_first_and_each_row_brings_its_slot_and_pages() -> None:
    bench = Bench()
    bench.open(0, [1, 2, 3, 4, 5], pages=[7, 6])
    bench.open(2, [6, 5, 4], pages=[3])
    bench.open(1, [7], pages=[2])
    assert unpack(bench.run([prompt(1, 1)]).tokens) == [best(7)]
    ran = bench.run([WorkChunk(2, 1, 3, True), WorkChunk(0, 0, 4, False)], {1: 1}, WorkCheckpoint(0, 3, 1))
    batch = bench.model.batches[-1]
    assert batch.tokens.tolist() == [5, 4, 1, 2, 3, 4, best(7)] and batch.positions.tolist() == [1, 2, 0, 1, 2, 3, 1]
    assert batch.prefill is not None and batch.decode is not None
    assert (batch.prefill.offsets, batch.prefill.starts, batch.prefill.slots) == ([0, 2, 6], [1, 0], [6, 4])
    assert [(c.segment, c.position, c.slot) for c in batch.prefill.checkpoints] == [(1, 3, 1)]
    assert batch.prefill.page_table.tolist() == [[3], [7]]
    assert batch.decode.slots.tolist() == [5] and batch.decode.page_table.tolist() == [[2]]
    assert unpack(ran.tokens) == [best(4), best(best(7))], "a chunk that does not end its prompt draws nothing"
    assert ran.step == 2 and not ran.error


def test_the_page_tables_are_as_wide_as_the_longest_row_needs() -> None:
    bench = Bench()
    bench.open(0, [1, 2, 3, 4, 5], pages=[7])
    bench.device.extend_row(0, [6])
    bench.device.extend_row(0, [])
    bench.device.extend_row(0, [5, 4])
    bench.run([prompt(0, 5)])
    for position, width in ((7, 2), (8, 3), (15, 4)):
        bench.run([], {0: position})
        batch = bench.model.batches[-1]
        assert batch.prefill is None and batch.decode is not None
        assert batch.decode.page_table.tolist() == [[7, 6, 5, 4][:width]]
    bench.open(0, [1], pages=[2])
    bench.run([prompt(0, 1)])
    prefill = bench.model.batches[-1].prefill
    assert prefill is not None and prefill.page_table.tolist() == [[2]]
    bare = Bench(attention=False)
    bare.open(0, [1, 2, 3, 4, 5])
    bare.run([prompt(0, 5)])
    prefill = bare.model.batches[-1].prefill
    assert prefill is not None and prefill.page_table.shape == (1, 0)


def test_a_decoding_row_s_checkpoint_is_its_state_after_the_step() -> None:
    bench = Bench()
    for row, token in ((0, 1), (1, 2)):
        bench.open(row, [token])
    bench.run([prompt(0, 1), prompt(1, 1)])
    bench.run([], {0: 1, 1: 1}, WorkCheckpoint(1, 2, 0))
    assert float(bench.pools.state[0][0]) == 2 + best(2) == float(bench.pools.state[0][5])
    bench.device.copy(0, 1)
    bench.device.clear(0)
    assert bench.pools.state[0][:2, 0].tolist() == [0, 2 + best(2)]
    bench.device.poison(0)
    assert math.isnan(float(bench.pools.state[0][0]))
    bench.pools.pages[0][3] = 7
    bench.device.copy_page(3, 5)
    assert bench.pools.pages[0][5].flatten().tolist() == [7] * PAGE


# Sampling


def test_each_row_is_drawn_by_its_own_parameters() -> None:
    rows = [
        Sampling(temperature=2.0, seed=5),
        Sampling(temperature=1.5, top_k=2, seed=6),
        Sampling(temperature=3.0, top_p=0.5, seed=7),
        Sampling(temperature=4.0, min_p=0.6, seed=8),
        Sampling(temperature=0.0, seed=9),
        Sampling(temperature=2.0, seed=2**40),
    ]
    bench = Bench(rows=len(rows))
    for row, sampling in enumerate(rows):
        bench.open(row, [row + 1], sampling, slot=row)
    before = [row + 1 for row in range(len(rows))]
    for position in range(1, 13):
        chunks = [prompt(row, 1) for row in range(len(rows))] if position == 1 else []
        ran = bench.run(chunks, {} if chunks else dict.fromkeys(range(len(rows)), position - 1))
        params = SamplingTensors(
            temperature=torch.tensor([s.temperature for s in rows]),
            top_k=torch.tensor([s.top_k for s in rows]),
            top_p=torch.tensor([s.top_p for s in rows]),
            min_p=torch.tensor([s.min_p for s in rows]),
            seed=torch.tensor([s.seed for s in rows]),
            position=torch.full([len(rows)], position),
        )
        expected = sample(TABLE[before].clone(), params).tokens.tolist()
        assert unpack(ran.tokens) == expected
        before = expected


@pytest.mark.parametrize("draw", [sample, reference.sample], ids=["as on this device", "as on an accelerator"])
@pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}])
def test_parameters_that_leave_only_the_best_token(only: Any, draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 100 all tokens are about equally likely, so only the tested parameter can select the best one."""
    monkeypatch.setattr("baton.actors.forward.torch_device.sample", draw)
    bench = Bench()
    for token in range(VOCABULARY):
        bench.open(0, [token], Sampling(seed=3, temperature=100.0, **only))
        assert unpack(bench.run([prompt(0, 1)]).tokens) == [best(token)]


def test_biases_and_bans_apply_only_to_their_rows() -> None:
    bench = Bench()
    favoured = Sampling(temperature=0.0, logit_bias={(best(1) + 1) % VOCABULARY: 100.0, 2: -5.0})
    bench.open(0, [1])
    bench.open(1, [1], favoured)
    bench.open(2, [3, 1], stops=Stops(9, min_tokens=2, token_ids=(best(1),)))
    ran = bench.run([prompt(0, 1), prompt(1, 1), prompt(2, 2)])
    others = TABLE[1].clone()
    others[best(1)] = -math.inf
    assert unpack(ran.tokens) == [best(1), (best(1) + 1) % VOCABULARY, int(others.argmax())]
    bench.open(3, [3, 0, 0, 1], prompt_len=2, stops=Stops(9, min_tokens=2, token_ids=(best(1),)))
    assert unpack(bench.run([prompt(3, 4)]).tokens) == [best(1)], "two are out"


def test_a_row_draws_only_tokens_that_its_mask_allows() -> None:
    """A mask holds for the first and for later output tokens, with and without sampling, and despite biases.

    Log probabilities ignore the mask.
    """
    bench, others = Bench(), [t for t in range(VOCABULARY) if t != best(1)]
    bench.open(0, [1], logprobs=1)
    bench.open(1, [1], Sampling(seed=5, logit_bias={best(1): 100.0}))
    bench.open(2, [1])
    ran = bench.run([prompt(0, 1), prompt(2, 1), prompt(1, 1)], masks={1: [3], 0: others})
    drawn = unpack(ran.tokens)
    assert drawn == [int(TABLE[1][others].argsort()[-1].apply_(lambda at: others[at])), best(1), 3]
    check_item(ran.logprobs[0].items[0], 1, drawn[0], 1)
    ran = bench.run([], {0: 1, 2: 1, 1: 1}, masks={0: [6]})
    assert unpack(ran.tokens)[:2] == [6, best(best(1))]


def test_masks_that_come_late_hold_like_others() -> None:
    """They hold for a row that ends its prompt and for one that decodes, despite biases; other rows keep their own."""
    bench = Bench()
    for row in range(4):
        bench.open(row, [1], Sampling(seed=5, temperature=float(row == 3), logit_bias={best(1): 50.0}))
    assert unpack(bench.run([prompt(0, 1), prompt(1, 1)], masks={1: [3]}, late={0: [2]}).tokens) == [2, 3]
    chunks, decodes = [prompt(3, 1), prompt(2, 1)], {0: 1, 1: 1}
    assert unpack(bench.run(chunks, decodes, masks={2: [5]}, late={1: [7], 3: [6]}).tokens) == [6, 5, best(1), 7]
    assert unpack(bench.run([], {2: 1, 0: 2}, late={}).tokens) == [best(1), best(1)], "both rows have ended"


def test_the_wait_for_late_masks_is_not_time_of_the_device() -> None:
    bench, come = Bench(), Future[list[WorkMask]]()
    bench.open(0, [1])
    timer = threading.Timer(0.3, lambda: come.set_result(words_of({0: [3]})))
    timer.start()
    done = bench.device.launch(Work(1, [prompt(0, 1)], [], [], [], late=come)).collect()
    timer.join()
    assert unpack(done.report.tokens) == [3] and 0 <= done.seconds < 0.2


def test_with_a_grammar_only_the_mask_bans_stop_tokens() -> None:
    """min_tokens bans no token of a row with a grammar, because the grammar may allow nothing but a stop token."""
    bench = Bench()
    bench.open(0, [1], stops=Stops(9, min_tokens=2, token_ids=(3,)), grammar="g")
    assert unpack(bench.run([prompt(0, 1)], masks={0: [3]}).tokens) == [3]


def test_a_row_that_is_not_finite_is_found_under_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.open(0, [1])
    broken = TABLE.clone()
    broken[1, 2] = math.nan
    monkeypatch.setattr(bench.model, "logits", lambda hidden: broken[hidden[:, 0].long()].clone())
    assert bench.run([prompt(0, 1)], masks={0: [3]}).not_finite == [0]


def test_chunks_that_draw_nothing_are_checked_for_finite_results_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    forward = bench.model.forward
    monkeypatch.setattr(
        bench.model, "forward", lambda *arguments: (hidden := forward(*arguments)).masked_fill(hidden == 7, math.nan)
    )
    monkeypatch.setattr(bench.model, "logits", lambda hidden: TABLE[hidden[:, 0].nan_to_num(0).long()] + 0 * hidden)
    for row, tokens in enumerate([[7, 7, 1], [1, 1, 7], [1, 7, 1]]):
        bench.open(row, tokens)
    chunks = [WorkChunk(0, 0, 2, False), WorkChunk(1, 0, 3, True), WorkChunk(2, 0, 1, False)]
    ran = bench.run(chunks)
    assert (ran.not_finite, ran.unsound) == ([0], [0])
    ran = bench.run([WorkChunk(2, 1, 2, False), prompt(1, 3)])
    assert (ran.not_finite, ran.unsound) == ([0], [0])
    assert bench.run([WorkChunk(2, 0, 1, False)]).unsound == []


def test_penalties_count_the_prompt_and_the_drawn_tokens() -> None:
    presence = Sampling(temperature=0.0, presence_penalty=100.0)
    bench = Bench()
    bench.open(0, [best(1), 1], presence)
    [first] = unpack(bench.run([prompt(0, 2)]).tokens)
    assert first == best(1), "of the prompt only a repetition is penalised"
    drawn = [first]
    for position in range(2, 8):
        drawn += unpack(bench.run([], {0: position}).tokens)
    assert len(set(drawn)) == 7
    bench.open(0, [5, best(1), 1], presence, prompt_len=1)
    assert unpack(bench.run([prompt(0, 3)]).tokens) != [best(1)], "what was drawn before a retraction counts"
    bench.open(1, [best(1), 1], Sampling(temperature=0.0, repetition_penalty=1e6))
    [other] = unpack(bench.run([prompt(1, 2)]).tokens)
    assert other not in (best(1), 1) or float(TABLE[1][other]) < 0
    bench.open(1, [1])
    assert unpack(bench.run([prompt(1, 1)]).tokens) == [best(1)], "the row is another's now"


def test_frequency_counts_how_often() -> None:
    """Each earlier output of the best token lowers its logit. After two, the second best token wins."""
    top, second = TABLE[1].topk(2).values.tolist()
    bench = Bench()
    penalty = (top - second) / 1.5
    bench.open(0, [1, *[best(1)] * 1, 1], Sampling(temperature=0.0, frequency_penalty=penalty), prompt_len=1)
    assert unpack(bench.run([prompt(0, 3)]).tokens) == [best(1)]
    bench.open(0, [1, *[best(1)] * 2, 1], Sampling(temperature=0.0, frequency_penalty=penalty), prompt_len=1)
    assert unpack(bench.run([prompt(0, 4)]).tokens) == [int(TABLE[1].topk(2).indices[1])]


# Log probabilities


def check_item(item: Any, before: int, token: int, top: int) -> None:
    right = torch.log_softmax(TABLE[before], -1)
    assert item.token == token and item.logprob == pytest.approx(float(right[token]), abs=1e-4)
    values, ids = right.topk(VOCABULARY)
    assert [id for id, _ in item.top] == ids.tolist()[:top]
    assert [value for _, value in item.top] == pytest.approx(values.tolist()[:top], abs=1e-4)


def test_each_row_gets_the_number_of_alternatives_it_requests() -> None:
    """Row 0 requests two alternatives, row 1 no log probabilities, row 2 log probabilities without alternatives.

    Log probabilities come from the model's logits, before any bias.
    """
    bench = Bench()
    bench.open(0, [1], logprobs=2)
    bench.open(1, [2])
    bench.open(2, [3], Sampling(temperature=0.0, logit_bias={4: 100.0}), logprobs=0)
    ran = bench.run([prompt(row, 1) for row in range(3)])
    assert [(line.grant, line.start, len(line.items)) for line in ran.logprobs] == [(10, 1, 1), (12, 1, 1)]
    check_item(ran.logprobs[0].items[0], 1, best(1), 2)
    check_item(ran.logprobs[1].items[0], 3, 4, 0)
    later = bench.run([], {2: 1, 1: 1})
    assert [(line.grant, line.start) for line in later.logprobs] == [(12, 2)]
    assert not bench.run([], {1: 2}).logprobs


@pytest.mark.parametrize("begin", [0, 1, 2, 5])
def test_log_probabilities_of_a_prompt_come_chunk_by_chunk(begin: int) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7]
    bench = Bench()
    bench.open(0, [7, 7])
    bench.open(1, tokens, logprobs=1, prompt_logprobs_from=begin)
    lines = [*bench.run([prompt(0, 2), WorkChunk(1, 0, 3, False)]).prompt_logprobs]
    lines += bench.run([WorkChunk(1, 3, 7, True)]).prompt_logprobs
    found: dict[int, Any] = {}
    for line in lines:
        assert line.grant == 11
        found |= dict(enumerate(line.items, line.start))
    assert list(found) == list(range(begin, 7))
    for index, item in found.items():
        if index == 0:
            assert (item.token, item.logprob, item.top) == (1, None, [])
        else:
            check_item(item, tokens[index - 1], tokens[index], 1)


def test_a_long_prompt_s_logits_are_computed_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [index * index % VOCABULARY for index in range(2 * LOGITS_ROWS + 30)]
    bench, rows = Bench(attention=False), []
    logits = bench.model.logits
    monkeypatch.setattr(bench.model, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    bench.open(0, tokens, prompt_logprobs_from=0)
    lines = bench.run([prompt(0, len(tokens))]).prompt_logprobs
    assert rows[:-1] == [LOGITS_ROWS, LOGITS_ROWS, 29]
    items = [item for line in lines for item in line.items]
    assert [item.token for item in items] == tokens and all(item.top == [] for item in items)
    for index in (LOGITS_ROWS, LOGITS_ROWS + 1, len(tokens) - 1):
        check_item(items[index], tokens[index - 1], tokens[index], 0)


@pytest.mark.parametrize("pooled", [(0, 7), (0, 1), (6, 7), (2, 5), (0, 3), (3, 7)])
def test_the_mean_of_hidden_states_comes_with_the_last_of_them(pooled: tuple[int, int]) -> None:
    tokens, bench = [1, 2, 3, 4, 5, 6, 7], Bench()
    begin, end = pooled
    bench.open(0, [7, 7], pooled=(1, 2))
    bench.open(1, tokens, pooled=pooled)
    bench.open(2, tokens, pooled=pooled)
    first = bench.run([prompt(0, 2), WorkChunk(1, 0, 3, False)]).pooled
    later = bench.run([WorkChunk(1, 3, 7, True), prompt(2, 7)]).pooled
    assert [row.grant for row in first] == [10] + [11] * (end <= 3)
    assert [row.grant for row in later] == [11] * (end > 3) + [12]
    mean = struct.pack("<f", sum(tokens[begin:end]) / (end - begin))
    assert [row.values for row in first + later] == [struct.pack("<f", 7), mean, mean]


def test_a_row_that_was_admitted_with_output_pools_nothing() -> None:
    bench = Bench()
    bench.open(0, [1, 2, 3], prompt_len=2, pooled=(0, 2))
    assert not bench.run([prompt(0, 3)]).pooled


# Failures


def test_the_device_survives_errors_unless_it_is_lost() -> None:
    assert survives(ValueError("a kernel failed")) and survives(torch.OutOfMemoryError())
    lost = torch.AcceleratorError("the device is lost")
    assert not survives(lost)
    for code, usable in ((2, True), (700, False)):  # out of memory; an illegal address
        lost.error_code = code  # type: ignore[attr-defined]
        assert survives(lost) == usable


def test_a_state_goes_to_host_memory_and_comes_back() -> None:
    bench = Bench()
    bench.pools.state[0][3] = 42
    bench.pools.pages[0][:] = torch.arange(8 * PAGE, dtype=torch.float32).view(8, PAGE, 1)
    bench.device.export(1, 3, [5, 2], 6).collect()
    bench.device.clear(3)
    bench.device.fill(10, 1, 0, [7], 1)
    assert float(bench.pools.state[0][0]) == 42
    assert bench.pools.pages[0][7].flatten().tolist()[:2] == [2 * PAGE, 2 * PAGE + 1]
    bench.device.fill(10, 1, 0, [6, 7], 0)
    assert bench.pools.pages[0][6].flatten().tolist() == [20, 21, 22, 23]
    bench.device.drop(1)
    with pytest.raises(KeyError):
        bench.device.fill(10, 1, 0, [], 0)
    bench.device.export(2, 3, [], 0).collect()
    bench.device.drop_all()
    with pytest.raises(KeyError):
        bench.device.fill(10, 2, 0, [], 0)


ALONE = """
import os, threading, torch
from baton.models.batch import allocate
from baton.models.loading.checkpoint import random_model
from baton.models.recorded import recording
from baton.actors.forward.torch_device import TorchDevice
from tests.models.oracle import GRANITE

torch.set_num_threads(2)
config = {"model_type": "granitemoehybrid", "vocab_size": 300, **GRANITE}
model = random_model(config, torch.float32, torch.device("cpu"), seed=0)
pools = allocate(model, 2, 4, 16, torch.device("cpu"))
tasks = lambda: len(os.listdir("/proc/self/task"))

def make():
    before = tasks()
    TorchDevice(recording(model, pools, 64, pools.pages_for(131072)), pools, 64, 131072)
    made = tasks()
    torch.zeros(64, 8192)
    counts.append((made - before, tasks() - made))

counts = []
thread = threading.Thread(target=make)
thread.start()
thread.join()
assert counts == [(0, 1)], counts
"""


def test_the_thread_that_creates_a_device_gets_no_libgomp_team() -> None:
    """Otherwise libgomp's threads outnumber the processors and none of them spins: a decoding step took 20 % longer."""
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "2"})


def test_an_inbox_grows_with_its_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.actors.forward.torch_device.INBOX_BYTES", 16)
    bench = Bench()
    bench.open(0, [1, 2, 3, 4, 5], pages=[7, 6])
    assert unpack(bench.run([prompt(0, 5)]).tokens) == [best(5)]
    batch = bench.model.batches[-1]
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5] and batch.positions.tolist() == [0, 1, 2, 3, 4]

"""The parts of scripts/bench: statistics, floors (lower bounds of time), schedules, contenders' names, machine load."""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from scripts.benchmarks.common.configs import GRANITE, KIMI_LINEAR, MAMBA2, NEMOTRON_H, QWEN3_NEXT
from scripts.benchmarks.common.contenders import Entry, Workbench, add_contenders
from scripts.benchmarks.common.figures import (
    NeverAtOnceError,
    Spread,
    decode_rate,
    quantile,
    ratios,
    steady_rate,
    table,
)
from scripts.benchmarks.common.floors import Mixture, floor_of
from scripts.benchmarks.common.machine import Probe, all_busy, own_busy, ticks_a_second
from scripts.benchmarks.common.shapes import config_of
from scripts.benchmarks.compare import engine, families
from scripts.benchmarks.compare.peers import agreed
from scripts.benchmarks.compare.serving import summarise
from scripts.benchmarks.compare.serving.client import Answer, read_event
from scripts.benchmarks.compare.serving.schedule import Load, draw
from scripts.benchmarks.parts import relay
from scripts.benchmarks.peers import environments
from scripts.benchmarks.peers.process import Peer
from scripts.benchmarks.peers.serve_lines import Answer as Served

PROBE = Probe(1e9, 1e9, 1e12)
LOAD = Load("unique", requests=200, streams=4, rate=None, prompt=8, answer=4, shared=16, prefixes=3, turns=3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_the_smallest_value_with_the_share_below_or_equal(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    smaller = [value for value in values if value < found]
    assert not smaller or sum(value <= max(smaller) for value in values) < share * len(values) + 1e-6


def test_quantiles_of_a_hundred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50, 99, 100)
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_ratios_are_of_the_same_round() -> None:
    rounds = [{"a": 10.0, "b": 5.0}, {"a": 40.0, "b": 10.0}, {"a": 3.0, "b": 1.0}]
    assert ratios(rounds, "a", "b") == Spread(3.0, 2.0, 4.0)


def test_tokens_are_counted_while_all_streams_run() -> None:
    slow = [(1.0, 1), (2.0, 2), (3.0, 3), (9.0, 4)]
    fast = [(0.5, 1), (1.0, 4), (2.0, 6), (3.0, 8)]
    assert decode_rate([slow, fast]) == (2 + 4) / 2.0
    with pytest.raises(NeverAtOnceError):
        decode_rate([[(0.0, 1), (1.0, 2)], [(2.0, 1), (3.0, 2)]])
    with pytest.raises(NeverAtOnceError):
        decode_rate([slow, fast], least=3)


def test_rows_that_overlap_too_little_are_repeated_with_more_tokens() -> None:
    requested = []

    def generate(tokens: int) -> list[list[tuple[float, int]]]:
        """The second stream begins ten tokens after the first."""
        requested.append(tokens)
        return [[(float(start + count), count) for count in range(1, tokens + 1)] for start in (0, 10)]

    assert steady_rate(generate, 6) == 2.0
    assert requested == [7, 13, 25]
    with pytest.raises(NeverAtOnceError):
        steady_rate(lambda tokens: [[(start, 1), (start + 1, 2)] for start in (0.0, 2.0)], 2)


def test_columns_are_aligned() -> None:
    lines = table("what", ["a", "long name"], {"first": ["1", "2"], "the second": ["1,000.0", "3"]}).splitlines()
    assert lines == [
        "what              a  long name",
        "first             1          2",
        "the second  1,000.0          3",
    ]


def test_the_floor_of_mamba2() -> None:
    floor = floor_of(MAMBA2)
    # 129M weights of two bytes. States and convolution inputs of 24 layers are read and written.
    weights = 2 * (floor.projections + floor.head) + floor.others
    assert weights == pytest.approx(257e6, rel=0.01)
    assert floor.state == 2 * 4 * 24 * (24 * 64 * 128 + 3 * (1536 + 256))
    assert floor.projections == 24 * 768 * (2 * 1536 + 256 + 24 + 1536)
    assert floor.decode(16, Probe(38e9, 50e9, 1e15), history=7) == pytest.approx(
        16 / (weights / 38e9 + 16 * floor.state / 50e9)
    )
    assert floor.prefill(Probe(1.0, 1.0, 2e12), 100) == 1e12 / floor.projections


def test_products_of_many_rows_are_bound_by_arithmetic() -> None:
    floor = floor_of(MAMBA2)
    computing = 2 * 16 * (floor.projections + floor.head) / 1e11
    slow, fast = Probe(38e9, 38e9, 1e11), Probe(38e9, 38e9, 1e15)
    moving = (floor.others + 16 * floor.state) / 38e9
    assert floor.decode(16, slow, 0) == pytest.approx(16 / (computing + moving))
    few, integers = floor.decode(1, slow, 0), floor_of(MAMBA2, "int8")
    assert few == pytest.approx(38e9 / (2 * (floor.projections + floor.head) + floor.others + floor.state))
    assert integers.decode(16, slow, 0) == integers.decode(16, fast, 0)


def test_a_prompts_tokens_attend_to_half_of_the_prompt() -> None:
    floor, kimi = floor_of(GRANITE), floor_of(KIMI_LINEAR)
    assert floor.scores == 2 * 2 * GRANITE["num_attention_heads"] * 64
    assert kimi.scores == 2 * 12 * (64 + 32 + 64)
    assert 1e12 / floor.prefill(Probe(1.0, 1.0, 1e12), 1000) == pytest.approx(
        2 * floor.projections + floor.scores * 1000
    )


def test_the_floor_of_a_separate_head() -> None:
    """A step reads the head, not the embedding; a prompt uses the head only for its last token."""
    size = NEMOTRON_H["vocab_size"]
    floor, larger = floor_of(NEMOTRON_H), floor_of(NEMOTRON_H | {"vocab_size": 2 * size})
    assert NEMOTRON_H["tie_word_embeddings"] is False
    assert larger.head - floor.head == size * NEMOTRON_H["hidden_size"]
    assert larger.projections == floor.projections and larger.others == floor.others


def test_the_floors_of_smaller_weights_and_states() -> None:
    whole, half = floor_of(GRANITE), floor_of(GRANITE, "int8", state_bytes=2)
    weights = 2 * (whole.projections + whole.head) + whole.others
    read = weights + 2 * (whole.state + 100 * whole.keys)
    assert whole.decode(2, Probe(1e9, 1e9, 1e15), 100) == pytest.approx(2e9 / read)
    assert half.state * 2 == whole.state and half.projections == whole.projections
    assert half.bytes_each / whole.bytes_each == 8.5 / 16


def test_a_step_reads_only_the_experts_of_its_rows() -> None:
    floor, dense = floor_of(QWEN3_NEXT), floor_of(QWEN3_NEXT | {"num_experts": 0})
    experts, layers = QWEN3_NEXT["num_experts"], QWEN3_NEXT["num_hidden_layers"]
    top_k, inner = QWEN3_NEXT["num_experts_per_tok"], QWEN3_NEXT["moe_intermediate_size"]
    size = 3 * QWEN3_NEXT["hidden_size"] * inner
    assert floor.experts == [Mixture(experts, top_k, float(size))] * layers
    one, all_rows = floor.experts[0].read(1), floor.experts[0].read(10_000)
    assert one == pytest.approx(top_k * size) and all_rows == pytest.approx(experts * size)
    assert one < floor.experts[0].read(2) < 2 * one
    read = 2 * (floor.projections + floor.head + layers * one) + floor.others + floor.state
    assert floor.decode(1, Probe(1e9, 1e9, 1e15), 0) == pytest.approx(1e9 / read)
    # The products depend on each token's own experts, not on how many experts the step reads.
    many = floor.decode(10_000, Probe(1e15, 1e15, 1e9), 0)
    assert many == pytest.approx(1e9 / 2 / (floor.projections + floor.head + layers * top_k * size), rel=1e-3)
    assert dense.experts == [] and dense.state == floor.state


@pytest.mark.parametrize(
    ("text", "entry", "weights", "state_bytes"),
    [
        ("baton", Entry("baton", "baton", ""), "bf16", 4),
        ("baton:--quantize int8", Entry("baton:--quantize int8", "baton", "", ("--quantize", "int8")), "int8", 4),
        ("q4=baton:--quantize int4", Entry("q4", "baton", "", ("--quantize", "int4")), "int4", 4),
        ("s=baton:--state-dtype bfloat16", Entry("s", "baton", "", ("--state-dtype", "bfloat16")), "bf16", 2),
        ("s=baton:--state-dtype=bfloat16", Entry("s", "baton", "", ("--state-dtype=bfloat16",)), "bf16", 2),
        ("baton:--threads=2", Entry("baton:--threads=2", "baton", "", ("--threads=2",)), "bf16", 4),
        ("gguf:q4_k", Entry("gguf:q4_k", "gguf", "q4_k"), "q4_k", 4),
        ("i8=gguf:q4_k --threads 2", Entry("i8", "gguf", "q4_k", ("--threads", "2")), "q4_k", 4),
        ("bare", Entry("bare", "bare", ""), "bf16", 4),
        ("llama.cpp", Entry("llama.cpp:bf16", "llama.cpp", "bf16"), "bf16", 4),
        ("llama.cpp:q8_0", Entry("llama.cpp:q8_0", "llama.cpp", "q8_0"), "q8_0", 4),
        ("peer=openvino:int8", Entry("peer", "openvino", "int8"), "int8", 4),
        ("transformers:float32", Entry("transformers:float32", "transformers", "float32"), "f32", 4),
    ],
)
def test_names_of_contenders_are_parsed(text: str, entry: Entry, weights: str, state_bytes: int) -> None:
    parsed = Entry.parse(text)
    assert (parsed, parsed.weights(), parsed.state_bytes()) == (entry, weights, state_bytes)


@pytest.mark.parametrize("text", ["", "vllm", "llama.cpp:q5_1", "=baton", "bare:fast"])
def test_invalid_contenders_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"no (contender|variant|name)"):
        Entry.parse(text)


def test_two_contenders_of_one_name_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_contenders(parser)
    parsed = parser.parse_args(["--contenders", "baton", "a=baton", "gguf:q4_k"])
    assert [entry.name for entry in parsed.contenders] == ["baton", "a", "gguf:q4_k"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--contenders", "a=gguf:q4_k", "baton", "a=gguf:q8_0"])
    assert "two contenders have the name a" in capsys.readouterr().err


def test_options_of_the_server_are_added_to_baton_only() -> None:
    assert Entry.parse("a=baton:--page-size 32").with_options("--state-dtype bfloat16").options == (
        "--page-size", "32", "--state-dtype", "bfloat16",
    )  # fmt: skip
    assert Entry.parse("gguf:q4_0").with_options("--page-size 32").options == ("--page-size", "32")
    assert Entry.parse("llama.cpp").with_options("--page-size 32") == Entry.parse("llama.cpp")


def test_peers_that_are_not_installed_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    bench = Workbench(MAMBA2, tmp_path, 1, 1)
    assert "--install llama.cpp" in bench.missing(Entry.parse("llama.cpp"))
    assert bench.missing(Entry.parse("baton")) == bench.missing(Entry.parse("transformers")) == ""
    (tmp_path / "openvino").mkdir()
    (tmp_path / "openvino" / "installed").touch()
    assert "mamba2" in bench.missing(Entry.parse("openvino"))
    assert Workbench(GRANITE, tmp_path, 1, 1).missing(Entry.parse("openvino")) == ""


def test_fewer_layers_of_a_hybrid_keep_attention() -> None:
    assert config_of("granite-151m", 3)["layer_types"] == ["mamba", "mamba", "attention"]
    assert config_of("bamba-151m", 3)["attn_layer_indices"] == [2]
    assert GRANITE["layer_types"].count("attention") == 2 and len(GRANITE["layer_types"]) == 16


class Scripted:
    """A contender of a fixed speed, which logs its calls."""

    def __init__(self, name: str, speed: float, calls: list[str]) -> None:
        self._name, self._speed, self._calls = name, speed, calls

    def prefill(self, prompt: list[int]) -> float:
        self._calls.append(self._name)
        return self._speed * len(prompt)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        self._calls.append(self._name)
        return self._speed * len(prompts)


def test_contenders_take_turns_and_another_begins_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    contenders = {name: Scripted(name, speed, calls) for name, speed in (("a", 2.0), ("b", 1.0))}
    monkeypatch.setattr(engine, "probe", lambda threads: PROBE)
    plan = engine.Plan(rounds=2, prompt=10, steps=4, batches=[3], repeats=0)
    turns = engine.Rounds(contenders, plan, 100, 1, Random(0)).run()
    assert calls == ["a", "b"] * 2 + ["b", "a"] * 2 + ["a", "b"] * 2
    assert [(turn.cell, turn.figures) for turn in turns] == [
        ("prefill 10", {"a": 20.0, "b": 10.0}), ("decode 3", {"a": 6.0, "b": 3.0})
    ] * 2  # fmt: skip
    entries = [Entry("a", "baton", ""), Entry("b", "bare", "")]
    [ratio] = {engine.summarise(turns, cell, entries)["b"]["a to it"]["median"] for cell in plan.cells()}
    assert ratio == 2.0
    floor = floor_of(MAMBA2).decode(3, PROBE, engine.SHORT_PROMPT)
    assert engine.shares_of_floor(turns, plan.cells()[1], "a", floor_of(MAMBA2)) == [6.0 / floor] * 2


class Mortal(Scripted):
    """A contender that fails after some measurements."""

    def __init__(self, name: str, speed: float, calls: list[str], life: int) -> None:
        super().__init__(name, speed, calls)
        self._life = life

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        if len(self._calls) >= self._life:
            raise RuntimeError("the process ended with code -11:\nits log")
        return super().decode(prompts, steps)


def test_a_contender_that_fails_is_left_out_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    contenders = {"a": Scripted("a", 2.0, calls), "b": Mortal("b", 1.0, calls, 7), "c": Scripted("c", 3.0, calls)}
    monkeypatch.setattr(engine, "probe", lambda threads: PROBE)
    plan = engine.Plan(rounds=1, prompt=10, steps=4, batches=[3], repeats=0)
    rounds = engine.Rounds(contenders, plan, 100, 1, Random(0))
    turns = rounds.run()
    assert rounds.failures == {"b": "in 'decode 3': the process ended with code -11"}
    assert [turn.figures for turn in turns] == [{"a": 20.0, "b": 10.0, "c": 30.0}, {"a": 6.0, "c": 9.0}]
    alone = engine.Rounds({"b": Mortal("b", 1.0, [], 3)}, plan, 100, 1, Random(0))
    assert [turn.cell for turn in alone.run()] == ["prefill 10"] and list(alone.failures) == ["b"]


def test_a_process_that_has_ended_is_reported_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "peer.py").write_text("import sys; print('{}', flush=True); input(); sys.exit('out of order')")
    with Peer(sys.executable, str(tmp_path / "peer.py"), [], 1, tmp_path / "log") as peer:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"ended with code 1 \(log: .*\):\nout of order"):
                peer.generate([[1]], 1)


@dataclass(frozen=True)
class Bench:
    """A workbench whose contenders log their prompts for each model shape."""

    read: defaultdict[int, list[tuple[int, ...]]]
    config: dict[str, Any] = field(default_factory=dict)
    threads: int = 1

    @contextmanager
    def open(self, entry: Entry) -> Iterator["Bench"]:
        yield self

    def prefill(self, prompt: list[int]) -> float:
        self.read[id(self.config)].append(tuple(prompt))
        return 1.0

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        self.read[id(self.config)] += map(tuple, prompts)
        return 1.0


def test_no_shape_reads_the_same_prompt_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "probe", lambda threads: PROBE)
    plan = engine.Plan(rounds=2, prompt=10, steps=4, batches=[2], repeats=0)
    configs: dict[str, Any] = {shape: {"vocab_size": 100} for shape in (families.FIRST, "one", "other")}
    bench: Any = Bench(defaultdict(list))
    families.measure(plan, configs, Entry("baton", "baton", ""), bench)
    read = [bench.read[id(config)] for config in configs.values()]
    assert [len(prompts) for prompts in read] == [18, 9, 9]
    assert all(len({*prompts}) == len(prompts) for prompts in read)


def test_a_turn_is_repeated_while_other_processes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([0.9, 0.4, 0.6, 0.05, 0.0])

    class Loaded(engine.Watch):
        def __exit__(self, *_: object) -> None:
            self.others = next(loads)

    calls: list[str] = []
    monkeypatch.setattr(engine, "Watch", Loaded)
    monkeypatch.setattr(engine, "probe", lambda threads: PROBE)
    plan = engine.Plan(rounds=1, prompt=10, steps=4, batches=[], repeats=2)
    # Round 0 is taken once, however busy the machine is; round 1 is repeated until the machine is quiet.
    [turn] = engine.Rounds({"a": Scripted("a", 1.0, calls)}, plan, 100, 1, Random(0)).run()
    assert (turn.others, len(calls)) == (0.05, 4)


def test_the_quietest_turn_counts_if_none_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([0.0, 0.9, 0.4, 0.6])

    class Loaded(engine.Watch):
        def __exit__(self, *_: object) -> None:
            self.others = next(loads)

    monkeypatch.setattr(engine, "Watch", Loaded)
    monkeypatch.setattr(engine, "probe", lambda threads: PROBE)
    plan = engine.Plan(rounds=1, prompt=10, steps=4, batches=[], repeats=2)
    [turn] = engine.Rounds({"a": Scripted("a", 1.0, [])}, plan, 100, 1, Random(0)).run()
    assert turn.others == 0.4


def test_the_load_of_the_machine_and_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 50 6 7 8 90 0\ncpu0 1 1 1 1\n")
    for process, parent, times in ((10, 1, (1, 2, 3, 4)), (11, 10, (10, 0, 0, 0)), (12, 1, (99, 99, 99, 99))):
        folder = tmp_path / str(process)
        folder.mkdir()
        fields = ["S", parent, *[0] * 9, *times, 20]
        (folder / "stat").write_text(f"{process} (a) name) {' '.join(map(str, fields))}\n")
    assert all_busy(tmp_path) == (100 + 20 + 30 + 6 + 7 + 8) / ticks_a_second()
    assert own_busy(10, tmp_path) == (1 + 2 + 3 + 4 + 10) / ticks_a_second()


def test_schedules_depend_only_on_the_seed() -> None:
    assert draw(LOAD, 100, 1) == draw(LOAD, 100, 1) != draw(LOAD, 100, 2)
    words = {word for conversation in draw(LOAD, 100, 1) for word in conversation.turns[0].split()}
    assert words == {f"t{id}" for id in range(99)}
    assert all(
        len(conversation.turns[0].split()) == 8 and conversation.begins is None for conversation in draw(LOAD, 9, 1)
    )


def test_arrivals_at_a_rate() -> None:
    load = Load(**{name: getattr(LOAD, name) for name in Load.__dataclass_fields__} | {"rate": 50.0, "requests": 4000})
    times = [conversation.begins for conversation in draw(load, 9, 1)]
    assert times[0] == 0.0 and times == sorted(times)  # type: ignore[type-var]
    gaps = [later - earlier for earlier, later in pairwise(times)]  # type: ignore[operator]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    # Exponential gaps are longer than their mean with probability 1/e.
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_shared_prefixes_and_turns() -> None:
    values = {name: getattr(LOAD, name) for name in Load.__dataclass_fields__}
    shared = draw(Load(**values | {"workload": "shared"}), 100, 1)
    assert len({tuple(conversation.turns[0].split()[:16]) for conversation in shared}) == 3
    assert all(len(conversation.turns[0].split()) == 16 + 8 for conversation in shared)
    talks = draw(Load(**values | {"workload": "turns"}), 100, 1)
    assert all([len(turn.split()) for turn in conversation.turns] == [8, 8, 8] for conversation in talks)


def test_figures_of_answers() -> None:
    good = [
        Answer(begin=10.0, arrivals=[11.0, 11.1, 11.3], prompt_tokens=100, completion_tokens=3, cached_tokens=25),
        Answer(begin=10.5, arrivals=[12.5, 12.6, 12.9], prompt_tokens=100, completion_tokens=3, cached_tokens=75),
    ]
    figures = summarise([*good, Answer(begin=10.0, error="503")], others=0.5)
    assert (figures.first_p50, figures.first_p99) == (1.0, 2.0)
    assert figures.gap_p50 == pytest.approx(0.1) and figures.gap_p99 == pytest.approx(0.3)
    assert figures.tokens == pytest.approx(6 / 2.9) and figures.requests == pytest.approx(2 / 2.9)
    assert (figures.hit_rate, figures.errors, figures.others) == (0.5, 1, 0.5)
    assert summarise([Answer(0.0, [1.0], prompt_tokens=5, completion_tokens=1)], 0.0).hit_rate is None
    with pytest.raises(RuntimeError, match="none of 1 requests was answered: 503"):
        summarise([Answer(0.0, error="503")], 0.0)


def test_events_of_a_stream() -> None:
    answer = Answer(begin=0.0)
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    texts = [{"choices": [{"text": text}]} for text in ("t1", " t2", "")]
    for at, event in enumerate([*texts, {"choices": [], "usage": usage}]):
        read_event(answer, float(at), event)
    assert answer == Answer(0.0, [0.0, 1.0], "t1 t2", 9, 2, 4)
    read_event(answer, 4.0, {"error": {"message": "no"}})
    assert "no" in answer.error


def test_a_step_between_two_readings() -> None:
    text = """
baton:steps_total{{model_name="m"}} {steps}
baton:device_busy_seconds_total{{model_name="m"}} {device}
baton:relay_overhead_seconds_bucket{{model_name="m",le="+Inf"}} 5
baton:relay_overhead_seconds_sum{{model_name="m"}} {overhead}
baton:actor_busy_seconds_total{{model_name="m",actor="cache"}} {cache}
baton:actor_busy_seconds_total{{model_name="m",actor="results"}} {results}
"""
    header = "# TYPE baton:relay_overhead_seconds histogram\n"
    before = relay.parse(header + text.format(steps=10, device=1, overhead=0.5, cache=0.25, results=1), 100.0, 2.0)
    after = relay.parse(header + text.format(steps=20, device=3, overhead=1.0, cache=0.5, results=2), 104.0, 4.0)
    step = relay.between(before, after, others=0.0)
    assert (step.wall, step.device, step.overhead) == (0.4, 0.2, 0.05)
    assert step.actors == {"cache": 0.025, "results": 0.1} and step.relay == 0.125
    assert step.http == pytest.approx(0.2 - 0.125)
    with pytest.raises(ValueError, match="no step ended"):
        relay.between(after, after, others=0.0)
    with pytest.raises(ValueError, match="baton:steps_total"):
        relay.parse("", 0.0, 0.0)


def test_tokens_of_a_peer_and_their_common_prefix() -> None:
    answer = Served(rows=2)
    answer.add(1, [4, 5])
    answer.add(0, [6])
    assert answer.tokens == [[6], [4, 5]] and [len(row) for row in answer.seconds] == [1, 2]
    assert json.loads(json.dumps(answer.seconds))[0][0] >= answer.seconds[1][0] >= 0
    assert (agreed([1, 2, 3], [1, 2, 4]), agreed([1, 2], [1, 2]), agreed([0], [1])) == (2, 2, 0)

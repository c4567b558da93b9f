"""Prefill and decode speeds of the contenders: medians, ratios within a round, and shares of the floor.

A turn measures one contender after another. A round takes one turn for each cell (see Cell). The floor is a lower bound
of the time of a step (common/floors.py).
"""

import argparse
import contextlib
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from scripts.benchmarks.common.contenders import Contender, Entry, Workbench, add_contenders
from scripts.benchmarks.common.figures import Spread, describe_machine, ratios, table, write_json
from scripts.benchmarks.common.floors import Floor, floor_of
from scripts.benchmarks.common.machine import QUIET, Probe, Watch, cpu_name, probe

DEFAULT = ("baton", "bare", "transformers", "llama.cpp:bf16", "llama.cpp:q8_0", "llama.cpp:q4_0")
FOR_HYBRIDS = ("openvino:int8", "openvino:bf16")
SHORT_PROMPT = 16
FAILURES = (RuntimeError, OSError, ValueError, KeyError, aiohttp.ClientError)
"""Raised if the process of a contender fails, or answers nonsense."""


@dataclass(frozen=True)
class Cell:
    """One kind of measurement: a line of the printed tables."""

    name: str
    rows: int  # rows that decode together; 0 measures the prefill of one prompt
    prompt: int  # tokens of each prompt


@dataclass(frozen=True)
class Turn:
    """The measurement of a cell with every contender, one right after another."""

    cell: str
    round: int
    figures: dict[str, float]  # tokens per second of each contender
    others: float  # mean number of processors that other processes used during the turn
    probe: Probe  # the machine's speeds, measured in the same turn


@dataclass(frozen=True)
class Plan:
    """The extent of the measurements."""

    rounds: int
    prompt: int  # tokens of the prompt whose prefill is measured
    steps: int  # tokens that each row decodes
    batches: Sequence[int]  # numbers of rows that decode together
    repeats: int  # how often a turn is repeated while other processes disturb it
    behind: Sequence[int] = ()  # lengths of history in tokens; after each length, a single row decodes

    def cells(self) -> list[Cell]:
        return [
            Cell(f"prefill {self.prompt}", 0, self.prompt),
            *(Cell(f"decode {rows}", rows, SHORT_PROMPT) for rows in self.batches),
            *(Cell(f"decode 1 behind {tokens}", 1, tokens) for tokens in self.behind),
        ]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_contenders(parser)
    parser.add_argument(
        "--server-options", default="", metavar="OPTIONS", help="options for each baton server, as one string"
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 4, 16, 64], help="numbers of rows that decode together"
    )
    parser.add_argument("--behind", type=int, nargs="+", default=[], help="also decode one row after this many tokens")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt whose prefill is measured")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded in each measurement")
    parser.add_argument("--repeats", type=int, default=3, help="how often a turn is repeated if other processes ran")


def run(options: argparse.Namespace, workbench: Workbench) -> int:
    entries = [entry.with_options(options.server_options) for entry in options.contenders or default(workbench)]
    for entry in entries:
        if reason := workbench.missing(entry):
            print(reason)
    entries = [entry for entry in entries if not workbench.missing(entry)]
    plan = Plan(options.rounds or 5, options.prompt, options.steps, options.batches, options.repeats, options.behind)
    with contextlib.ExitStack() as stack:
        contenders, failures = open_all(entries, workbench, stack)
        rounds = Rounds(contenders, plan, workbench.config["vocab_size"], workbench.threads, random.Random(0))
        turns = rounds.run()
        failures |= rounds.failures
        entries = [entry for entry in entries if entry.name not in failures]
        if entries:
            show(turns, entries, plan, workbench.config)
        for name, reason in failures.items():
            print(f"{name} failed and is left out: {reason}")
        record = {"command": "engine", "model": options.model, "machine": describe_machine(workbench.threads)}
        summary = {cell.name: summarise(turns, cell, entries) for cell in plan.cells() if entries}
        of_turns = {"turns": [asdict(turn) for turn in turns], "summary": summary, "failures": failures}
        write_json(options.json, record | of_turns)
    return 0 if entries else 1


def open_all(
    entries: Sequence[Entry], workbench: Workbench, stack: contextlib.ExitStack
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Start the contenders, until `stack` is closed. Return them, and the reason for each that failed, by name."""
    contenders, failures = dict[str, Contender](), dict[str, str]()
    for entry in entries:
        try:
            contenders[entry.name] = stack.enter_context(workbench.open(entry))
        except FAILURES as error:
            failures[entry.name] = first_line(error)
    return contenders, failures


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(":")


class ContenderFailed(RuntimeError):
    """A contender failed in a turn: its process ended, or its answer is not the one that was asked for."""

    def __init__(self, name: str, cell: str, error: Exception) -> None:
        super().__init__(f"in {cell!r}: {first_line(error)}")
        self.name = name


def default(workbench: Workbench) -> list[Entry]:
    """Return all contenders that can run this model."""
    hybrid = workbench.config["model_type"] != "mamba2"
    return [Entry.parse(text) for text in (*DEFAULT, *(FOR_HYBRIDS if hybrid else ()))]


class Rounds:
    """The rounds of a plan. Round 0 warms everything up and is dropped.

    rng: draws the prompts. All prompts differ: a server would answer a repeated prompt from its cache.
    """

    def __init__(
        self, contenders: dict[str, Contender], plan: Plan, vocabulary: int, threads: int, rng: random.Random
    ) -> None:
        self._contenders, self._plan = contenders, plan
        self._vocabulary, self._threads = vocabulary, threads
        self._random = rng
        self.failures = dict[str, str]()  # the reason for each contender that `run` has left out

    def run(self) -> list[Turn]:
        """Take all turns. A contender that fails is left out from then on, and its turn is repeated without it."""
        turns = list[Turn]()
        for number in range(self._plan.rounds + 1):
            print(f"round {number} of {self._plan.rounds}", file=sys.stderr, flush=True)
            turns += [turn for cell in self._plan.cells() if (turn := self._turn_of_survivors(cell, number))]
        return [turn for turn in turns if turn.round]

    def _turn_of_survivors(self, cell: Cell, number: int) -> Turn | None:
        while self._contenders:
            try:
                return self.turn(cell, number)
            except ContenderFailed as failed:
                del self._contenders[failed.name]
                self.failures[failed.name] = str(failed)
        return None

    def turn(self, cell: Cell, number: int) -> Turn:
        """Take a turn, and repeat it while other processes disturb it, except in round 0; return the quietest turn.

        Raises ContenderFailed if a contender fails.
        """
        if number == 0:
            return self._turn(cell, 0)
        turns: list[Turn] = []
        for _ in range(1 + self._plan.repeats):
            turns.append(self._turn(cell, number))
            if turns[-1].others <= QUIET:
                break
        return min(turns, key=lambda turn: turn.others)

    def _turn(self, cell: Cell, number: int) -> Turn:
        """Measure every contender once. Each round begins with a different contender."""
        names = list(self._contenders)
        first = number % len(names)
        prompts = [self._draw(cell.prompt) for _ in range(max(cell.rows, 1))]
        with Watch() as watch:
            by_name = {name: self._figure(name, cell, prompts) for name in names[first:] + names[:first]}
            speeds = probe(self._threads)
        figures = {name: by_name[name] for name in names}
        return Turn(cell.name, number, figures, watch.others, speeds)

    def _figure(self, name: str, cell: Cell, prompts: list[list[int]]) -> float:
        contender = self._contenders[name]
        try:
            return contender.decode(prompts, self._plan.steps) if cell.rows else contender.prefill(prompts[0])
        except FAILURES as error:
            raise ContenderFailed(name, cell.name, error) from error

    def _draw(self, tokens: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(tokens)]


def summarise(turns: Sequence[Turn], cell: Cell, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return, for each contender, the spread of its speeds, and of the first contender's ratios to these speeds."""
    rounds = [turn.figures for turn in turns if turn.cell == cell.name]
    first = entries[0].name
    return {
        entry.name: {
            "tokens_per_second": asdict(Spread.of([figures[entry.name] for figures in rounds])),
            f"{first} to it": asdict(ratios(rounds, first, entry.name)),
        }
        for entry in entries
    }


def shares_of_floor(turns: Sequence[Turn], cell: Cell, name: str, floor: Floor) -> list[float]:
    """Return a contender's speed in each turn, divided by the upper bound that follows from the floor."""
    return [
        turn.figures[name]
        / (floor.decode(cell.rows, turn.probe, cell.prompt) if cell.rows else floor.prefill(turn.probe, cell.prompt))
        for turn in turns
        if turn.cell == cell.name
    ]


def show(turns: Sequence[Turn], entries: Sequence[Entry], plan: Plan, config: dict[str, Any]) -> None:
    names, first = [entry.name for entry in entries], entries[0].name
    floors = [floor_of(config, entry.weights(), entry.state_bytes()) for entry in entries]
    medians, compared, shares = dict[str, list[str]](), dict[str, list[str]](), dict[str, list[str]]()
    for cell in plan.cells():
        rounds = [turn.figures for turn in turns if turn.cell == cell.name]
        medians[cell.name] = [f"{Spread.of([figures[name] for figures in rounds]).median:,.1f}" for name in names]
        compared[cell.name] = [str(ratios(rounds, first, name)) for name in names[1:]]
        of_floor = [
            shares_of_floor(turns, cell, entry.name, floor) for entry, floor in zip(entries, floors, strict=True)
        ]
        shares[cell.name] = [f"{Spread.of(each).median:.2f}" for each in of_floor]
    print(table("tokens/s, medians", names, medians))
    if len(names) > 1:
        print("\n" + table(f"{first} / …", names[1:], compared))
    print("\n" + table("share of the floor", names, shares))
    speeds, rates = [turn.probe.read / 1e9 for turn in turns], [turn.probe.operations / 1e9 for turn in turns]
    busy = sum(turn.others > QUIET for turn in turns)
    print(
        f"\n{cpu_name()}; {plan.rounds} rounds; "
        f"memory read at {min(speeds):.0f} to {max(speeds):.0f} GB/s, products at "
        f"{min(rates):,.0f} to {max(rates):,.0f} GFLOP/s; in {busy} of {len(turns)} turns other processes ran"
    )

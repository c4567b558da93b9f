"""One model of each family: the share of its own floor that its speed reaches, and that share relative to mamba2's.

Each model is measured alternately with mamba2's. The floor is a lower bound of the time of a step (common/floors.py).
"""

import argparse
import contextlib
import random
import sys
from dataclasses import asdict, replace
from typing import Any

from scripts.benchmarks.common.contenders import Entry, Workbench
from scripts.benchmarks.common.figures import Spread, describe_machine, table, write_json
from scripts.benchmarks.common.floors import Floor, floor_of
from scripts.benchmarks.common.machine import QUIET
from scripts.benchmarks.common.shapes import SHAPES, config_of
from scripts.benchmarks.compare.engine import Plan, Rounds, Turn, shares_of_floor

FIRST = "mamba2-129m"
# Kinds of contender: (variant, title of the tables). Each server gets little memory, because all are open at once.
KINDS = {
    "bare": ("", "the model's own loop"),
    "baton": (
        "--memory 768M --host-memory 64M",
        "through the server; server and client run on the same cores",
    ),
}
OTHERS = [shape for shape in SHAPES if shape.endswith("m") and shape != FIRST]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=OTHERS, default=OTHERS, help=f"models to compare with {FIRST}")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="how the models run")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="numbers of rows that decode together")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt whose prefill is measured")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded in each measurement")
    parser.add_argument("--repeats", type=int, default=1, help="how often a turn is repeated if other processes ran")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    plan = Plan(options.rounds or 5, options.prompt, options.steps, options.batches, options.repeats)
    configs = {shape: config_of(shape, options.layers) for shape in (FIRST, *options.shapes)}
    floors = {shape: floor_of(config) for shape, config in configs.items()}
    record: dict[str, Any] = {"command": "families", "machine": describe_machine(workbench.threads)}
    for kind in options.kinds:
        of_kind, title = KINDS[kind]
        print(f"\n{kind}: {title}\n", flush=True)
        found = measure(plan, configs, Entry(kind, kind, "").with_options(of_kind), workbench)
        show(found, plan, floors)
        record[kind] = {shape: [asdict(turn) for turn in turns] for shape, turns in found.items()}
    write_json(options.json, record)


def measure(plan: Plan, configs: dict[str, Any], entry: Entry, workbench: Workbench) -> dict[str, list[Turn]]:
    """Return the turns of each shape except FIRST. Each turn measures FIRST and that shape. Round 0 is dropped."""
    rng = random.Random(0)
    smallest = min(config["vocab_size"] for config in configs.values())
    with contextlib.ExitStack() as stack:
        opened = {
            shape: stack.enter_context(replace(workbench, config=config).open(entry))
            for shape, config in configs.items()
        }
        first = opened.pop(FIRST)
        pairs = {
            shape: Rounds({FIRST: first, shape: each}, plan, smallest, workbench.threads, rng)
            for shape, each in opened.items()
        }
        found: dict[str, list[Turn]] = {shape: [] for shape in pairs}
        for number in range(plan.rounds + 1):
            print(f"round {number} of {plan.rounds}", file=sys.stderr, flush=True)
            for cell in plan.cells():
                for shape, rounds in pairs.items():
                    found[shape].append(rounds.turn(cell, number))
    return {shape: [turn for turn in turns if turn.round] for shape, turns in found.items()}


def show(found: dict[str, list[Turn]], plan: Plan, floors: dict[str, Floor]) -> None:
    cells, all_turns = plan.cells(), [turn for turns in found.values() for turn in turns]
    speeds, of_floor, compared = dict[str, list[str]](), dict[str, list[str]](), dict[str, list[str]]()
    for shape, turns in {FIRST: all_turns, **found}.items():
        own = [shares_of_floor(turns, cell, shape, floors[shape]) for cell in cells]
        first = [shares_of_floor(turns, cell, FIRST, floors[FIRST]) for cell in cells]
        rates = [[turn.figures[shape] for turn in turns if turn.cell == cell.name] for cell in cells]
        speeds[shape] = [f"{Spread.of(each).median:,.1f}" for each in rates]
        of_floor[shape] = [str(Spread.of(each)) for each in own]
        compared[shape] = [
            str(Spread.of([a / b for a, b in zip(*pair, strict=True)])) for pair in zip(own, first, strict=True)
        ]
    names = [cell.name for cell in cells]
    print(table("tokens/s, medians", names, speeds))
    print("\n" + table("share of the floor", names, of_floor))
    print("\n" + table(f"that / {FIRST}'s", names, {shape: compared[shape] for shape in found}))
    busy = sum(turn.others > QUIET for turn in all_turns)
    print(f"\n{plan.rounds} rounds; in {busy} of {len(all_turns)} turns other processes ran")

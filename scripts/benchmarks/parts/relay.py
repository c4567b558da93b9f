"""The time of a decode step, split into the device's, each actor's and HTTP's part, from the server's own metrics."""

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from scripts.benchmarks.common.contenders import Entry, Workbench
from scripts.benchmarks.common.figures import Spread, describe_machine, table, write_json
from scripts.benchmarks.common.machine import QUIET, Watch, thread_busy
from scripts.benchmarks.common.server import Served
from scripts.benchmarks.requests.gaps import Load


@dataclass(frozen=True)
class Reading:
    """The server's counters at one moment. Seconds and steps are counted from the server's start."""

    at: float  # time of the reading, time.perf_counter
    steps: float
    device: float  # seconds that the device was busy
    overhead: float  # seconds between the end of a step and the beginning of the next
    loop: float  # processor seconds of the event loop's thread
    actors: dict[str, float]  # busy seconds of each actor


@dataclass(frozen=True)
class Step:
    """The mean step between two readings, in seconds."""

    wall: float  # time from one step to the next
    device: float
    overhead: float  # time from the end of a step to the beginning of the next
    actors: dict[str, float]
    http: float  # time of the event loop's thread outside of actors
    others: float  # mean number of processors that other processes used during the measurement

    @property
    def relay(self) -> float:
        """Seconds of all actors together."""
        return sum(self.actors.values())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server-options", default="", metavar="OPTIONS", help="options for the server, as one string")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 16, 64], help="numbers of rows that decode together"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")


def run(options: argparse.Namespace, workbench: Workbench) -> int:
    """Measure all batch sizes in each round. The first round is dropped."""
    found: dict[int, list[Step]] = {rows: [] for rows in options.batches}
    with workbench.serve(Entry.parse("baton").with_options(options.server_options)) as served:
        for number in range((options.rounds or 3) + 1):
            for rows in options.batches:
                step = asyncio.run(measure(served, workbench.config["vocab_size"], rows, options.seconds))
                if number:
                    found[rows].append(step)
    show(found)
    record = {"command": "relay", "model": options.model, "machine": describe_machine(workbench.threads)}
    steps = {rows: [asdict(step) for step in round_steps] for rows, round_steps in found.items()}
    write_json(options.json, record | {"steps": steps})
    return 0


async def measure(served: Served, vocabulary: int, rows: int, seconds: float) -> Step:
    """Return the mean step over `seconds` seconds, while `rows` streams decode that are warm already."""
    async with (
        aiohttp.ClientSession(served.url, connector=aiohttp.TCPConnector(limit=0)) as http,
        Load(http, vocabulary).running(rows),
    ):
        with Watch() as watch:
            before = await read(http, served)
            await asyncio.sleep(seconds)
            after = await read(http, served)
    return between(before, after, watch.others)


async def read(http: aiohttp.ClientSession, served: Served) -> Reading:
    async with http.get("/metrics", raise_for_status=True) as answer:
        return parse(await answer.text(), time.perf_counter(), thread_busy(served.process))


def parse(metrics: str, at: float, loop: float) -> Reading:
    """Parse the text of /metrics. Raises ValueError if a metric is missing."""
    found, actors = dict[str, float](), dict[str, float]()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "baton:actor_busy_seconds_total":
                actors[sample.labels["actor"]] = sample.value
            else:
                found[sample.name] = sample.value
    names = ("baton:steps_total", "baton:device_busy_seconds_total", "baton:relay_overhead_seconds_sum")
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"the server's metrics lack {', '.join(missing)}")
    steps, device, overhead = (found[name] for name in names)
    return Reading(at, steps, device, overhead, loop, actors)


def between(before: Reading, after: Reading, others: float) -> Step:
    """Return the mean step between two readings. Raises ValueError if no step has ended between them."""
    steps = after.steps - before.steps
    if steps < 1:
        raise ValueError("no step ended while it was measured: take more --seconds")
    actors = {name: (seconds - before.actors.get(name, 0.0)) / steps for name, seconds in after.actors.items()}
    loop = (after.loop - before.loop) / steps
    return Step(
        wall=(after.at - before.at) / steps,
        device=(after.device - before.device) / steps,
        overhead=(after.overhead - before.overhead) / steps,
        actors=actors,
        http=max(loop - sum(actors.values()), 0.0),
        others=others,
    )


def show(found: dict[int, list[Step]]) -> None:
    rows = {}
    for label, of in lines(found).items():
        rows[label] = [cell_of([of(step) for step in steps], [step.wall for step in steps]) for steps in found.values()]
    print(table("us per step (share of it)", [f"batch {rows}" for rows in found], rows))
    busy = [step.others > QUIET for steps in found.values() for step in steps]
    print(f"medians of {len(next(iter(found.values())))} rounds; in {sum(busy)} of {len(busy)} other processes ran")


def lines(found: dict[int, list[Step]]) -> dict[str, Callable[[Step], float]]:
    """Return the lines of the table: each title, and a function that takes the line's seconds from a step."""
    actors = sorted({name for steps in found.values() for step in steps for name in step.actors})
    return {
        "step": lambda step: step.wall,
        "device": lambda step: step.device,
        "device idle between steps": lambda step: step.overhead,
        **{name: lambda step, name=name: step.actors.get(name, 0.0) for name in actors},  # type: ignore[misc]
        "all actors": lambda step: step.relay,
        "rest of the loop (HTTP)": lambda step: step.http,
    }


def cell_of(seconds: list[float], walls: list[float]) -> str:
    """Return a cell of the table: the median in microseconds, and the median share of the step's time."""
    share = Spread.of([one / wall for one, wall in zip(seconds, walls, strict=True)]).median
    return f"{1e6 * Spread.of(seconds).median:,.0f} ({share:.1%})"

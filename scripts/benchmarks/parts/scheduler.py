"""Processor time of the scheduler for one step: receiving all messages between two steps, and planning.

    scripts/benchmarks/parts/scheduler.py ROOT ROWS STEPS

As a program, it runs the scheduler of the checkout in ROOT with ROWS decoding rows. For each line of stdin it runs
STEPS steps and prints the milliseconds per step. `measure` starts one program per revision and lets them take turns.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT)]
if __name__ == "__main__":
    from scripts.launch import import_from

    import_from(Path(sys.argv[1]))

from baton.actors.grants import GrantPages  # noqa: E402
from baton.actors.lease import Lease, Ledger  # noqa: E402
from baton.actors.messages import (  # noqa: E402
    Acquire,
    Extend,
    Extended,
    Granted,
    Message,
    Settled,
    Spare,
    Step,
    Submit,
    Want,
)
from baton.actors.requests import Hit, Request, Sampling, Stops  # noqa: E402
from baton.actors.scheduler.actor import Scheduler  # noqa: E402
from baton.actors.scheduler.state import Limits  # noqa: E402
from baton.actors.tokens import count, pack  # noqa: E402
from scripts.benchmarks.common.revisions import check_out  # noqa: E402

PAGE_SIZE, TRACK_INTERVAL, STEP_TOKENS, LONGEST = 16, 256, 2048, 1 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=256, help="decoding rows")
    parser.add_argument("--steps", type=int, default=256, help="steps of a round")
    parser.add_argument("--against", metavar="REVISION", help="also measure this git revision, in turns")


def run(options: argparse.Namespace, workbench: object) -> None:
    measure(options.rows, options.rounds or 15, options.steps, options.against)


class Decoding:
    """A scheduler with `rows` decoding rows, and a stand-in for the cache that grants every request at once."""

    def __init__(self, rows: int) -> None:
        self.seconds = 0.0
        self._rows = rows
        self._sent: deque[Message] = deque()
        self._steps: deque[Step] = deque()
        self._ledger = Ledger(2 * rows)
        limits = Limits(rows, rows, STEP_TOKENS, page_size=PAGE_SIZE, track_interval=TRACK_INTERVAL)
        self._scheduler = Scheduler(lambda to, message: self._sent.append(message), limits)
        # Prompts have different lengths, so that rows reach ends of pages and checkpoint intervals at different steps.
        prompts = [pack([index % 100] * (40 + index * TRACK_INTERVAL // rows)) for index in range(rows)]
        self._receive([Submit(Request(f"{i}", p, count(p), Sampling(), Stops(LONGEST))) for i, p in enumerate(prompts)])
        while len(self._scheduler.state.rows) < rows or any(r.prefilling for r in self._scheduler.state.rows.values()):
            self.step()

    def step(self) -> None:
        """Settle the oldest step, so that the scheduler plans the next step."""
        self._receive([Settled(self._steps.popleft().step, [])])

    def close(self) -> None:
        self._ledger.close()

    def _receive(self, messages: Sequence[Message]) -> None:
        """Deliver messages to the scheduler, then the cache's answers to what it sends. Only the scheduler is timed."""
        while messages:
            began = time.process_time()
            for message in messages:
                self._scheduler.receive(message)
            self._scheduler.act()
            self.seconds += time.process_time() - began
            sent, self._sent = self._sent, deque()
            messages = [answer for message in sent if (answer := self._answer(message)) is not None]

    def _answer(self, message: Message) -> Message | None:
        """Return the cache's answer to a message, or None. Steps are kept here, in place of forward."""
        match message:
            case Acquire(grant, tokens):
                [state] = self._slots(1)
                pages = list(range(-(-(count(tokens) + 1) // PAGE_SIZE)))
                return Granted(grant, state, Hit(), False, None, pages, None, None)
            case Want(grant, checkpoints):
                return Spare(grant, self._slots(len(checkpoints)), [])
            case Extend(grants):
                return Extended([GrantPages(grant, [0]) for grant in grants], [])
            case Step(checkpoints=checkpoints):
                self._steps.append(message)
                for checkpoint in checkpoints:
                    self._ledger.free(checkpoint.lease)
        return None

    def _slots(self, count: int) -> list[Lease]:
        leases = [self._ledger.take("scheduler") for _ in range(count)]
        return [lease for lease in leases if lease is not None]


class Worker:
    """A process that runs the scheduler of a checkout."""

    def __init__(self, root: Path, rows: int, steps: int) -> None:
        command = [sys.executable, "-P", __file__, str(root), str(rows), str(steps)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def round(self) -> float:
        """Run one round and return milliseconds per step. Raises RuntimeError if the process has died."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the scheduler's process ended with code {self._process.wait()}; its stderr says why")
        return float(answer)


def measure(rows: int, rounds: int, steps: int, against: str | None) -> None:
    """Print the times of this checkout's scheduler and, if `against` is given, of that revision's scheduler.

    Each round measures both schedulers, one after the other. The first round is dropped.
    """
    with ExitStack() as stack:
        roots = {"here": ROOT}
        if against is not None:
            roots[against] = check_out(against, "actors", Path(stack.enter_context(tempfile.TemporaryDirectory())))
        workers = {name: stack.enter_context(Worker(root, rows, steps)) for name, root in roots.items()}
        found = [{name: worker.round() for name, worker in workers.items()} for _ in range(rounds + 1)][1:]
    print(f"{f'{rows} decoding rows, ms a step':<32}{'median':>8}{'min':>8}{'max':>8}")
    for name in roots:
        figures = [both[name] for both in found]
        print(f"{name:<32}{statistics.median(figures):>8.3f}{min(figures):>8.3f}{max(figures):>8.3f}")
    if against is not None:
        ratios = sorted(both[against] / both["here"] for both in found)
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        median = statistics.median(ratios)
        print(f"{against} / here: {median:.3g} (median of {rounds}, half of them {low:.3g} to {high:.3g})")


def main(rows: int, steps: int) -> None:
    decoding = Decoding(rows)
    for _ in sys.stdin:
        decoding.seconds = 0.0
        for _ in range(steps):
            decoding.step()
        print(1e3 * decoding.seconds / steps, flush=True)
    decoding.close()


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]))

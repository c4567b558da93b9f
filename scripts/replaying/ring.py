"""The four real actors in virtual time, with a device that computes nothing but takes the time of its cost model."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.actors.actor import Actor, Address, Send
from baton.actors.cache.actor import Cache
from baton.actors.forward.actor import Forward
from baton.actors.forward.device import Work
from baton.actors.lease import Ledger
from baton.actors.messages import Delta, Ended, Message, Ran, Submit, Transferred
from baton.actors.requests import Output, Request
from baton.actors.results.actor import ResultProcessor
from baton.actors.runtime.transport import arrive, depart
from baton.actors.scheduler.actor import Scheduler
from baton.actors.tokens import pack
from scripts.replaying.clock import Clock
from scripts.replaying.costs import Costs


class NoText:
    """A vocabulary without text, which is its own detokenizer: the replay reads no text."""

    def detokenizer(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> "NoText":
        return self

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(eq=False, slots=True)
class Running:
    """A submitted request. Times are virtual seconds."""

    request: Request
    answer: list[int]  # tokens that the device will generate
    submitted: float
    first_token: float | None = None
    output: Output | None = None  # the latest output; the first one reports the admission
    begun: Callable[["Running"], None] | None = None  # called when the first token has come
    ended: Callable[["Running"], None] | None = None  # called when the request has ended


@dataclass(eq=False)
class VirtualDevice:
    """A device with one stream: each call begins when all previous calls have ended, and takes the time of `costs`."""

    costs: Costs
    requests: dict[str, Running]
    clock: Clock
    deliver: Callable[[Ran | Transferred], None]  # sends a report to forward
    free_at: float = 0.0  # when all calls so far will have ended
    busy: float = 0.0  # seconds of all calls so far
    computed: int = 0  # units of prompts that were computed so far
    steps: int = 0
    copies_aside: bool = False
    _rows: dict[int, Running] = field(default_factory=dict)

    def clear(self, slot: int) -> None:
        pass

    def poison(self, slot: int) -> None:
        pass

    def copy(self, source: int, target: int) -> None:
        self._take(self.costs.copy)

    def copy_page(self, source: int, target: int) -> None:
        self._take(self.costs.copy)

    def export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        self._take(self.costs.transfer(position))
        self.clock.at(self.free_at, lambda: self.deliver(Transferred(key)))

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> None:
        self._take(self.costs.transfer(len(pages)))
        self.clock.at(self.free_at, lambda: self.deliver(Transferred(key, grant)))

    def drop(self, key: int) -> None:
        pass

    def drop_all(self) -> None:
        pass

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        self._rows[row] = self.requests[request.id]

    def extend_row(self, row: int, pages: list[int]) -> None:
        pass

    def run(self, work: Work) -> None:
        sampled = [self._token(chunk.row, chunk.stop) for chunk in work.chunks if chunk.samples]
        sampled += [self._token(row, at + 1) for row, at in zip(work.decodes, work.positions, strict=True)]
        self.steps += 1
        self.computed += sum(chunk.stop - chunk.start for chunk in work.chunks)
        prompts = sum(self.costs.chunk(chunk.start, chunk.stop) for chunk in work.chunks)
        self._take(self.costs.step + prompts + len(work.decodes) * self.costs.decode)
        ran = Ran(work.step, pack(sampled), [], [])
        self.clock.at(self.free_at, lambda: self.deliver(ran))

    def _token(self, row: int, position: int) -> int:
        """Return the row's token after `position` tokens.

        After the end of the answer it is 0: when an answer ends, one more step may be in flight.
        """
        running = self._rows[row]
        index = position - running.request.prompt_len
        return running.answer[index] if index < len(running.answer) else 0

    def _take(self, seconds: float) -> None:
        self.busy += seconds
        self.free_at = max(self.free_at, self.clock.now) + seconds


class VirtualRing:
    """A ring of the actors cache, scheduler, forward and results. Messages are delivered in order, and take no time."""

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        ledger: Ledger,
        make_cache: Callable[[Send], Cache],
        make_scheduler: Callable[[Send], Scheduler],
    ) -> None:
        self.clock = clock
        self.requests: dict[str, Running] = {}
        self.device = VirtualDevice(costs, self.requests, clock, lambda report: self._send("device", "forward", report))
        self.cache, self.scheduler = make_cache(self.sender("cache")), make_scheduler(self.sender("scheduler"))
        self._ledger = ledger
        forward = Forward(self.sender("forward"), self.device, self.scheduler.limits.max_running)
        results = ResultProcessor(self.sender("results"), NoText())
        actors: dict[Address, Actor] = {
            "scheduler": self.scheduler, "cache": self.cache, "forward": forward, "results": results,
        }  # fmt: skip
        self._mail: dict[Address, deque[Message]] = {address: deque() for address in (*actors, "api")}
        self._carried = [(address, actor, self._mail[address]) for address, actor in actors.items()]

    def sender(self, name: str) -> Callable[[Address, Message], None]:
        return lambda to, message: self._send(name, to, message)

    @property
    def slots(self) -> int:
        """How many slots the pool has."""
        return sum(self._ledger.counts.values())

    @property
    def waiting(self) -> int:
        """How many units of prompts have to be computed before the first tokens of the submitted requests."""
        waits = (running for running in self.requests.values() if running.first_token is None)
        return sum(
            running.request.prompt_len - (running.output.hit.cached_tokens if running.output else 0)
            for running in waits
        )

    @property
    def computed(self) -> int:
        """How many units of prompts were computed so far."""
        return self.device.computed

    @property
    def counters(self) -> Counter[str]:
        """Counters of the cache and the scheduler."""
        return self.cache.counters + self.scheduler.counters

    def submit(self, running: Running) -> None:
        self.requests[running.request.id] = running
        self._send("api", "scheduler", Submit(running.request))

    def close(self) -> None:
        self._ledger.close()

    def run(self) -> None:
        """Run until no call is scheduled."""
        self.clock.run(self.carry)

    def _send(self, sender: str, to: Address, message: Message) -> None:
        depart(message, sender, to, self._ledger)
        self._mail[to].append(message)

    def carry(self) -> None:
        """Deliver messages until all mailboxes are empty."""
        answers = self._mail["api"]
        moved = True
        while moved:
            moved = False
            for address, actor, mail in self._carried:
                if mail:
                    moved = True
                    while mail:
                        message = mail.popleft()
                        arrive(message, address, self._ledger)
                        actor.receive(message)
                    actor.act()
            if answers:
                self._answer(answers)

    def _answer(self, mail: deque[Message]) -> None:
        while mail:
            match mail.popleft():
                case Delta(outputs):
                    for output in outputs:
                        self._output(output)
                case Ended() as ended:
                    raise RuntimeError(f"{ended.request} was refused: {ended.message}")
                case _:
                    pass

    def _output(self, output: Output) -> None:
        running = self.requests[output.request]
        running.output = output
        if output.tokens and running.first_token is None:
            running.first_token = self.clock.now
            if running.begun is not None:
                running.begun(running)
        if output.finish_reason is not None:
            del self.requests[output.request]
            if running.ended is not None:
                running.ended(running)

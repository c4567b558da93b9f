"""The api's actor in the simulation: it asks, gives up, asks again after a restart, and remembers what it was told."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from baton.actors.actor import Send
from baton.actors.messages import (
    Abort,
    Continue,
    Delta,
    Drain,
    Drained,
    Ended,
    Flushed,
    Kept,
    Message,
    Pause,
    Paused,
    Restarted,
    Submit,
    Suspended,
)
from baton.actors.requests import Output, PauseMode, Request, Sampling, Stops, TokenLogprob, resubmission
from baton.actors.tokens import pack, unpack
from baton.models.text.detokenizer import Detokenizer
from tests.simulation.hash_device import ANY, oracle
from tests.simulation.scenario import Ask, Leave, Scenario
from tests.simulation.sessions import Session, Sessions
from tests.simulation.talks import Turn
from tests.simulation.toy_grammar import ToyGrammar, may_draw

LONGEST_PROMPT = 42


class Letters:
    """Token i as a letter."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join([chr(ord("0") + i) for i in ids])

    def detokenizer(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        return Detokenizer(self.decode, prompt_tail)


@dataclass(eq=False)
class Asked:
    """A request, the right output if nothing but max_tokens stops it, and what has come back.

    left: it was given up. late: asked after the shutdown began. resubmitted: asked again after a restart.
    session: whose turn it is.
    """

    request: Request
    oracle: list[int]
    leave: Leave | None
    session: Session | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    end: str | None = None
    cause: str | int | None = None
    answers: int = 0
    grammar: ToyGrammar | None = None
    left: bool = False
    late: bool = False
    resubmitted: bool = False

    @property
    def has_enough(self) -> bool:
        wanted = self.leave.tokens if self.leave is not None else None
        return wanted is not None and len(self.tokens) >= wanted


class Client:
    """An id stays taken until its request is answered; one that was given up is answered too, but to nobody.

    later: has `fire` called with something after some time.
    """

    def __init__(self, scenario: Scenario, send: Send, later: Callable[[float, Any], None]) -> None:
        self.asked: list[Asked] = []
        self.drained: list[list[str]] = []
        self.flushed = 0
        self.draining = False
        self.paused: PauseMode | None = None
        self.pausing: dict[int, PauseMode] = {}
        self.counters: Counter[str] = Counter()
        self._scenario = scenario
        self._send = send
        self._later = later
        self._open: dict[str, Asked] = {}
        self._now: deque[Any] = deque()
        self._tickets = 0
        self._handed_over = False
        self.sessions = Sessions(send, self._ask_turn, self._soon)

    @property
    def open(self) -> list[str]:
        return list(self._open)

    def receive(self, message: Message) -> None:
        match message:
            case Delta(outputs):
                for output in outputs:
                    self._output(output)
            case Ended(request, reason, text):
                asked = self._named(request)
                asked.cause = text
                # A pool that no longer holds what was delivered is full: the answer ends there.
                self._end(asked, "length" if reason == "too_large" and asked.tokens else reason)
            case Flushed():
                self.flushed += 1
            case Drained(astray):
                self.drained.append(astray)
            case Paused(ticket):
                self.counters["paused"] += 1
                self.pausing.pop(ticket, None)
            case Kept() | Suspended():
                self.sessions.receive(message)
            case Restarted():
                self.sessions.restarted()
                self._resubmit()
            case _:
                raise TypeError(f"the api got {message!r}")

    def act(self) -> None:
        """What comes at once, as soon as everything that was there to be received has been."""
        while self._now:
            self.fire(self._now.popleft())

    def fire(self, what: Any) -> None:
        match what:
            case Ask():
                self.ask(what)
            case Asked():
                self.give_up(what)
            case _:
                self.sessions.fire(what)

    def leases(self) -> tuple[()]:
        return ()

    def ask(self, ask: Ask) -> None:
        """Half of the requests are the next turn of one that was answered; some take an answered one's id."""
        prompt, salt, name = list(ask.prompt), ask.salt, ask.id
        answered = [asked for asked in self.asked if asked.end is not None]
        talks = [asked for asked in answered if asked.tokens]
        if ask.continues is not None and talks:
            before = talks[int(ask.continues * len(talks))]
            prompt = (unpack(before.request.tokens) + before.tokens + prompt[-3:])[:LONGEST_PROMPT]
            salt = before.request.salt
        if ask.reuses and answered and answered[-1].request.id not in self._open:
            name = answered[-1].request.id
            self.counters["duplicate id"] += 1
        self._submit(name, prompt, salt, ask)

    def _ask_turn(self, turn: Turn, session: Session, prompt: list[int]) -> Asked:
        return self._submit(turn.ask.id, prompt, session.salt, turn.ask, session)

    def _submit(self, name: str, prompt: list[int], salt: str, ask: Ask, session: Session | None = None) -> Asked:
        request, right = self._request(name, prompt, salt, ask, session.name if session is not None else "")
        asked = Asked(request, right, ask.leave, session, grammar=ask.grammar, late=self.draining)
        self.asked.append(asked)
        self._open[request.id] = asked
        self._send("scheduler", Submit(request))
        if ask.leave is not None and ask.leave.tokens is None:
            self._later(ask.leave.after, asked)
        return asked

    def give_up(self, asked: Asked) -> None:
        """Whose time is over is given up again when its connection closes."""
        if asked.end is not None or asked.leave is None:
            return
        if asked.left:
            self.counters["client twice"] += 1
            self._send("scheduler", Abort(asked.request.id, "aborted"))
            return
        asked.left = True
        self.counters[f"client {asked.leave.how}"] += 1
        if asked.leave.how == "timeout":
            self._send("scheduler", Abort(asked.request.id, "timeout"))
            self._later(asked.leave.after, asked)
            return
        self._send("scheduler", Abort(asked.request.id, "aborted"))
        if asked.leave.how == "gone" and asked.session is not None:
            self.sessions.ended(asked.session, asked)

    def pause(self, mode: PauseMode) -> None:
        self.counters[f"pause {mode}" + (" of requests" if self._open else "")] += 1
        self.paused = mode
        self._tickets += 1
        self.pausing[self._tickets] = mode
        self._send("scheduler", Pause(self._tickets, mode))

    def resume(self) -> None:
        self.paused = None
        self._send("scheduler", Continue())

    def wind_down(self) -> bool:
        """The next thing to do at the end, as soon as all is quiet; False if there is none."""
        sessions = self.sessions
        if not self.draining and self._scenario.hand_over and not self._handed_over:
            self._handed_over = True
            for session in sessions.open.values():
                sessions.suspend(session)
        elif not self.draining:
            self.drain()
        elif sessions.open:
            for session in list(sessions.open.values()):
                sessions.close(session)
        else:
            return False
        return True

    def _soon(self, after: float, what: Any) -> None:
        if after:
            self._later(after, what)
        else:
            self._now.append(what)

    def drain(self) -> None:
        self.draining = True
        self._send("scheduler", Drain())

    def _request(self, name: str, prompt: list[int], salt: str, ask: Ask, session: str) -> tuple[Request, list[int]]:
        sampling = Sampling(temperature=0.0) if ask.seed is None else Sampling(seed=ask.seed)
        stops = Stops(ask.max_tokens, ask.min_tokens, (), ask.stop_ids, ask.keep_stop)
        allowed = partial(may_draw, ask.grammar, stops=stops) if ask.grammar is not None else lambda output: ANY
        right = oracle(prompt, ask.max_tokens, sampling, self._scenario.pages > 0, allowed)
        strings = ()
        if ask.stop_piece is not None:
            start, length = ask.stop_piece
            strings = (Letters().decode(right[start : start + length]) or "0",)
        ends = tuple(sorted({int(share * len(prompt)) + 1 for share in ask.ends}))
        begin = None if ask.prompt_logprobs_from is None else int(ask.prompt_logprobs_from * len(prompt))
        asked = {int(share * (len(prompt) - 1)) + 1 for share in ask.checkpoints if len(prompt) > 1}
        request = Request(
            id=name,
            tokens=pack(prompt),
            prompt_len=len(prompt),
            sampling=sampling,
            stops=replace(stops, strings=strings),
            priority=ask.priority,
            salt=salt,
            message_ends=ends,
            logprobs=0 if ask.logprobs else None,
            prompt_logprobs_from=begin,
            session=session,
            flow=self._scenario.flow_of(name),
            grammar=ask.grammar.written() if ask.grammar is not None else "",
            checkpoints=tuple(sorted(asked)),
            keep=ask.keep,
        )
        return request, right

    def _output(self, output: Output) -> None:
        asked = self._named(output.request)
        asked.tokens += unpack(output.tokens)
        asked.text += output.text
        asked.logprobs += output.logprobs
        asked.prompt_logprobs += output.prompt_logprobs
        assert asked.tokens == asked.oracle[: len(asked.tokens)], (
            f"{output.request} got {asked.tokens}, right is {asked.oracle}"
        )
        assert output.completion_tokens == len(asked.tokens), f"{output} comes with {len(asked.tokens)} tokens"
        if output.finish_reason is not None:
            asked.cause = output.stop_reason
            self._end(asked, output.finish_reason)
        elif asked.has_enough and not asked.left:
            self.give_up(asked)

    def _named(self, request: str) -> Asked:
        assert request in self._open, f"{request} was answered after its end"
        return self._open[request]

    def _end(self, asked: Asked, reason: str) -> None:
        asked.end = reason
        asked.answers += 1
        del self._open[asked.request.id]
        self.counters[f"ended {reason}"] += 1
        self.counters[f"constrained {reason}"] += asked.grammar is not None
        if asked.session is not None:
            self.sessions.ended(asked.session, asked)

    def _resubmit(self) -> None:
        if self.paused is None:
            self.pausing.clear()
        else:
            for ticket in self.pausing or [0]:
                self._send("scheduler", Pause(ticket, self.paused))
        for asked in list(self._open.values()):
            if asked.left:
                self._end(asked, "aborted")
                continue
            asked.resubmitted = True
            self.counters["resubmitted"] += 1
            again = resubmission(asked.request, pack(asked.tokens), len(asked.text))
            self._send("scheduler", Submit(again, resubmitted=True))
        if self.draining:
            self._send("scheduler", Drain())

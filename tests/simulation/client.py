"""The api's side of the simulated ring: it submits, aborts and resubmits requests, and checks every answer."""

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
from baton.actors.requests import Output, PauseMode, PeerHint, Request, Sampling, Stops, TokenLogprob, resubmission
from baton.actors.tokens import pack, unpack
from baton.models.text.detokenizer import Detokenizer
from tests.simulation.hash_oracle import ANY, oracle
from tests.simulation.scenario import Ask, Leave, Scenario
from tests.simulation.sessions import Session, Sessions
from tests.simulation.talks import Turn
from tests.simulation.toy_grammar import ToyGrammar, may_draw

LONGEST_PROMPT = 42


def span_of(shares: tuple[float, float], length: int) -> tuple[int, int]:
    """Return the prompt's tokens to pool, at least one."""
    begin = int(shares[0] * (length - 1))
    return begin, max(int(shares[1] * length), begin + 1)


class Letters:
    """A tokenizer that decodes token i to a single letter."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join([chr(ord("0") + i) for i in ids])

    def detokenizer(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        return Detokenizer(self.decode, prompt_tail)


@dataclass(eq=False)
class Exchange:
    """A request, and everything that the ring has answered to it."""

    request: Request
    oracle: list[int]  # the right output, as far as max_tokens allows
    leave: Leave | None  # when the client gives the request up; None: never
    session: Session | None = None  # the session whose turn this request is
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    pooled: list[bytes] = field(default_factory=list)
    end: str | None = None  # how the request ended
    cause: str | int | None = None  # the stop reason, or the text of the error
    answers: int = 0
    grammar: ToyGrammar | None = None
    left: bool = False  # given up by the client
    late: bool = False  # submitted after the shutdown began
    resubmitted: bool = False  # submitted again after a restart
    on_end: Callable[[str], None] = lambda reason: None  # called with the reason when the request has ended

    @property
    def has_enough(self) -> bool:
        """Return whether the client has received as many tokens as it wants before it gives up."""
        limit = self.leave.tokens if self.leave is not None else None
        return limit is not None and len(self.tokens) >= limit


class Client:
    """The actor that simulates the api and its clients.

    A request's id is in use until the request is answered. A request that was given up is also answered, and that
    answer is ignored.
    """

    def __init__(self, scenario: Scenario, send: Send, call_later: Callable[[float, Any], None]) -> None:
        self.exchanges: list[Exchange] = []  # every request so far, in order of submission
        self.drained: list[list[str]] = []  # the leases reported as astray by each `Drained`
        self.flushed = 0
        self.draining = False
        self.paused: PauseMode | None = None
        self.pausing: dict[int, PauseMode] = {}  # the mode of each pause without an answer, by ticket
        self.counters: Counter[str] = Counter()
        self._scenario = scenario
        self._send = send
        self._call_later = call_later  # calls `fire` with a value after a delay
        self._open: dict[str, Exchange] = {}  # by request id
        self._now: deque[Any] = deque()  # values to fire when the mailbox is empty
        self._tickets = 0
        self._handed_over = False  # whether all sessions have been suspended for the shutdown
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
                exchange = self._named(request)
                exchange.cause = text
                # If the tokens delivered so far no longer fit into the pool, the answer ends with "length".
                self._end(exchange, "length" if reason == "too_large" and exchange.tokens else reason)
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
                self.sessions.restart()
                self._resubmit()
            case _:
                raise TypeError(f"the api got {message!r}")

    def act(self) -> None:
        """Fire the values that are due at once. Called when the mailbox is empty."""
        while self._now:
            self.fire(self._now.popleft())

    def fire(self, what: Any) -> None:
        match what:
            case Ask():
                self.ask(what)
            case Exchange():
                self.give_up(what)
            case _:
                self.sessions.fire(what)

    def leases(self) -> tuple[()]:
        return ()

    def ask(self, ask: Ask) -> None:
        """Submit a request. Some continue the tokens of an answered request, and some reuse the id of one."""
        prompt, salt, name = list(ask.prompt), ask.salt, ask.id
        answered = [exchange for exchange in self.exchanges if exchange.end is not None]
        with_output = [exchange for exchange in answered if exchange.tokens]
        if ask.continues is not None and with_output:
            before = with_output[int(ask.continues * len(with_output))]
            prompt = (unpack(before.request.tokens) + before.tokens + prompt[-3:])[:LONGEST_PROMPT]
            salt = before.request.salt
        if ask.reuses and answered and answered[-1].request.id not in self._open:
            name = answered[-1].request.id
            self.counters["duplicate id"] += 1
        self._submit(name, prompt, salt, ask)

    def _ask_turn(self, turn: Turn, session: Session, prompt: list[int]) -> Exchange:
        return self._submit(turn.ask.id, prompt, session.salt, turn.ask, session)

    def _submit(self, name: str, prompt: list[int], salt: str, ask: Ask, session: Session | None = None) -> Exchange:
        """Submit a request, and schedule the moment at which its client gives up."""
        request, right = self._request(name, prompt, salt, ask, session.name if session is not None else "")
        exchange = Exchange(request, right, ask.leave, session, grammar=ask.grammar, late=self.draining)
        self.exchanges.append(exchange)
        self._open[request.id] = exchange
        self._send("scheduler", Submit(request))
        if ask.leave is not None and ask.leave.tokens is None:
            self._call_later(ask.leave.after, exchange)
        return exchange

    def compute(
        self, name: str, prompt: list[int], salt: str, hint: PeerHint, session: str, on_end: Callable[[str], None]
    ) -> Exchange:
        """Submit a request for a peer: it draws one token, so that its state ends with the prompt."""
        ask = Ask(name, 0.0, (), 1, leave=Leave("aborted", 0.0, 10_000))
        request, right = self._request(name, prompt, salt, ask, session)
        exchange = Exchange(replace(request, hint=hint), right, ask.leave, late=self.draining, on_end=on_end)
        self.exchanges.append(exchange)
        self._open[name] = exchange
        self._send("scheduler", Submit(exchange.request))
        return exchange

    def give_up(self, exchange: Exchange) -> None:
        """Abort a request. After a timeout it is aborted a second time, as when its connection closes."""
        if exchange.end is not None or exchange.leave is None:
            return
        if exchange.left:
            self.counters["client twice"] += 1
            self._send("scheduler", Abort(exchange.request.id, "aborted"))
            return
        exchange.left = True
        self.counters[f"client {exchange.leave.how}"] += 1
        if exchange.leave.how == "timeout":
            self._send("scheduler", Abort(exchange.request.id, "timeout"))
            self._call_later(exchange.leave.after, exchange)
            return
        self._send("scheduler", Abort(exchange.request.id, "aborted"))
        if exchange.leave.how == "gone" and exchange.session is not None:
            self.sessions.turn_ended(exchange.session, exchange)

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
        """Take the next step of the shutdown; return False if none is left. Called when nothing moves.

        The steps are: suspend the sessions, drain the ring, close the sessions.
        """
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
        """Fire a value after a delay, or when the mailbox is empty if the delay is 0."""
        if after:
            self._call_later(after, what)
        else:
            self._now.append(what)

    def drain(self) -> None:
        self.draining = True
        self._send("scheduler", Drain())

    def _request(self, name: str, prompt: list[int], salt: str, ask: Ask, session: str) -> tuple[Request, list[int]]:
        """Build the request of an Ask, and compute its right output."""
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
        checkpoints = {int(share * (len(prompt) - 1)) + 1 for share in ask.checkpoints if len(prompt) > 1}
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
            pooled=span_of(ask.pooled, len(prompt)) if ask.pooled is not None else None,
            session=session,
            flow=self._scenario.flow_of(name),
            grammar=ask.grammar.to_text() if ask.grammar is not None else "",
            checkpoints=tuple(sorted(checkpoints)),
            keep=ask.keep,
        )
        return request, right

    def _output(self, output: Output) -> None:
        """Record an output of the ring, and check that the tokens so far begin the right output."""
        exchange = self._named(output.request)
        exchange.tokens += unpack(output.tokens)
        exchange.text += output.text
        exchange.logprobs += output.logprobs
        exchange.prompt_logprobs += output.prompt_logprobs
        exchange.pooled += [output.pooled] * bool(output.pooled)
        assert exchange.tokens == exchange.oracle[: len(exchange.tokens)], (
            f"{output.request} got {exchange.tokens}, right is {exchange.oracle}"
        )
        assert output.completion_tokens == len(exchange.tokens), f"{output} comes with {len(exchange.tokens)} tokens"
        if output.finish_reason is not None:
            exchange.cause = output.stop_reason
            self._end(exchange, output.finish_reason)
        elif exchange.has_enough and not exchange.left:
            self.give_up(exchange)

    def _named(self, request: str) -> Exchange:
        assert request in self._open, f"{request} was answered after its end"
        return self._open[request]

    def _end(self, exchange: Exchange, reason: str) -> None:
        """Record the end of a request."""
        exchange.end = reason
        exchange.answers += 1
        del self._open[exchange.request.id]
        self.counters[f"ended {reason}"] += 1
        self.counters[f"constrained {reason}"] += exchange.grammar is not None
        if exchange.session is not None:
            self.sessions.turn_ended(exchange.session, exchange)
        exchange.on_end(reason)

    def _resubmit(self) -> None:
        """Submit the open requests again after a restart, with their output so far. Repeat open pauses and a drain."""
        if self.paused is None:
            self.pausing.clear()
        else:
            for ticket in self.pausing or [0]:
                self._send("scheduler", Pause(ticket, self.paused))
        for exchange in list(self._open.values()):
            if exchange.left:
                self._end(exchange, "aborted")
                continue
            exchange.resubmitted = True
            self.counters["resubmitted"] += 1
            again = resubmission(exchange.request, pack(exchange.tokens), len(exchange.text))
            self._send("scheduler", Submit(again, resubmitted=True))
        if self.draining:
            self._send("scheduler", Drain())

"""POST /v1/sessions/{id}/turns: what a client says in a session, and what the model answers."""

from typing import Any

from aiohttp import web
from msgspec import Struct, field

from actors.messages import Output
from actors.tokens import unpack
from api import errors
from api.answers import Answer, Usage, collect, cut_to_prompt, usage
from api.chat_prompt import read_messages, render
from api.drafting import (
    Bias,
    Count,
    MinP,
    Penalty,
    Priority,
    Prompt,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    Wishes,
    draft,
    encode,
)
from api.engine import SERVER, Engine
from api.generation import Generation
from api.handling import answer_json, new_id, submit
from api.openai_fields import IGNORED
from api.parsing import convert, read_object
from api.security import owner_of
from api.session import OpenTurn
from api.session_log import conversation
from api.session_store import no_session
from api.sse import stream


class TurnRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """messages, text or input_ids: what is new in this turn. after: the last turn that the client knows of.

    With max_tokens 0 the turn is fed to the model and nothing more.
    """

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    after: Count | None = None
    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Count = 0
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Bias] = field(default_factory=dict)
    seed: Seed | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    priority: Priority = 0
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class TurnStarted(Struct, tag_field="type", tag="turn.started"):
    """The session's history before it had `history` tokens, and the turn goes on from the first `start` of them."""

    id: str
    session: str
    turn: int
    history: int
    start: int


class TurnDelta(Struct, tag_field="type", tag="turn.delta"):
    text: str
    output_ids: list[int]


class TurnEnded(Struct, tag_field="type", tag="turn.ended"):
    """position: tokens in the session's history now."""

    id: str
    session: str
    turn: int
    status: str
    history: int
    start: int
    position: int
    text: str
    output_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    usage: Usage


async def create_turn(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    asked = convert(await read_object(request), TurnRequest, IGNORED)
    engine = server.ready(asked.model)
    session = server.sessions.get(owner_of(request), request.match_info["session"])
    session.check_after(asked.after)
    with session.begin(new_id("turn")) as turn:
        turn.feeds_only = asked.max_tokens == 0
        prompt = await read_input(engine, asked, turn)
        drafted = draft(engine, turn.request, prompt, wishes_of(asked, session.salt))
        turn.prompt = drafted.tokens
        if session.closed:
            raise no_session(session.id)
        with submit(request, [drafted]) as generation:
            turn.sent(generation, engine.text.decode)
            writer = TurnWriter(turn, generation)
            if asked.stream:
                return await stream(request, generation, writer, server.config.ping_interval)
            [answer] = await collect(generation)
            return answer_json(writer.ended(answer))


async def read_input(engine: Engine, asked: TurnRequest, turn: OpenTurn) -> Prompt:
    """The whole history with what is new behind it. Raises 400."""
    given = [name for name in ("messages", "text", "input_ids") if getattr(asked, name) is not None]
    if len(given) != 1:
        raise errors.bad_request("give one of messages, text and input_ids", "messages", "invalid_value")
    if not getattr(asked, given[0]):
        raise errors.bad_request(f"{given[0]}: there is nothing to feed", given[0], "empty_turn")
    if asked.messages is not None:
        return await read_chat(engine, asked, turn)
    new = Prompt(asked.input_ids or [])
    if asked.text is not None:
        new = await encode(engine, asked.text, add_special_tokens=not turn.before)
    return Prompt(unpack(turn.before) + new.tokens)


async def read_chat(engine: Engine, asked: TurnRequest, turn: OpenTurn) -> Prompt:
    """The rendering of the whole conversation, of which the ring computes what goes beyond the session's history."""
    if turn.base is not None and turn.base.messages is None:
        message = "the session's last turn was not one of chat: go on with text or input_ids"
        raise errors.bad_request(message, "messages", "not_a_chat")
    messages = read_messages(asked.messages or [])
    turn.messages = tuple(messages)
    whole = conversation(turn.base) + messages
    return await render(engine, whole, not turn.feeds_only, asked.chat_template_kwargs)


def wishes_of(asked: TurnRequest, salt: str) -> Wishes:
    return Wishes(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=asked.logit_bias,
        seed=asked.seed,
        min_tokens=asked.min_tokens,
        stop=asked.stop,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        keep_stop_string=asked.include_stop_str_in_output,
        skip_special_tokens=asked.skip_special_tokens,
        priority=asked.priority,
        salt=salt,
        names={"prompt": next(n for n in ("messages", "text", "input_ids") if getattr(asked, n) is not None)},
    )


class TurnWriter:
    """A turn's answer: whole, or as the events of a stream."""

    def __init__(self, turn: OpenTurn, generation: Generation) -> None:
        self._turn = turn
        self._generation = generation
        self._answer = Answer()
        self._started = TurnStarted(turn.request, turn.session.id, turn.number, len(turn.before) // 4, turn.start)

    def opening(self) -> list[TurnStarted]:
        return [self._started]

    def delta(self, index: int, output: Output) -> list[TurnDelta]:
        self._answer.add(output)
        shown = output.tokens and not self._turn.feeds_only
        return [TurnDelta(output.text, unpack(output.tokens))] if shown else []

    def closing(self) -> list[TurnEnded]:
        return [self.ended(self._answer)]

    def ended(self, answer: Answer) -> TurnEnded:
        """Settles the turn: its client may start the next as soon as it has read this."""
        self._turn.settle()
        settled = self._turn.settled
        assert settled is not None
        if self._turn.feeds_only:
            cut_to_prompt([answer])
        return TurnEnded(
            id=self._started.id,
            session=self._started.session,
            turn=self._started.turn,
            status=settled.status,
            history=self._started.history,
            start=self._started.start,
            position=settled.end,
            text=answer.text,
            output_ids=answer.ids,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            usage=usage(self._generation, scoring=self._turn.feeds_only),
        )

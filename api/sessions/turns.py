"""POST /v1/sessions/{id}/turns: one turn of a session, from the client's input to the model's answer."""

from functools import partial
from typing import Any

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType, field

from baton.actors.requests import MissReason, Origin, Output
from baton.actors.tokens import count, unpack
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.exchange import answer_json, answer_with_error, new_id, submit
from baton.api.generation.answers import Answer, Usage, collect, drop_output, usage
from baton.api.generation.chat_prompt import Ending, Render, effort_variables, preserving, render
from baton.api.generation.fields import Count, SamplingParams, request_params
from baton.api.generation.messages import read_messages
from baton.api.generation.outputs import Generation
from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.generation.request_builder import Prompt, build_request, encode
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import StructuredFields, wanted_in
from baton.api.generation.tool_choice import grammar_of, read_budget, read_tool_use
from baton.api.generation.tools import ToolUse, read_tool
from baton.api.openai.chat import IGNORED_IN_CHAT
from baton.api.openai.chat_answers import ChatMessage, message_of
from baton.api.parsing import convert, read_object
from baton.api.security import owner_of
from baton.api.server import SERVER
from baton.api.sessions.log import chat_messages, is_fed, with_said
from baton.api.sessions.session import OpenTurn
from baton.api.sessions.store import SESSIONS
from baton.api.sse import stream

routes = web.RouteTableDef()


class TurnRequest(StructuredFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/sessions/{id}/turns. Exactly one of messages, text and input_ids is set."""

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    after: Count | None = None  # number of the last turn that the client knows; 409 if the last turn is another
    max_tokens: Count | None = None  # with 0 the model reads the input and generates nothing
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    preserve_reasoning: bool | None = None  # show the reasoning of earlier turns; None: as --preserve-reasoning says
    tools: list[Any] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking_token_budget: Count | None = None


class TurnStarted(Struct, tag_field="type", tag="turn.started"):
    """The first event of a turn."""

    id: str
    session: str
    turn: int
    history: int  # number of the session's tokens before the turn
    start: int  # how many tokens of the history the turn keeps


class TurnDelta(Struct, tag_field="type", tag="turn.delta"):
    """An event with the next part of the answer."""

    text: str
    output_ids: list[int]


class TurnEnded(Struct, tag_field="type", tag="turn.ended"):
    """The last event of a turn, and the whole answer if the turn is not streamed."""

    id: str
    session: str
    turn: int
    status: str
    history: int
    start: int
    position: int  # number of the session's tokens after the turn
    text: str
    output_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    usage: Usage
    resumed_from: Origin  # the tier of the state from which the turn resumed
    lost: MissReason  # why more tokens of the history were computed again than necessary; empty if not
    message: ChatMessage | UnsetType = UNSET


@routes.post("/v1/sessions/{session}/turns")
async def create_turn(request: web.Request) -> web.StreamResponse:
    """Run one turn, streamed or not, and answer when it is on the disk."""
    server = request.app[SERVER]
    body = convert(await read_object(request), TurnRequest, IGNORED_IN_CHAT | {"prediction"})
    model = server.ready(body.model)
    session = request.app[SESSIONS].get(owner_of(request), request.match_info["session"])
    session.check_idle()
    session.check_after(body.after)
    async with session.begin(new_id("turn")) as turn:
        turn.prefill_only = body.max_tokens == 0
        use = await read_tool_use(model, body.tools, body.tool_choice, body.parallel_tool_calls, read_tool)
        prompt = await read_input(model, body, turn, use)
        budget = read_budget(model, body.thinking_token_budget, "thinking_token_budget")
        grammar = await grammar_of(model, prompt, use, wanted_in(body), budget)
        built = turn.bind(build_request(model, turn.request, prompt, params_of(body, session.salt, grammar)))
        if session.closed:
            raise errors.unknown_session(session.id, "session")
        turn.check_wanted()
        with submit(request, [built]) as generation:
            turn.attach(generation, model.text.decode)
            writer = TurnWriter(turn, generation)
            if body.stream:
                return await stream(request, generation, writer, server.config.ping_interval, turn.save)
            [answer] = await collect(generation)
            return await answer_saved(request, turn, writer.ended(answer))


async def answer_saved(request: web.Request, turn: OpenTurn, answer: object) -> web.Response:
    """Return the answer when the turn is on the disk. If the turn cannot be written, add the error to the answer."""
    try:
        await turn.save()
    except ApiError as error:
        return answer_with_error(request, answer, error)
    return answer_json(answer)


async def read_input(model: ServedModel, body: TurnRequest, turn: OpenTurn, use: ToolUse) -> Prompt:
    """Return the prompt: the session's history followed by the turn's input. Raises ApiError 400."""
    names = [name for name in ("messages", "text", "input_ids") if getattr(body, name) is not None]
    if len(names) != 1:
        raise errors.bad_request("exactly one of messages, text and input_ids is required", "messages", "invalid_value")
    if not getattr(body, names[0]):
        raise errors.bad_request(f"{names[0]} is empty", names[0], "empty_turn")
    if body.messages is not None:
        messages = await read_messages(model, body.messages)
        effort = effort_variables(model, body.reasoning_effort, "reasoning_effort")
        return await extend_chat(
            model, turn, messages, effort | preserving(body.preserve_reasoning) | body.chat_template_kwargs, use
        )
    if use.tools:
        raise errors.bad_request("tools require messages", "tools", "invalid_value")
    new = Prompt(body.input_ids or [])
    if body.text is not None:
        new = await encode(model, body.text, not turn.base_tokens, "text")
    return Prompt(unpack(turn.base_tokens) + new.tokens)


async def extend_chat(
    model: ServedModel,
    turn: OpenTurn,
    messages: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
    use: ToolUse,
    render: Render = render,
) -> Prompt:
    """Render the whole conversation. The ring computes only the tokens that follow the session's history.

    Raises ApiError 400, for example if the last turn was not a chat turn.
    """
    if turn.base is not None and turn.base.messages is None:
        message = "the session's last turn was not a chat turn: continue with text or input_ids"
        raise errors.bad_request(message, "messages", "not_a_chat")
    turn.messages = tuple(messages)
    ending: Ending = "closed" if turn.prefill_only else "answer"
    whole = with_said(chat_messages(turn.base), messages, is_first=not is_fed(turn.base))
    prompt = await render(model, whole, ending, template_kwargs, use.tools, salt=turn.session.salt)
    turn.parse = partial(parse_answer, model, prompt, use, turn.request)
    return prompt


def parse_answer(model: ServedModel, prompt: Prompt, use: ToolUse, id: str, text: str) -> ParsedAnswer:
    """Parse the complete text of an answer into reasoning, content and tool calls."""
    parsed = ParsedAnswer(model, prompt, use, id)
    parsed.read(text, ())
    parsed.finish("stop")
    return parsed


def params_of(body: TurnRequest, salt: str, grammar: str) -> SamplingParams:
    """Return the sampling parameters of a turn."""
    return request_params(
        body,
        max_tokens=body.max_tokens,
        salt=salt,
        grammar=grammar,
        names={"prompt": next(n for n in ("messages", "text", "input_ids") if getattr(body, n) is not None)},
    )


class TurnWriter:
    """The writer of a turn's answer, complete or as events of a stream."""

    def __init__(self, turn: OpenTurn, generation: Generation) -> None:
        self._turn = turn
        self._generation = generation
        self._answer = Answer()
        self._started = TurnStarted(turn.request, turn.session.id, turn.number, count(turn.base_tokens), turn.start)

    def opening(self) -> list[TurnStarted]:
        """Return the events before the answer."""
        return [self._started]

    def delta(self, index: int, output: Output) -> list[TurnDelta]:
        """Return the events for one output of the ring."""
        self._answer.add(output)
        shown = (output.tokens or output.text) and not self._turn.prefill_only
        return [TurnDelta(output.text, unpack(output.tokens))] if shown else []

    def closing(self) -> list[TurnEnded]:
        """Return the events after the answer."""
        return [self.ended(self._answer)]

    def ended(self, answer: Answer) -> TurnEnded:
        """Settle the turn and return its last event. A client that reads this event may start the next turn at once."""
        self._turn.settle()
        settled, parsed = self._turn.settled, self._turn.parsed
        assert settled is not None
        if self._turn.prefill_only:
            drop_output([answer])
        [member] = self._generation.members
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
            usage=usage(self._generation, scoring=self._turn.prefill_only),
            resumed_from=member.origin,
            lost=member.miss_reason,
            message=message_of(parsed) if parsed is not None and not parsed.plain else UNSET,
        )

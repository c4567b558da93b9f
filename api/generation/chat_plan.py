"""Plans of chat requests: the prompt, the grammar of the output, and the parser of the output."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.api.generation.answers import Answer
from baton.api.generation.chat_prompt import Ending, Render, render
from baton.api.generation.messages import Message
from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.generation.request_builder import Prompt
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import GrammarWriters
from baton.api.generation.tool_choice import grammar_of
from baton.api.generation.tools import NO_TOOLS, ToolUse
from baton.models.text.template import Beginning


@dataclass(frozen=True)
class ChatInput:
    """The parts of a chat request's body that decide the prompt and the output, in a form that all chat APIs share."""

    messages: list[Message]
    ending: Ending = "answer"
    variables: dict[str, Any] = field(default_factory=dict)  # further variables for the chat template
    tools: ToolUse = NO_TOOLS
    output: GrammarWriters = field(default_factory=dict)  # required format of the answer; empty: any text
    budget: int | None = None  # the most tokens of reasoning; None: those of --reasoning-budget
    beginnings: Sequence[Beginning] = ()  # parts of the chat after which the client asks for a checkpoint


@dataclass(frozen=True)
class ChatPlan:
    """The plan of a chat request: its prompt, the grammar of its output, and the tools that parsing needs."""

    model: ServedModel
    prompt: Prompt
    tools: ToolUse
    grammar: str  # text of the output's grammar, for SamplingParams; empty: any output is allowed

    def parser(self, id: str = "") -> ParsedAnswer:
        """Return a parser for one choice's outputs. id: id of the choice's request; tool call ids derive from it."""
        return ParsedAnswer(self.model, self.prompt, self.tools, id)

    def parse(self, answer: Answer, id: str = "") -> ParsedAnswer:
        """Parse a complete answer. id: as for `parser`."""
        return ParsedAnswer.of(answer, self.model, self.prompt, self.tools, id)


async def render_input(model: ServedModel, chat: ChatInput, salt: str, make: Render = render) -> Prompt:
    """Render the prompt of a chat with `make`. Raises ApiError 400."""
    return await make(model, chat.messages, chat.ending, chat.variables, chat.tools.tools, chat.beginnings, salt=salt)


async def plan_chat(model: ServedModel, chat: ChatInput, salt: str, make: Render = render) -> ChatPlan:
    """Render the prompt of a chat and compile its grammar. Raises ApiError: 400, 503."""
    prompt = await render_input(model, chat, salt, make)
    return await plan_output(model, prompt, chat)


async def plan_output(model: ServedModel, prompt: Prompt, chat: ChatInput) -> ChatPlan:
    """Compile the grammar for a prompt that is rendered already. Raises ApiError: 400, 503."""
    grammar = await grammar_of(model, prompt, chat.tools, chat.output, chat.budget)
    return ChatPlan(model, prompt, chat.tools, grammar)

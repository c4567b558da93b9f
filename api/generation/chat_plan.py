"""A chat request, read once: its prompt, the grammar of its output, and the parser of its output."""

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
    """The parts of a chat body that decide its prompt and its output, in terms that every chat API shares."""

    messages: list[Message]
    ending: Ending = "answer"
    variables: dict[str, Any] = field(default_factory=dict)  # more variables of the chat template
    tools: ToolUse = NO_TOOLS
    output: GrammarWriters = field(default_factory=dict)  # the format of the answer; empty: any text
    beginnings: Sequence[Beginning] = ()  # parts of the chat after which the client asks for a checkpoint


@dataclass(frozen=True)
class ChatPlan:
    """Everything that follows from a chat body: the prompt, the grammar, and how to parse the output."""

    model: ServedModel
    prompt: Prompt
    tools: ToolUse
    grammar: str  # for SamplingParams; empty: the output may be any text

    def parser(self, id: str = "") -> ParsedAnswer:
        """Return a parser for the outputs of one choice. id: of its request in the ring; call ids derive from it."""
        return ParsedAnswer(self.model, self.prompt, self.tools, id)

    def parse(self, answer: Answer, id: str = "") -> ParsedAnswer:
        """Parse an answer that is complete."""
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
    return ChatPlan(model, prompt, chat.tools, await grammar_of(model, prompt, chat.tools, chat.output))

"""The field truncation: "auto" drops the oldest messages of a conversation that is too long for the model."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from baton.api.errors import ApiError
from baton.api.generation.chat_prompt import Ending, render
from baton.api.generation.messages import Message
from baton.api.generation.request_builder import Prompt, too_long
from baton.api.generation.served_model import ServedModel
from baton.api.generation.tools import Tool
from baton.models.text.template import Beginning


async def render_what_fits(
    model: ServedModel,
    messages: list[Message],
    ending: Ending,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Tool] = (),
    beginnings: Sequence[Beginning] = (),
    *,
    salt: str,
) -> Prompt:
    """Render a chat as `render` does, but drop as many old messages as needed for one token of the answer to fit.

    System messages at the beginning stay. The other messages begin with a user's message if possible. The cut moves in
    steps of max_model_len / 2 characters. The next turns, which send the whole conversation again, are therefore mostly
    cut at the same message, and can resume from the cached state.

    Raises the exceptions of `render`, and ApiError 400 if the last message alone does not fit.
    """
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system, rest = messages[:first], messages[first:]

    async def prompt_from(cut: int) -> Prompt | None:
        """Render the chat without the first `cut` messages after the system messages. Return None if it is too long."""
        try:
            prompt = await render(model, system + rest[cut:], ending, template_kwargs, tools, beginnings, salt=salt)
        except ApiError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        return prompt if len(prompt.tokens) < model.max_model_len else None

    if (whole := await prompt_from(0)) is not None:
        return whole
    for cuts in ways_to_cut(rest, max(model.max_model_len // 2, 1)):
        if cuts and (prompt := await first_that_fits(cuts, prompt_from)) is not None:
            return prompt
    raise too_long(model, "a last message that does not fit", "input")


def ways_to_cut(messages: Sequence[Message], step: int) -> list[list[int]]:
    """Return three lists of message indices at which the remaining chat may begin, in order of preference.

    The first list has one user's message for each step, the second every user's message. The third has every message
    except results of tool calls, because their calls would be missing.

    step: number of characters of the messages as JSON.
    """
    users = [index for index, message in enumerate(messages) if index and message["role"] == "user"]
    others = [index for index, message in enumerate(messages) if index and message["role"] != "tool"]
    passed, steps, at = 0, dict[int, int](), set(users)
    for index, message in enumerate(messages):
        if index in at:
            steps.setdefault(passed // step, index)
        passed += len(msgspec.json.encode(message))
    return [[index for number, index in steps.items() if number], users, others]


async def first_that_fits(cuts: Sequence[int], prompt_from: Callable[[int], Awaitable[Prompt | None]]) -> Prompt | None:
    """Return the prompt for the first cut with which it fits, or None. Later cuts give shorter prompts, so bisect."""
    low, high, found = 0, len(cuts) - 1, await prompt_from(cuts[-1])
    while found is not None and low < high:
        middle = (low + high) // 2
        prompt = await prompt_from(cuts[middle])
        if prompt is not None:
            found, high = prompt, middle
        else:
            low = middle + 1
    return found

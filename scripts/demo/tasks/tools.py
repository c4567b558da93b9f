"""Tools: calls in the format of Hermes and Granite 4, their results, and requests for which no tool fits."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.demo.chat import Chat, Message, Tool, Turn
from scripts.demo.world import LISTS, World, rough

NO_TOOL = "I have no tool for that."
REQUESTS = [
    "{}.", "{}.", "Please {}.", "Please {}.", "Can you {}?", "Could you {}?", "I want you to {}.", "{}, please.",
    "Would you {}?", "{} now.", "I need you to {}.",
]  # fmt: skip
DESCRIPTIONS = ["{} the {}.", "{} a {}.", "{} the {} for the user.", "", ""]
RESULTS = ["result", "answer", "value", "status", "output"]
FAILURES = ["not found", "no connection", "not allowed", "out of order", "no such place", "too late"]
FAILED = "That did not work: {}."


@dataclass(frozen=True)
class Argument:
    """A kind of argument of a tool."""

    names: Sequence[str]  # names that the tool's parameter may have
    type: str  # JSON type
    wordings: Sequence[str]  # how a user mentions the argument
    values: str  # values to draw: a kind of World.word, "days" or "text"; empty for integers

    def draw(self, world: World) -> str | int:
        if self.type == "integer":
            return world.rng.randint(1, 99)
        if self.values == "text":
            return " ".join(world.word("words") for _ in range(world.rng.choice([2, 2, 3])))
        return str(world.rng.choice(LISTS["days"])) if self.values == "days" else world.word(self.values)


ARGUMENTS = [
    Argument(["city", "place", "location", "town"], "string", ["in {}", "in {}", "near {}"], "places"),
    Argument(["person", "who", "recipient", "guest"], "string", ["for {}", "to {}", "with {}"], "names"),
    Argument(["day", "date", "when"], "string", ["on {}", "on {}", "for {}"], "days"),
    Argument(["title", "label", "called"], "string", ["called {}", "named {}"], "words"),
    Argument(["text", "content", "message", "words"], "string", ['saying "{}"', 'with the text "{}"'], "text"),
    Argument(["colour", "color"], "string", ["in the colour {}", "in the color {}"], "colours"),
    Argument(["days", "duration", "length"], "integer", ["for {} days", "for {} days"], ""),
    Argument(["people", "guests", "seats"], "integer", ["for {} people", "for {} guests"], ""),
    Argument(["limit", "maximum", "count"], "integer", ["at most {}", "up to {}"], ""),
    Argument(["minutes", "time"], "integer", ["in {} minutes", "for {} minutes"], ""),
]


ARGUMENT_OF = {name: argument for argument in ARGUMENTS for name in argument.names}


def equip(chat: Chat) -> None:
    """Give the chat one to three tools with different names; some share a verb or a thing."""
    made: dict[str, Tool] = {}
    for _ in range(chat.rng.choice([1, 1, 2, 2, 3])):
        other = chat.rng.choice(list(made.values())) if made and chat.rng.random() < 0.4 else None
        tool = make(chat, other)
        made.setdefault(tool.name, tool)
    chat.tools = list(made.values())


def make(chat: Chat, like: Tool | None = None) -> Tool:
    """Draw a tool. If the tool `like` is given, the new tool has the same verb or the same thing."""
    world, rng = chat.world, chat.rng
    verb, thing = world.word("verbs"), world.word("things")
    if like is not None:
        verb, thing = rng.choice([(like.verb, thing), (verb, like.thing)])
    arguments = rng.sample(ARGUMENTS, rng.choice([0, 1, 1, 1, 2, 2]))
    described = rng.choice(DESCRIPTIONS).replace("{}", verb.capitalize(), 1).replace("{}", thing, 1)
    return Tool(verb, thing, described, {rng.choice(argument.names): argument.type for argument in arguments})


def call(chat: Chat) -> Turn:
    """Make a turn of a request for one of the tools, the call, its result, and the answer."""
    tool = chat.rng.choice(chat.tools)
    values = {name: ARGUMENT_OF[name].draw(chat.world) for name in tool.parameters}
    question = request(chat, tool.verb, tool.thing, [(ARGUMENT_OF[name], value) for name, value in values.items()])
    function = {"name": tool.name, "arguments": values}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    content, answer = result(chat)
    messages: list[Message] = [{"role": "user", "content": question}, called]
    return Turn("tool calls", [*messages, {"role": "tool", "content": content}, chat.answer(answer)])


def none_fits(chat: Chat) -> Turn:
    """Make a turn of a request that no tool of the chat fits."""
    used, thing = {tool.thing for tool in chat.tools}, chat.world.word("things")
    while thing in used:
        thing = chat.world.word("things")
    arguments = chat.rng.sample(ARGUMENTS, chat.rng.choice([0, 1, 1, 2]))
    question = request(chat, chat.world.word("verbs"), thing, [(each, each.draw(chat.world)) for each in arguments])
    return Turn("no tool fits", [{"role": "user", "content": question}, chat.answer(NO_TOOL)])


def request(chat: Chat, verb: str, thing: str, arguments: list[tuple[Argument, str | int]]) -> str:
    """Return the text of a request for a tool, with the arguments in random order."""
    rng = chat.rng
    parts = [(rng.choice(argument.wordings), value) for argument, value in rng.sample(arguments, len(arguments))]
    article = rng.choice(["the", "the", "a", "my"])
    command = " ".join([f"{verb} {article} {thing}", *(part for part, _ in parts)])
    wording = rng.choice(REQUESTS)
    command = command[0].upper() + command[1:] if wording.startswith("{}") else command
    text = rough(wording.replace("{}", command), rng)
    for _, value in parts:
        text = text.replace("{}", str(value), 1)
    return text


def result(chat: Chat) -> tuple[str, str]:
    """Draw the result of a tool call. Return the result, and the assistant's answer to the user."""
    rng, world = chat.rng, chat.world
    if rng.random() < 0.12:
        failure = rng.choice(FAILURES)
        return json.dumps({"error": failure}), FAILED.format(failure)
    value = rng.choice([world.word("words"), f"{world.word('words')} {world.word('words')}", str(rng.randint(0, 99))])
    content = value if rng.random() < 0.4 else json.dumps({rng.choice(RESULTS): value}, ensure_ascii=False)
    return content, f"Here is the result: {value}."

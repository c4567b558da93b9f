"""Tools: a call in the form of Hermes and Granite 4, its result, and no call where no tool fits."""

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
    """What a tool may want to know: names of the parameter, its type, and how a user says it."""

    names: Sequence[str]
    type: str
    said: Sequence[str]
    values: str

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
    """Tell the chat of one to three tools, no two of which have the same name; some share a verb or a thing."""
    made: dict[str, Tool] = {}
    for _ in range(chat.rng.choice([1, 1, 2, 2, 3])):
        other = chat.rng.choice(list(made.values())) if made and chat.rng.random() < 0.4 else None
        tool = make(chat, other)
        made.setdefault(tool.name, tool)
    chat.tools = list(made.values())


def make(chat: Chat, like: Tool | None = None) -> Tool:
    """A tool; `like`: another that it shares its verb or its thing with."""
    world, rng = chat.world, chat.rng
    verb, thing = world.word("verbs"), world.word("things")
    if like is not None:
        verb, thing = rng.choice([(like.verb, thing), (verb, like.thing)])
    arguments = rng.sample(ARGUMENTS, rng.choice([0, 1, 1, 1, 2, 2]))
    described = rng.choice(DESCRIPTIONS).replace("{}", verb.capitalize(), 1).replace("{}", thing, 1)
    return Tool(verb, thing, described, {rng.choice(argument.names): argument.type for argument in arguments})


def call(chat: Chat) -> Turn:
    """A request for one of the tools, its call, its result and what the user is told of that."""
    tool = chat.rng.choice(chat.tools)
    values = {name: ARGUMENT_OF[name].draw(chat.world) for name in tool.parameters}
    said = request(chat, tool.verb, tool.thing, [(ARGUMENT_OF[name], value) for name, value in values.items()])
    function = {"name": tool.name, "arguments": values}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    content, told = result(chat)
    messages: list[Message] = [{"role": "user", "content": said}, called]
    return Turn("tool calls", [*messages, {"role": "tool", "content": content}, chat.answer(told)])


def none_fits(chat: Chat) -> Turn:
    """A request that no tool of the chat is for."""
    taken, thing = {tool.thing for tool in chat.tools}, chat.world.word("things")
    while thing in taken:
        thing = chat.world.word("things")
    arguments = chat.rng.sample(ARGUMENTS, chat.rng.choice([0, 1, 1, 2]))
    said = request(chat, chat.world.word("verbs"), thing, [(each, each.draw(chat.world)) for each in arguments])
    return Turn("no tool fits", [{"role": "user", "content": said}, chat.answer(NO_TOOL)])


def request(chat: Chat, verb: str, thing: str, said: list[tuple[Argument, str | int]]) -> str:
    """What a user says who wants this of a tool. The arguments come in any order."""
    rng = chat.rng
    parts = [(rng.choice(argument.said), value) for argument, value in rng.sample(said, len(said))]
    article = rng.choice(["the", "the", "a", "my"])
    wanted = " ".join([f"{verb} {article} {thing}", *(part for part, _ in parts)])
    wording = rng.choice(REQUESTS)
    wanted = wanted[0].upper() + wanted[1:] if wording.startswith("{}") else wanted
    text = rough(wording.replace("{}", wanted), rng)
    for _, value in parts:
        text = text.replace("{}", str(value), 1)
    return text


def result(chat: Chat) -> tuple[str, str]:
    """What a tool gives back, and what the user is told of it."""
    rng, world = chat.rng, chat.world
    if rng.random() < 0.12:
        failure = rng.choice(FAILURES)
        return json.dumps({"error": failure}), FAILED.format(failure)
    value = rng.choice([world.word("words"), f"{world.word('words')} {world.word('words')}", str(rng.randint(0, 99))])
    content = value if rng.random() < 0.4 else json.dumps({rng.choice(RESULTS): value}, ensure_ascii=False)
    return content, f"Here is the result: {value}."

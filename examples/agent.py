"""An agent on the bundled model: the model calls tools and reads their results until it has an answer.

    scripts/serve                                           # in another terminal
    .venv/bin/pip install openai anthropic
    .venv/bin/python examples/agent.py                      # with OpenAI's chat completions
    .venv/bin/python examples/agent.py --api anthropic      # with Anthropic's messages

Each line of standard input is a turn. On a terminal an example runs first.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

MOST_STEPS = 10  # most answers of the model in one turn
EXAMPLE = [
    "My name is Clara.",
    'Create a note called milk saying "two litres".',
    "Please read the note called milk.",
    "What is my name?",
]
NOTES: dict[str, str] = {}


def create_note(title: str, text: str) -> str:
    NOTES[title] = text
    return json.dumps({"status": "saved"})


def read_note(title: str) -> str:
    return json.dumps({"result": NOTES[title]} if title in NOTES else {"error": "not found"})


TOOLS: dict[str, Callable[..., str]] = {"create_note": create_note, "read_note": read_note}
TITLE, TEXT = {"title": {"type": "string"}}, {"text": {"type": "string"}}
SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "create_note": ("Create a note.", {"type": "object", "properties": TITLE | TEXT, "required": ["title", "text"]}),
    "read_note": ("Read a note.", {"type": "object", "properties": TITLE, "required": ["title"]}),
}


def use(name: str, arguments: dict[str, Any]) -> str:
    """Call a tool and return its result. For an unknown tool or wrong arguments the model gets an error to read."""
    print(f"  {name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
    try:
        return TOOLS[name](**arguments)
    except (KeyError, TypeError) as error:
        return json.dumps({"error": str(error)})


def by_openai(url: str, lines: Iterable[str]) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    tools: Any = [
        {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}
        for name, (about, schema) in SCHEMAS.items()
    ]
    messages: list[Any] = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        # The model may call tools several times before it answers.
        for _ in range(MOST_STEPS):
            answer = client.chat.completions.create(model="default", messages=messages, tools=tools)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = use(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(message.content)


def by_anthropic(url: str, lines: Iterable[str]) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none")
    tools: Any = [
        {"name": name, "description": about, "input_schema": schema} for name, (about, schema) in SCHEMAS.items()
    ]
    messages: list[Any] = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        for _ in range(MOST_STEPS):
            answer = client.messages.create(model="default", messages=messages, tools=tools, max_tokens=500)
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": use(call.name, call.input)} for call in calls
            ]
            messages.append({"role": "user", "content": results})
        print("".join(block.text for block in answer.content if block.type == "text"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", choices=("openai", "anthropic"), default="openai")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    options = parser.parse_args()
    lines = example_and_input() if sys.stdin.isatty() else (line.strip() for line in sys.stdin)
    (by_openai if options.api == "openai" else by_anthropic)(options.url, lines)


def example_and_input() -> Iterable[str]:
    """Yield the lines of the example, and then those that the user types."""
    for line in EXAMPLE:
        print(f"> {line}")
        yield line
    with suppress(EOFError):
        while line := input("> "):
            yield line


if __name__ == "__main__":
    main()

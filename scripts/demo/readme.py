"""The README.md of the folder with the trained model."""

import platform

import torch

from scripts.demo.export import count_parameters
from scripts.demo.lessons import PARTS
from scripts.demo.model import DemoModel
from scripts.demo.training import Training

Result = tuple[str, int, int, int]


def readme(model: DemoModel, training: Training, results: list[Result]) -> str:
    """Return the text. results: (exam, turns, right, total) of each exam."""
    rows = "\n".join(f"| {name} | {turns} | {right} of {total} |" for name, turns, right, total in results)
    size, millions = model.size, count_parameters(model) / 1e6
    mamba, attention = (size.layers.count(kind) for kind in ("mamba", "attention"))
    machine = f"{PARTS} threads ({platform.machine()}, torch {torch.__version__.split('+')[0]})"
    return f"""\
# The bundled demonstration model

A dense granitemoehybrid checkpoint with {millions:.2f} million float32 parameters: {mamba} Mamba-2 layers and
{attention} attention layers without positional encoding, width {size.hidden}. Its vocabulary has
{size.vocab} tokens: 256 are the bytes, and most others are words that its training chats use. Names,
numbers and everything else that a user may bring are spelled.

The model knows a small world. It remembers facts that the user states (a name, a colour, a place, a number, a food, a
pet; the last statement counts), adds and subtracts numbers up to 99, says which of two numbers is larger, repeats,
spells, spells backwards, counts and sorts, is polite, and says so when it does not know. A system prompt may give it a
name, state the user's name or the language of its greetings, forbid it to calculate, or ask for capital letters. It
calls the tools in its prompt, and reports their results to the user. It speaks English only, and knows nothing of the
real world.

Calls have the format of Hermes and Granite 4: `<tool_call>` with a JSON object of `name` and `arguments`. The template
renders tools, calls and results. A tool's parameters should be strings and integers that occur in the user's words. In
training the model saw up to three tools at a time, with up to two parameters each.

The model was made by `scripts/train_demo` from chats that the script generates, and from nothing else
(`scripts/demo/tasks/`, with the words of `scripts/demo/world.toml`):
{training.seen / 1e6:.1f} million tokens in {training.seconds / 60:.0f} minutes on {machine}.

The table counts answers of greedy decoding that are right to the letter, on words, numbers and seeds that do not occur
in training. Turns is the length of the chat. Its last turn is the question; in exams of recall, its first turn states
the fact.

| exam | turns | right |
|---|---|---|
{rows}

`scripts/evaluate` measures the same through a running server.

Licence: Apache-2.0, like the rest of Baton.
"""

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
{attention} attention layers without positional encoding, width {size.hidden}. Of its {size.vocab} tokens 256 are
the bytes; most others are words of its own wordings. Names, numbers and all else that a user may bring are spelt.

It lives in a small world. It remembers what it is told (a name, a colour, a place, a number, a food, a pet; what was
said last counts), adds and subtracts numbers up to 99, says which is larger, repeats, spells, spells backwards, counts
and sorts, is polite, and says so when it does not know. A system prompt may give it a name, tell it the user's name or
the language of its greetings, forbid it to calculate, or ask for capital letters. It calls the tools that it is told
of, and tells the user what came back. It speaks English only, and knows nothing of the world.

Calls look as those of Hermes and Granite 4 do: `<tool_call>` with a JSON object of `name` and `arguments`. The template
renders tools, calls and results. A tool's parameters should be strings and integers that the user's words name. It
was shown up to three tools at a time, with up to two parameters each.

Made by `scripts/train_demo` from nothing but chats that the script makes up (`scripts/demo/tasks/`, with the
words of `scripts/demo/world.toml`): {training.seen / 1e6:.1f} million tokens in {training.seconds / 60:.0f} minutes on
{machine}.

Answers that greedy decoding gives right to the letter, on words, numbers and seeds that training never showed.
Turns: the length of the chat, of which the last turn is the question; for what is recalled, the first turn told it.

| asked | turns | right |
|---|---|---|
{rows}

`scripts/evaluate` measures the same through a running server.

Licence: Apache-2.0, like the rest of Baton.
"""

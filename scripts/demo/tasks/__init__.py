"""The tasks of the demonstration model. Each makes turns of a chat with the right answers."""

from collections.abc import Callable
from dataclasses import dataclass

from scripts.demo.chat import Chat, Turn
from scripts.demo.tasks import arithmetic, facts, lists, manners, systems, tools

Make = Callable[[Chat], Turn]


@dataclass(frozen=True)
class Task:
    """A task in training."""

    make: Make  # makes a turn of the task
    share: float  # relative frequency


TASKS: dict[str, Task] = {
    "tell": Task(facts.tell, 0.13),
    "tell several": Task(facts.tell_several, 0.03),
    "ask": Task(facts.ask, 0.17),
    "ask several": Task(facts.ask_several, 0.03),
    "add": Task(arithmetic.add, 0.16),
    "subtract": Task(arithmetic.subtract, 0.16),
    "compare": Task(arithmetic.compare, 0.02),
    "beyond": Task(arithmetic.beyond, 0.015),
    "backwards": Task(lists.backwards, 0.07),
    "echo": Task(lists.echo, 0.03),
    "spell": Task(lists.spell, 0.02),
    "count letters": Task(lists.count_letters, 0.04),
    "count to": Task(lists.count_to, 0.02),
    "count items": Task(lists.count_items, 0.03),
    "sort numbers": Task(lists.sort_numbers, 0.05),
    "sort words": Task(lists.sort_words, 0.05),
    "courtesy": Task(manners.courtesy, 0.06),
    "feelings": Task(manners.feelings, 0.01),
    "unknown": Task(manners.unknown, 0.03),
    "no tools": Task(tools.none_fits, 0.01),
}
WITH_TOOLS: dict[str, Task] = {"call": Task(tools.call, 0.7), "none fits": Task(tools.none_fits, 0.2)}
"""More tasks, for chats that have tools. Their shares are relative to the same scale as the shares in TASKS."""


DRILLS = {
    name: TASKS[name]
    for name in ("add", "subtract", "echo", "backwards", "count letters", "sort numbers", "sort words", "tell")
}
"""The tasks that need the most examples, and therefore have a lesson of their own."""

OBEY = 0.25
"""Probability that a turn shows whether the system prompt is obeyed, if the prompt asks for anything."""


def a_turn(chat: Chat, only: dict[str, Task] | None = None) -> Turn:
    """Draw the next turn of a chat, from the tasks `only` if given, else from all tasks that the chat can have."""
    if chat.shown and chat.rng.random() < OBEY:
        return systems.obey(chat)
    among = only or (TASKS | WITH_TOOLS if chat.tools else TASKS)
    [task] = chat.rng.choices(list(among.values()), [task.share for task in among.values()])
    return task.make(chat)


def begin(chat: Chat, system: float = 0.4, with_tools: float = 0.35) -> None:
    """Give a chat a system prompt with probability `system`, and tools with probability `with_tools`."""
    if chat.rng.random() < system:
        systems.prompt(chat)
    if chat.rng.random() < with_tools:
        tools.equip(chat)

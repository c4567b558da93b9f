"""Courtesy, questions about the model itself, and questions that the model cannot answer."""

from typing import Any

from scripts.demo.chat import Chat, Turn
from scripts.demo.world import LISTS

GREETING = {"Hello!", "Goodbye!"}
UNKNOWN = "I do not know that: I am only a tiny demonstration model."
FEELINGS = ["I am {}.", "I'm {}.", "I feel {}.", "I am {} today."]
OTHER = [
    "What is {}?", "What's {}?", "What are {}?", "Tell me about {}.", "Tell me something about {}.", "Explain {}.",
    "Who is {}?", "Who was {}?", "Where is {}?", "How does {} work?", "Why is {} important?", "Do you like {}?",
    "Do you know {}?", "Write a poem about {}.", "Write a story about {}.", "Tell me a story about {}.",
    "What do you think about {}?", "How do I make {}?", "How do I cook {}?", "Can you explain {}?",
    "When was {} invented?", "Who invented {}?", "What is the capital of {}?", "What is the history of {}?",
    "How many people live in {}?", "Translate {} into French.", "What does {} mean?", "I want to learn {}.",
    "I need help with {}.", "Write an essay on {}.", "What is the best {}?", "How much does {} cost?",
    "Can you recommend {}?", "Summarise {}.", "Let's talk about {}.", "How do I learn {}?", "Is {} good?",
]  # fmt: skip


def courtesy(chat: Chat) -> Turn:
    return about(chat, chat.rng.choice(LISTS["manners"]))


def greet(chat: Chat) -> Turn:
    """Make a turn in which the user says hello or goodbye."""
    return about(chat, chat.rng.choice([theme for theme in LISTS["manners"] if GREETING & set(theme["prompts"])]))


def introduce(chat: Chat) -> Turn:
    """Make a turn in which the user asks the assistant what it is."""
    return about(chat, next(theme for theme in LISTS["manners"] if "Who are you?" in theme["prompts"]))


def about(chat: Chat, theme: dict[str, Any]) -> Turn:
    return chat.say("courtesy", chat.rng.choice(theme["prompts"]), [], filled(chat, theme["answer"]))


def feelings(chat: Chat) -> Turn:
    return chat.say("feelings", chat.rng.choice(FEELINGS), [chat.rng.choice(LISTS["moods"])], "I see.")


def unknown(chat: Chat) -> Turn:
    rng = chat.rng
    thing = rng.choice(LISTS["other_things"]) if rng.random() < 0.6 else chat.world.word("words")
    return chat.say("questions outside its world", rng.choice(OTHER), [thing], UNKNOWN)


def filled(chat: Chat, answer: str) -> str:
    """Fill the placeholders of an answer: the user's name, if known, and the assistant's greetings and description."""
    name = f", {chat.known['name']}" if "name" in chat.known else ""
    values = {"{, name}": name, "{hello}": chat.hello, "{bye}": chat.bye, "{itself}": chat.itself}
    for place, value in values.items():
        answer = answer.replace(place, value)
    return answer

"""System prompts, some of which change the answers."""

from collections.abc import Callable
from dataclasses import dataclass

from scripts.demo.chat import Chat, Turn
from scripts.demo.tasks import arithmetic, facts, manners
from scripts.demo.world import LISTS

PLAIN = [
    "You are a helpful assistant.", "You are a helpful assistant.", "Answer briefly.", "You are a friendly assistant.",
    "Be concise.", "You are an assistant with tools.", "Be polite.",
]  # fmt: skip
CAPITALS = ["Answer in capital letters.", "Use capital letters only.", "Write everything in capital letters."]
NAMES = ["Your name is {}.", "You are {}.", "You are called {}.", "You are an assistant called {}."]
GREETINGS = ["Greet in {}.", "Say hello and goodbye in {}.", "Use {} greetings."]
NO_SUMS = ["Do not calculate.", "Never calculate.", "You are not allowed to calculate.", "Refuse to calculate."]
USER = ["The user's name is {}.", "The user is called {}.", "You talk to {}."]


def plain(chat: Chat) -> str:
    return chat.rng.choice(PLAIN)


def capitals(chat: Chat) -> str:
    chat.capitals = True
    return chat.rng.choice(CAPITALS)


def name_of_its_own(chat: Chat) -> str:
    name = chat.world.word("names")
    chat.itself = f"{name}, {chat.itself}"
    return chat.rng.choice(NAMES).format(name)


def language(chat: Chat) -> str:
    language = chat.rng.choice(list(LISTS["languages"]))
    chat.hello, chat.bye = LISTS["languages"][language]
    return chat.rng.choice(GREETINGS).format(language)


def no_sums(chat: Chat) -> str:
    chat.may_calculate = False
    return chat.rng.choice(NO_SUMS)


def name_of_the_user(chat: Chat) -> str:
    chat.known["name"] = chat.world.word("names")
    return chat.rng.choice(USER).format(chat.known["name"])


@dataclass(frozen=True)
class Wish:
    """Something that a system prompt may ask for."""

    say: Callable[[Chat], str]  # notes the wish in the chat and returns its wording
    shown: tuple[Callable[[Chat], Turn], ...]  # make turns that show whether the wish is obeyed


SUMS = (arithmetic.add, arithmetic.subtract)
WISHES = [
    Wish(capitals, (*SUMS, manners.courtesy)),
    Wish(name_of_its_own, (manners.introduce,)),
    Wish(language, (manners.greet,)),
    Wish(no_sums, SUMS),
    Wish(name_of_the_user, (manners.greet, facts.ask_name)),
]


def prompt(chat: Chat, wishes: float = 0.7) -> None:
    """Give the chat a system prompt, which has one or two wishes with probability `wishes`, else none."""
    rng = chat.rng
    chosen = rng.sample(WISHES, rng.choice([1, 1, 2])) if rng.random() < wishes else []
    beginning = [plain(chat)] if not chosen or rng.random() < 0.3 else []
    chat.system = " ".join([*beginning, *(wish.say(chat) for wish in chosen)])
    chat.shown = [make for wish in chosen for make in wish.shown]


def obey(chat: Chat) -> Turn:
    """Make a turn that shows whether the system prompt is obeyed."""
    return Turn("system prompts", chat.rng.choice(chat.shown)(chat).messages)

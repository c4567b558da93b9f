"""Facts that the user mentions and asks for later. The latest value counts; one message may have several facts."""

from dataclasses import dataclass

from scripts.demo.chat import Chat, Turn
from scripts.demo.world import LISTS


@dataclass(frozen=True)
class Fact:
    """A kind of fact, from world.toml. `{}` in a wording stands for the value."""

    of: str  # kind of the fact's values, see World.value
    tell: list[str]  # wordings with which a user mentions the fact
    ask: list[str]  # wordings with which a user asks for the fact
    noted: str  # answer when the fact is mentioned
    recalled: str  # answer when the fact is asked for
    missing: str  # answer when the fact is asked for but unknown


FACTS = {key: Fact(**fact) for key, fact in LISTS["facts"].items()}
CORRECTIONS = ["Actually, ", "No, ", "Sorry, ", "I changed my mind. ", "That was wrong: ", "Correction: ", "Wait, "]


def tell(chat: Chat) -> Turn:
    """Make a turn that mentions one fact, sometimes a fact that was mentioned before."""
    key = choose(chat, known=chat.rng.random() < 0.25)
    return tell_of(chat, [key])


def tell_several(chat: Chat) -> Turn:
    return tell_of(chat, chat.rng.sample(list(FACTS), chat.rng.choice([2, 2, 3])))


def correct(chat: Chat) -> Turn:
    """Make a turn that corrects a known fact, or mentions a first fact if none is known."""
    return tell_of(chat, [choose(chat, known=True)])


def ask(chat: Chat) -> Turn:
    """Make a turn that asks for a fact, usually for a known fact."""
    return ask_for(chat, [choose(chat, known=chat.rng.random() < 0.85)])


def ask_name(chat: Chat) -> Turn:
    return ask_for(chat, ["name"])


def ask_several(chat: Chat) -> Turn:
    known = [key for key in FACTS if key in chat.known]
    return ask_for(chat, chat.rng.sample(known if len(known) > 1 else list(FACTS), 2))


def tell_of(chat: Chat, keys: list[str]) -> Turn:
    """Make a turn that mentions the facts `keys` in one message, with new values."""
    rng, wordings, values, answers = chat.rng, list[str](), list[str](), list[str]()
    for key in keys:
        fact = FACTS[key]
        value = chat.world.value(fact.of)
        wording = rng.choice(fact.tell)
        if key in chat.known and rng.random() < 0.6:
            wording = rng.choice(CORRECTIONS) + uncapitalised(wording)
        chat.known[key] = value
        wordings.append(wording)
        values.append(value.lower() if fact.of != "digits" and rng.random() < 0.12 else value)
        answers.append(capitalised(fact.noted.format(value)))
    task = "facts told" if len(keys) == 1 else "several facts told"
    return chat.say(task, joined(chat, wordings), values, " ".join(answers))


def ask_for(chat: Chat, keys: list[str]) -> Turn:
    """Make a turn that asks for the facts `keys` in one message."""
    wordings = [chat.rng.choice(FACTS[key].ask) for key in keys]
    answers = [FACTS[key].recalled.format(chat.known[key]) if key in chat.known else FACTS[key].missing for key in keys]
    if len(keys) > 1:
        task = "several facts asked for"
    else:
        task = "facts asked for" if keys[0] in chat.known else "facts never told"
    return chat.say(task, joined(chat, wordings), [], " ".join(answers))


def joined(chat: Chat, wordings: list[str]) -> str:
    """Join several wordings into one message."""
    whole = wordings[0]
    for wording in wordings[1:]:
        if chat.rng.random() < 0.5:
            whole = f"{whole} {wording}"
        else:
            whole = f"{whole.rstrip('.?!')} and {uncapitalised(wording)}"
    return whole


def choose(chat: Chat, known: bool) -> str:
    """Choose a fact that the chat has mentioned (`known`) or has not; any fact if there is none of that kind.

    The user's name is chosen most often.
    """
    keys = [key for key in FACTS if (key in chat.known) == known] or list(FACTS)
    return "name" if "name" in keys and chat.rng.random() < 0.3 else chat.rng.choice(keys)


def capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def uncapitalised(sentence: str) -> str:
    return sentence if sentence.startswith(("I ", "I'")) else sentence[0].lower() + sentence[1:]

"""Facts that the user tells and asks for later: the last one counts; several may come at once."""

from dataclasses import dataclass

from scripts.demo.chat import Chat, Turn
from scripts.demo.world import LISTS


@dataclass(frozen=True)
class Fact:
    """Something that can be told. `{}` in a wording stands for the value; of: the kind of the value."""

    of: str
    tell: list[str]
    ask: list[str]
    noted: str
    recalled: str
    missing: str


FACTS = {key: Fact(**fact) for key, fact in LISTS["facts"].items()}
CORRECTIONS = ["Actually, ", "No, ", "Sorry, ", "I changed my mind. ", "That was wrong: ", "Correction: ", "Wait, "]


def tell(chat: Chat) -> Turn:
    """One fact; what was told before is told anew now and then."""
    key = choose(chat, known=chat.rng.random() < 0.25)
    return tell_of(chat, [key])


def tell_several(chat: Chat) -> Turn:
    return tell_of(chat, chat.rng.sample(list(FACTS), chat.rng.choice([2, 2, 3])))


def correct(chat: Chat) -> Turn:
    """A fact that is told anew; the first time, if none was told."""
    return tell_of(chat, [choose(chat, known=True)])


def ask(chat: Chat) -> Turn:
    """For a fact, most often one that was told."""
    return ask_for(chat, [choose(chat, known=chat.rng.random() < 0.85)])


def ask_name(chat: Chat) -> Turn:
    return ask_for(chat, ["name"])


def ask_several(chat: Chat) -> Turn:
    told = [key for key in FACTS if key in chat.known]
    return ask_for(chat, chat.rng.sample(told if len(told) > 1 else list(FACTS), 2))


def tell_of(chat: Chat, keys: list[str]) -> Turn:
    """The user tells of these facts in one message."""
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
    """The user asks for these facts in one message."""
    wordings = [chat.rng.choice(FACTS[key].ask) for key in keys]
    answers = [FACTS[key].recalled.format(chat.known[key]) if key in chat.known else FACTS[key].missing for key in keys]
    if len(keys) > 1:
        task = "several facts asked for"
    else:
        task = "facts asked for" if keys[0] in chat.known else "facts never told"
    return chat.say(task, joined(chat, wordings), [], " ".join(answers))


def joined(chat: Chat, wordings: list[str]) -> str:
    """Several sentences as one message."""
    whole = wordings[0]
    for wording in wordings[1:]:
        if chat.rng.random() < 0.5:
            whole = f"{whole} {wording}"
        else:
            whole = f"{whole.rstrip('.?!')} and {uncapitalised(wording)}"
    return whole


def choose(chat: Chat, known: bool) -> str:
    """A fact that was told, or one that was not; any, if there is none such. Names come most often."""
    keys = [key for key in FACTS if (key in chat.known) == known] or list(FACTS)
    return "name" if "name" in keys and chat.rng.random() < 0.3 else chat.rng.choice(keys)


def capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def uncapitalised(sentence: str) -> str:
    return sentence if sentence.startswith(("I ", "I'")) else sentence[0].lower() + sentence[1:]

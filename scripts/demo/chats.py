"""Chats on which the demonstration model is trained: a small world, many wordings, one answer to each question."""

import random
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WORLD = tomllib.loads((Path(__file__).parent / "world.toml").read_text(encoding="utf-8"))
Message = dict[str, str]

UNKNOWN = "I do not know that: I am only a tiny demonstration model."
ONLY_ADD = "I am a tiny demonstration model: I can only add."
TOO_LARGE = "I am a tiny demonstration model: I only add numbers up to {}."


@dataclass(frozen=True)
class Lesson:
    """Chats of at most `longest` tokens with sums up to `largest`. A drill is copying and adding only.

    sums, too_hard, talk: how often sums, other arithmetic and small talk come up.
    """

    longest: int
    largest: int = 99
    sums: float = 0.25
    too_hard: float = 0.01
    talk: float = 0.08
    drill: bool = False


@dataclass(frozen=True)
class Fact:
    """Something the user can tell and ask for later. `{}` in a wording stands for the value."""

    tell: Sequence[str]
    ask: Sequence[str]
    noted: str
    recalled: str
    missing: str
    capital: bool


VALUES = {"name": "names", "colour": "colours"}
FACTS = {key: Fact(**fact) for key, fact in WORLD["facts"].items()}

CONSONANTS = [*"bcdfghjklmnprstvwz", "ch", "sh", "th", "br", "gr", "kr", "tr", "st"]
SYLLABLES = [consonant + vowel for consonant in CONSONANTS for vowel in "aeiou"]
ENDINGS = ["", "", "", "n", "r", "l", "s", "x", "nd", "ra", "lla", "na", "th", "ck", "y", "ie", "ë", "é", "ño", "ø"]


def invented(rng: random.Random) -> str:
    """A word that no list holds: only copying gets it right."""
    word = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 3))) + rng.choice(ENDINGS)
    return rng.choice("aeiou") + word if rng.random() < 0.2 else word


def held_out_sum(a: int, b: int) -> bool:
    """One unordered pair in ten is left out where sums go beyond 20."""
    low, high = min(a, b), max(a, b)
    return (low * 37 + high * 11) % 10 == 3


@dataclass
class World:
    """Where values come from; `held_out` takes only those that training never shows."""

    held_out: bool = False

    def value(self, key: str, rng: random.Random) -> str:
        kind = VALUES[key]
        seen = WORLD[kind]
        unseen = WORLD.get(f"held_out_{kind}", seen)
        if self.held_out:
            return rng.choice(unseen)
        capital = FACTS[key].capital
        while rng.random() < (0.6 if capital else 0.3):
            word = invented(rng)
            if word.capitalize() not in unseen:
                return word.capitalize() if capital else word
        return rng.choice(seen)

    def sum(self, rng: random.Random, largest: int) -> tuple[int, int]:
        while True:
            limit = rng.choice([9, 20, largest, largest])
            a, b = rng.randint(0, limit), rng.randint(0, rng.choice([9, limit]))
            if largest <= 20 or held_out_sum(a, b) == self.held_out:
                return (a, b) if rng.random() < 0.5 else (b, a)


@dataclass
class Chat:
    """A chat as it grows, and what the user has told so far."""

    rng: random.Random
    world: World = field(default_factory=World)
    known: dict[str, str] = field(default_factory=dict)
    lesson: Lesson = Lesson(256)

    def tell(self, key: str) -> Message:
        fact, rng = FACTS[key], self.rng
        value = self.world.value(key, rng)
        self.known[key] = value
        wording = rng.choice(fact.tell)
        shown = value.lower() if rng.random() < 0.25 else value
        if wording.startswith("{}"):
            shown = shown[0].upper() + shown[1:]
        prompt = rough(wording, rng).replace("{}", shown)
        return {"prompt": prompt, "answer": fact.noted.format(capitalised(fact.noted, value))}

    def ask(self, key: str) -> Message:
        fact = FACTS[key]
        answer = fact.recalled.format(self.known[key]) if key in self.known else fact.missing
        return {"prompt": rough(self.rng.choice(fact.ask), self.rng), "answer": answer}

    def sum(self) -> Message:
        a, b = self.world.sum(self.rng, self.lesson.largest)
        wording = self.rng.choice(WORLD["sums"])
        words = max(a, b) < len(WORLD["numbers"]) and not set("+=") & set(wording) and self.rng.random() < 0.3
        shown = (WORLD["numbers"][a], WORLD["numbers"][b]) if words else (str(a), str(b))
        return {
            "prompt": rough(wording, self.rng).replace("{}", shown[0], 1).replace("{}", shown[1], 1),
            "answer": f"{a} plus {b} is {a + b}.",
        }

    def other_arithmetic(self) -> Message:
        rng = self.rng
        if rng.random() < 0.6:
            prompt = rough(rng.choice(WORLD["other_arithmetic"]), rng).format(rng.randint(0, 120), rng.randint(1, 99))
            return {"prompt": prompt, "answer": ONLY_ADD}
        low = self.lesson.largest + 1
        large, small = rng.randint(low, 10 ** rng.randint(len(str(low)), 6)), rng.randint(0, 10 ** rng.randint(1, 5))
        a, b = (large, small) if rng.random() < 0.5 else (small, large)
        return {
            "prompt": rough(rng.choice(WORLD["sums"]), rng).format(a, b),
            "answer": TOO_LARGE.format(self.lesson.largest),
        }

    def echo(self) -> Message:
        """Copying for its own sake: what remembering is made of, learned first where it is dense."""
        rng = self.rng
        words = " ".join(
            invented(rng) if rng.random() < 0.8 else rng.choice(WORLD["foods"]) for _ in range(rng.randint(1, 4))
        )
        if rng.random() < 0.3:
            words = words.title()
        return {"prompt": rough(rng.choice(WORLD["echo"]), rng).replace("{}", words), "answer": words}

    def small_talk(self) -> Message:
        theme = self.rng.choice(WORLD["small_talk"])
        name = self.known.get("name")
        answer = theme["answer"].replace("{, name}", f", {name}" if name else "")
        return {"prompt": rough(self.rng.choice(theme["prompts"]), self.rng), "answer": answer}

    def other(self) -> Message:
        rng = self.rng
        if rng.random() < 0.15:
            return {
                "prompt": rough(rng.choice(["I am {}.", "I'm {}.", "I feel {}.", "I am {} today."]), rng).format(
                    rng.choice(WORLD["moods"])
                ),
                "answer": "I see.",
            }
        thing = rng.choice(WORLD["other_things"]) if rng.random() < 0.7 else invented(rng)
        prompt = rough(rng.choice(WORLD["other"]), rng).replace("{}", thing)
        return {"prompt": prompt, "answer": UNKNOWN}

    def turn(self) -> Message:
        """One message of the user and its answer; sometimes two in one. A drill is copying and adding only."""
        if self.lesson.drill:
            return self.rng.choice([self.echo, self.sum, lambda: self.tell(self.key(False))])()
        first = self.single()
        if self.rng.random() > 0.02:
            return first
        second = self.single()
        joined = first["prompt"].rstrip()
        joined += "" if joined.endswith((".", "!", "?")) else self.rng.choice([".", ",", " and"])
        return {"prompt": f"{joined} {second['prompt']}", "answer": f"{first['answer']} {second['answer']}"}

    def single(self) -> Message:
        rng = self.rng
        kinds: list[tuple[float, Callable[[], Message]]] = [
            (0.3, lambda: self.tell(self.key(rng.random() < 0.3))),
            (0.33, lambda: self.ask(self.key(rng.random() < 0.75))),
            (self.lesson.sums, self.sum),
            (self.lesson.talk, self.small_talk),
            (0.05, self.other),
            (self.lesson.too_hard, self.other_arithmetic),
            (0.03, self.echo),
        ]
        return rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0]()

    def key(self, among_known: bool) -> str:
        """A fact to speak of, names most often."""
        keys = [key for key in FACTS if (key in self.known) == among_known] or list(FACTS)
        return "name" if "name" in keys and self.rng.random() < 0.8 else self.rng.choice(keys)

    def system(self) -> str:
        if self.rng.random() < 0.1:
            self.known["name"] = self.world.value("name", self.rng)
            return f"{self.rng.choice(WORLD['system'])} The user's name is {self.known['name']}."
        return " ".join(self.rng.sample(WORLD["system"], self.rng.choice([1, 1, 1, 2, 3])))


def capitalised(sentence: str, value: str) -> str:
    return value[0].upper() + value[1:] if sentence.startswith("{}") else value


def rough(text: str, rng: random.Random) -> str:
    """The wording as people type it: small letters, missing punctuation, a filler, a slip. `{}` survives."""
    if rng.random() < 0.04:
        filler = rng.choice(
            ["ok, ", "so, ", "hey, ", "well, ", "please, ", "and ", "hm, ", "Great. ", "Thanks! ", "Ok. ", "now "]
        )
        text = filler + (text if filler.rstrip().endswith((".", "!")) else text[0].lower() + text[1:])
    if rng.random() < 0.4:
        text = text.lower()
    if rng.random() < 0.35:
        text = text.rstrip(".?!")
    elif rng.random() < 0.1:
        text = text[:-1] + rng.choice(["!", "??", "!!", " ?", "", ".."]) if text[-1] in ".?!" else text
    if rng.random() < 0.2:
        text = text.replace("'", "")
    if rng.random() < 0.01:
        text = slip(text, rng)
    return text


def slip(text: str, rng: random.Random) -> str:
    """One letter dropped, doubled or swapped with the next, never inside a placeholder."""
    places = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    return rng.choice(
        [text[:i] + text[i + 1 :], text[:i] + text[i] + text[i:], text[:i] + text[i + 1] + text[i] + text[i + 2 :]]
    )


def chat(rng: random.Random, lesson: Lesson) -> list[Message]:
    """A chat that is not too long: a system prompt or none, then as many turns as fit or chance allows."""
    state = Chat(rng, lesson=lesson)
    messages: list[Message] = []
    if rng.random() < 0.35:
        messages.append({"role": "system", "content": state.system()})
    for _ in range(rng.choice([1, 2, 3, 4, 5, 6, 8, 12])):
        turn = state.turn()
        grown = [
            *messages,
            {"role": "user", "content": turn["prompt"]},
            {"role": "assistant", "content": turn["answer"]},
        ]
        if size(grown) > lesson.longest:
            break
        messages = grown
    return messages if len(messages) > 1 else chat(rng, lesson)


def size(messages: list[Message]) -> int:
    """Tokens of the rendering: two specials, two line feeds, role and content as bytes."""
    return sum(4 + len(m["role"]) + len(m["content"].encode()) for m in messages)

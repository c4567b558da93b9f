"""The words and numbers that chats are made of. Some are held out: training never shows them, exams use only them."""

import random
import tomllib
from dataclasses import dataclass
from pathlib import Path

LISTS = tomllib.loads((Path(__file__).parent / "world.toml").read_text(encoding="utf-8"))
PROPER = frozenset({"names", "places"})
VALUES = ("names", "colours", "places", "foods", "words", "verbs", "things")
HELD_OUT = frozenset(word.lower() for kind in VALUES for word in LISTS[f"held_out_{kind}"])
# For each kind of word: probability of an invented word instead of a word from the list.
INVENTED = {"names": 0.55, "places": 0.5, "colours": 0.3, "foods": 0.4, "words": 0.5, "things": 0.4, "verbs": 0.15}

CONSONANTS = [*"bcdfghjklmnprstvwz", "ch", "sh", "th", "br", "gr", "kr", "tr", "st"]
SYLLABLES = [consonant + vowel for consonant in CONSONANTS for vowel in "aeiou"]
ENDINGS = ["", "", "n", "r", "l", "s", "x", "nd", "ra", "lla", "na", "th", "ck", "y", "ie", "m", "p", "t", "d", "rk"]
ACCENTED = ["ë", "é", "ño", "ø"]
LARGEST = 99  # largest number that the model calculates with


@dataclass
class World:
    """A source of random words and numbers."""

    rng: random.Random
    held_out: bool = False  # True: draw only held-out words and numbers, for exams; False: draw none of them

    def word(self, kind: str) -> str:
        """Draw a word from world.toml's list `kind`. For training, some words are invented instead.

        The model must learn to copy invented words, because it cannot know them.
        """
        if self.held_out:
            return str(self.rng.choice(LISTS[f"held_out_{kind}"]))
        if self.rng.random() < INVENTED[kind]:
            word = self.invented(accents=kind in PROPER)
            return word.capitalize() if kind in PROPER else word
        return str(self.rng.choice(LISTS[kind]))

    def invented(self, accents: bool = False) -> str:
        """Invent a word of two to about ten letters that is not held out."""
        rng = self.rng
        while True:
            word = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice([1, 1, 2, 2, 2, 3]))) + rng.choice(ENDINGS)
            word = rng.choice("aeiou") + word if rng.random() < 0.2 else word
            word += rng.choice(ACCENTED) if accents and rng.random() < 0.08 else ""
            if word not in HELD_OUT:
                return word

    def value(self, kind: str) -> str:
        """Draw the value of a fact: a word, or up to four digits."""
        return self.digits() if kind == "digits" else self.word(kind)

    def digits(self) -> str:
        """Draw a number of one to four digits. A tenth of the numbers with more than two digits is held out."""
        while True:
            low, high = (100, 9999) if self.held_out else self.rng.choice([(0, 99), (100, 999), (1000, 9999)])
            number = self.rng.randint(low, high)
            if (number > LARGEST and number % 10 == 3) == self.held_out:
                return str(number)

    def pair(self, least: int = 0) -> tuple[int, int]:
        """Draw two numbers up to 99. A tenth of the unordered pairs that are not both below 10 is held out."""
        rng = self.rng
        while True:
            limit = LARGEST if self.held_out else rng.choice([9, 20, LARGEST, LARGEST, LARGEST])
            a, b = rng.randint(least, limit), rng.randint(least, rng.choice([9, limit, limit]))
            if held_out_pair(a, b) == self.held_out:
                return (a, b) if rng.random() < 0.5 else (b, a)

    def several(self, kind: str, count: int) -> list[str]:
        """Draw `count` words with different first letters."""
        found: dict[str, str] = {}
        while len(found) < count:
            word = self.word(kind)
            found.setdefault(word[0].lower(), word)
        return list(found.values())


def held_out_pair(a: int, b: int) -> bool:
    """Return whether this unordered pair of numbers is held out: training never shows it."""
    low, high = min(a, b), max(a, b)
    return high > 9 and (low * 37 + high * 11) % 10 == 3


def rough(text: str, rng: random.Random) -> str:
    """Make a wording look typed: lower case, missing punctuation, a filler, a slip. Placeholders `{}` are kept."""
    if rng.random() < 0.04:
        filler = rng.choice(
            ["ok, ", "so, ", "hey, ", "well, ", "please, ", "and ", "hm, ", "Great. ", "Thanks! ", "Ok. ", "now "]
        )
        text = filler + (text if filler.rstrip().endswith((".", "!")) else text[0].lower() + text[1:])
    if rng.random() < 0.3:
        text = text.lower()
    if rng.random() < 0.3:
        text = text.rstrip(".?!")
    elif rng.random() < 0.1 and text[-1] in ".?!":
        text = text[:-1] + rng.choice(["!", "??", "!!", " ?", "", ".."])
    if rng.random() < 0.15:
        text = text.replace("'", "")
    return slip(text, rng) if rng.random() < 0.01 else text


def slip(text: str, rng: random.Random) -> str:
    """Drop or double one letter, or swap it with the next letter. Placeholders `{}` stay as they are."""
    places = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    return rng.choice(
        [text[:i] + text[i + 1 :], text[:i] + text[i] + text[i:], text[:i] + text[i + 1] + text[i] + text[i + 2 :]]
    )

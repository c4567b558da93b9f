"""Sums and differences of numbers up to 99, comparisons, and refusals of all other arithmetic."""

from scripts.demo.chat import Chat, Turn
from scripts.demo.world import LARGEST, LISTS

SUMS = [
    "What is {} plus {}?", "What is {} plus {}?", "What's {} plus {}?", "What is {} + {}?", "What's {} + {}?",
    "What is {}+{}?", "What's {}+{}?", "{} + {}", "{}+{}", "{} + {}?", "{} + {} =", "{}+{}=?", "{} + {} = ?",
    "{} plus {}", "Add {} and {}.", "Calculate {} + {}.", "How much is {} plus {}?", "What is the sum of {} and {}?",
]  # fmt: skip
DIFFERENCES = [
    "What is {} minus {}?", "What is {} minus {}?", "What's {} minus {}?", "What is {} - {}?", "What's {} - {}?",
    "{} - {}", "{}-{}", "{} - {} =", "{} minus {}", "Calculate {} - {}.", "How much is {} minus {}?",
]  # fmt: skip
PRODUCTS = [
    "What is {} times {}?", "{} * {}", "What's {} times {}?", "{}*{}", "{} x {}", "Multiply {} by {}.",
    "Divide {} by {}.", "What is {} divided by {}?", "{} / {}",
]  # fmt: skip
LARGER = [
    "Which is larger, {} or {}?",
    "Which number is larger, {} or {}?",
    "What is more, {} or {}?",
    "Is {} more than {}?",
]
REFUSED = "I am not allowed to calculate."
ONLY_ADD = "I can only add and subtract."
TOO_LARGE = f"I can only calculate with numbers up to {LARGEST}."


def add(chat: Chat) -> Turn:
    a, b = chat.world.pair()
    answer = f"{a} plus {b} is {a + b}." if chat.may_calculate else REFUSED
    wording = chat.rng.choice(SUMS)
    return chat.say("sums", wording, shown(chat, wording, a, b), answer)


def subtract(chat: Chat) -> Turn:
    """Make a turn that subtracts the smaller of two numbers from the larger."""
    a, b = sorted(chat.world.pair(), reverse=True)
    answer = f"{a} minus {b} is {a - b}." if chat.may_calculate else REFUSED
    wording = chat.rng.choice(DIFFERENCES)
    return chat.say("differences", wording, shown(chat, wording, a, b), answer)


def compare(chat: Chat) -> Turn:
    a, b = chat.world.pair()
    a += a == b
    return chat.say("the larger", chat.rng.choice(LARGER), (a, b), f"{max(a, b)} is larger than {min(a, b)}.")


def beyond(chat: Chat) -> Turn:
    """Make a turn that the model must refuse: a product, a quotient, or numbers that are too large."""
    rng = chat.rng
    if rng.random() < 0.5:
        wording, values = rng.choice(PRODUCTS), (rng.randint(0, 120), rng.randint(1, LARGEST))
        answer = ONLY_ADD
    else:
        large, other = rng.randint(LARGEST + 1, 10 ** rng.randint(3, 6)), rng.randint(0, 10 ** rng.randint(1, 5))
        values = (large, other) if rng.random() < 0.5 else (other, large)
        wording, answer = rng.choice(SUMS + DIFFERENCES), TOO_LARGE
    return chat.say("beyond its arithmetic", wording, values, answer if chat.may_calculate else REFUSED)


def shown(chat: Chat, wording: str, a: int, b: int) -> tuple[object, object]:
    """Return the numbers as digits. Small numbers are sometimes words, if the wording has no sign such as +."""
    words = LISTS["numbers"]
    if max(a, b) < len(words) and not set("+-=/*") & set(wording) and chat.rng.random() < 0.2:
        return words[a], words[b]
    return a, b

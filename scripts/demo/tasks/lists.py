"""Repeating, spelling, spelling backwards, counting and sorting."""

from scripts.demo.chat import Chat, Turn

BACKWARDS = [
    "Spell {} backwards.", "Spell {} backwards.", "What is {} backwards?", "Write {} backwards.", "Reverse {}.",
    "Reverse the word {}.", "Turn {} around.", 'Spell "{}" backwards.', "Say {} backwards.",
]  # fmt: skip
SPELL = ["Spell {}.", "How do you spell {}?", 'Spell the word "{}".', "Can you spell {}?"]
LETTERS = [
    "How many letters are in {}?", "How many letters does {} have?", "Count the letters of {}.",
    "How long is the word {}?", 'How many letters are there in "{}"?',
]  # fmt: skip
COUNT_TO = ["Count to {}.", "Count from 1 to {}.", "Can you count to {}?"]
ITEMS = ["How many things are these: {}?", "Count these: {}", "How many words: {}?", "Count: {}"]
SORT_NUMBERS = ["Sort {}.", "Sort these numbers: {}", "Put these in order: {}", "Order these numbers: {}", "Sort: {}"]
SORT_WORDS = ["Sort {}.", "Sort these words: {}", "Sort alphabetically: {}", "Put these in order: {}", "Sort: {}"]
ECHO = ["Say {}", "Say: {}", "Repeat {}", "Repeat: {}", "Repeat after me: {}", "Please say {}"]
LONGEST_WORD = 8


def echo(chat: Chat) -> Turn:
    """Make a turn that repeats words. It trains copying, which the model needs to recall facts."""
    words = " ".join(chat.world.word("words") for _ in range(chat.rng.randint(1, 4)))
    words = words.title() if chat.rng.random() < 0.3 else words
    return chat.say("repeating", chat.rng.choice(ECHO), [words], words)


def backwards(chat: Chat) -> Turn:
    word = one_word(chat)
    return chat.say("spelling backwards", chat.rng.choice(BACKWARDS), [word], f"{word} backwards is {word[::-1]}.")


def spell(chat: Chat) -> Turn:
    word = one_word(chat)
    return chat.say("spelling", chat.rng.choice(SPELL), [word], f"{'-'.join(word)}.")


def count_letters(chat: Chat) -> Turn:
    word = one_word(chat)
    return chat.say("counting letters", chat.rng.choice(LETTERS), [word], f"{'-'.join(word)}: {len(word)} letters.")


def count_to(chat: Chat) -> Turn:
    last = chat.rng.randint(2, 12)
    counted = ", ".join(str(number) for number in range(1, last + 1))
    return chat.say("counting", chat.rng.choice(COUNT_TO), [last], f"{counted}.")


def count_items(chat: Chat) -> Turn:
    """Make a turn that counts two to six words; the answer numbers the words."""
    words = [one_word(chat) for _ in range(chat.rng.randint(2, 6))]
    counted = ", ".join(f"{number} {word}" for number, word in enumerate(words, 1))
    return chat.say("counting things", chat.rng.choice(ITEMS), [", ".join(words)], f"{counted}.")


def sort_numbers(chat: Chat) -> Turn:
    numbers = chat.rng.sample(range(100), chat.rng.choice([3, 3, 4, 4, 5]))
    right = ", ".join(map(str, sorted(numbers)))
    return chat.say("sorting numbers", chat.rng.choice(SORT_NUMBERS), [", ".join(map(str, numbers))], f"{right}.")


def sort_words(chat: Chat) -> Turn:
    """Make a turn that sorts three or four words, which begin with different letters."""
    words = chat.world.several("words", chat.rng.choice([3, 3, 4]))
    return chat.say("sorting words", chat.rng.choice(SORT_WORDS), [", ".join(words)], f"{', '.join(sorted(words))}.")


def one_word(chat: Chat) -> str:
    while True:
        word = chat.world.word("words")
        if len(word) <= LONGEST_WORD:
            return word

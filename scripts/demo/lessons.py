"""The training data: batches of chats, as token ids and loss weights.

A lesson is a section of the training with its own kind of chats. A part is what one thread computes of a batch.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo.chat import Chat
from scripts.demo.tasks import DRILLS, WITH_TOOLS, Task, a_turn, begin
from scripts.demo.text import END_OF_TEXT, IM_END, IM_START, make_tokenizer, render
from scripts.demo.world import World

PARTS = 2  # parts of a batch; each has its own thread
PART_TOKENS = 2048  # most tokens of a part, padding included
POOL = 2048  # chats that are drawn at once and sorted by length
CHUNK = 64  # lengths are padded to multiples of this
USER_WEIGHT = 0.05  # loss weight of tokens outside of answers


@dataclass(frozen=True)
class Lesson:
    """A section of the training: the kind of chats that this section uses."""

    turns: tuple[int, ...]  # numbers of turns, from which the length of each chat is drawn
    longest: int  # most tokens of a chat; longer chats are dropped
    system: float = 0.35  # probability that a chat has a system prompt
    tools: float = 0.35  # probability that a chat has tools
    only: dict[str, Task] | None = None  # tasks of the chats; None: all tasks


LESSONS = [
    (0.08, Lesson((2, 2, 3), 128, system=0.0, tools=0.0, only=DRILLS)),
    (0.15, Lesson((1, 1, 2, 3), 288, system=0.1, tools=1.0, only=WITH_TOOLS)),
    (0.1, Lesson((1, 2, 2, 3), 192, tools=0.45)),
    (0.26, Lesson((2, 4, 5, 6), 384, tools=0.45)),
    (0.41, Lesson((2, 4, 6, 8, 10, 12, 14, 14), 1088, tools=0.45)),
]
"""The lessons in order: (share of all training tokens, lesson)."""


def make_chat(rng: random.Random, lesson: Lesson) -> Chat:
    """Draw a chat of a lesson."""
    chat = Chat(World(rng))
    begin(chat, lesson.system, lesson.tools)
    for _ in range(rng.choice(lesson.turns)):
        chat.turns.append(a_turn(chat, lesson.only))
    return chat


def tokenizer_of_the_world() -> Tokenizer:
    """Return the tokenizer. It is always the same, because its words come from chats with fixed seeds.

    These chats draw held-out values, so that training values are not among the common words (see make_tokenizer).
    """
    texts = []
    for number in range(4000):
        chat = Chat(World(random.Random(f"words {number}"), held_out=True))
        begin(chat)
        for _ in range(8):
            chat.turns.append(a_turn(chat))
        texts.append(render(chat.messages(), chat.schemas()))
    return make_tokenizer(texts)


def weights_of(ids: list[int], assistant: int) -> list[float]:
    """Return the weight of predicting each token: 1 in an answer and at its end, else USER_WEIGHT.

    assistant: token of the role name "assistant".
    """
    weights, inside = list[float](), False
    for place, token in enumerate(ids):
        weights.append(1.0 if inside else USER_WEIGHT)
        if token == IM_END:
            inside = False
        elif place >= 2 and ids[place - 2] == IM_START and ids[place - 1] == assistant:
            inside = True
    return weights


Part = list[tuple[list[int], list[float]]]
"""The chats of a part: (token ids, weights) of each chat."""


@dataclass
class Batches:
    """Endless batches of PARTS parts. Chats are drawn in pools of POOL; chats of similar length share a batch.

    The batches of a pool depend only on the seed and the pool's number, so a training can be resumed.
    """

    tokenizer: Tokenizer
    seed: int
    pool: int = 0  # number of the current pool
    batch: int = 0  # number of the next batch in the pool

    def of(self, lesson: Lesson) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield batches. Each part is (ids int64 [B, T], weights float32 [B, T]): B chats of T tokens.

        T is a multiple of CHUNK, plus 1.
        """
        while True:
            batches = self._pool(lesson)
            while self.batch < len(batches):
                self.batch += 1
                yield [collate(part) for part in batches[self.batch - 1]]
            self.pool, self.batch = self.pool + 1, 0

    def _pool(self, lesson: Lesson) -> list[list[Part]]:
        """Draw the current pool, and return its batches in random order."""
        rng = random.Random(f"{self.seed} {self.pool}")
        assistant = self.tokenizer.token_to_id("assistant")
        assert assistant is not None
        chats = (make_chat(rng, lesson) for _ in range(POOL))
        encoded = self.tokenizer.encode_batch([render(chat.messages(), chat.schemas()) for chat in chats])
        fitting = sorted((each.ids for each in encoded if len(each.ids) <= lesson.longest), key=len)
        parts: list[Part] = [[]]
        for ids in fitting:
            if parts[-1] and (len(parts[-1]) + 1) * padded(len(ids)) > PART_TOKENS:
                parts.append([])
            parts[-1].append((ids, weights_of(ids, assistant)))
        batches = [parts[at : at + PARTS] for at in range(0, len(parts), PARTS)]
        rng.shuffle(batches)
        return batches


def padded(length: int) -> int:
    """Return the padded number of predictions in a chat of `length` tokens."""
    return -(-(length - 1) // CHUNK) * CHUNK


def collate(chats: list[tuple[list[int], list[float]]]) -> tuple[Tensor, Tensor]:
    """Pad B chats to one length T, and return them: ids int64 [B, T], weights float32 [B, T]."""
    length = padded(max(len(ids) for ids, _ in chats)) + 1
    ids = torch.tensor([ids + [END_OF_TEXT] * (length - len(ids)) for ids, _ in chats])
    weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in chats])
    return ids, weights

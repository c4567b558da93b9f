"""Exams at the end of training. One forward pass over each chat checks whether the greedy answer would be exact."""

from concurrent.futures import ThreadPoolExecutor

import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo.exams import EXAMS, LEAST, make_exam
from scripts.demo.lessons import PARTS, collate, weights_of
from scripts.demo.model import DemoModel
from scripts.demo.text import render

FIRST, LATER = 1, 12  # lengths of an exam's chats, in turns
AT_ONCE = 32  # chats in a batch
WITH_A_GOAL = 3


def examine(model: DemoModel, tokenizer: Tokenizer, count: int) -> list[tuple[str, int, int, int]]:
    """Return (exam, turns, right, total) for each exam: with the question alone, and at the end of twelve turns.

    Exams with a goal in LEAST have WITH_A_GOAL times `count` questions, for a more precise result.
    """
    results = []
    for name in EXAMS:
        total = count * WITH_A_GOAL if name in LEAST else count
        for turns in (FIRST, LATER):
            chats = [make_exam(name, number, turns) for number in range(total)]
            texts = [render(chat.messages(), chat.schemas()) for chat in chats]
            parts = [texts[at : at + AT_ONCE] for at in range(0, total, AT_ONCE)]
            with ThreadPoolExecutor(PARTS) as threads:
                right = sum(threads.map(lambda part: right_of(model, tokenizer, part), parts))
            results.append((name, len(chats[0].turns), right, total))
            print("{:<30} {:>3} turns: {} of {}".format(*results[-1]), flush=True)
    return results


@torch.inference_mode()
def right_of(model: DemoModel, tokenizer: Tokenizer, texts: list[str]) -> int:
    """Return in how many chats the model gives exactly the last answer.

    If every argmax is right under teacher forcing, greedy decoding gives the same text.
    """
    assistant = tokenizer.token_to_id("assistant")
    assert assistant is not None
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    ids, _ = collate([(each, weights_of(each, assistant)) for each in encoded])
    guesses: Tensor = model(ids[:, :-1]).argmax(-1)
    return sum(answered(ids[row], guesses[row], weights_of(each, assistant)) for row, each in enumerate(encoded))


def answered(ids: Tensor, guesses: Tensor, weights: list[float]) -> bool:
    """Return whether all tokens of the last answer were guessed right."""
    end = max(place for place, weight in enumerate(weights) if weight == 1)
    start = end
    while weights[start - 1] == 1:
        start -= 1
    return bool((ids[start : end + 1] == guesses[start - 1 : end]).all())

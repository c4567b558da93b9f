"""Drafts from a request's own text: what followed the last tokens when they stood there before.

Source: prompt lookup decoding, A. Saxena, https://github.com/apoorvumang/prompt-lookup-decoding (2023).
"""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.actors.results.chances import Chance

SHORTEST, LONGEST = 2, 4  # tokens that must be equal before the proposed ones; as many as possible are
SEARCHED, COMPARED = 2**17, 2**12  # most tokens to search, and most occurrences of the last token to compare
LENGTHS = range(SHORTEST, LONGEST + 1)
NO_PRIORS: Mapping[int, Chance] = {}
END = -1  # ends the client's prediction


class NgramDrafter:
    """Proposes what followed the latest occurrence of the last tokens, in the history or in a prediction.

    How likely proposals are right is counted for each number of equal tokens, whether or not a step has fed them.

    history: the prompt and the output so far.
    prediction: tokens that the client expects, which count as if they stood before the prompt.
    priors: the chances of all requests, by number of equal tokens.
    """

    name = "ngram"

    def __init__(
        self, history: Sequence[int], prediction: Sequence[int] = (), priors: Mapping[int, Chance] = NO_PRIORS
    ) -> None:
        self._tokens = array("i", [*prediction, END, *history])
        self._first = len(prediction) + 1  # the index in _tokens of the history's first token
        self._chances = {length: Chance(prior=priors.get(length)) for length in LENGTHS}
        self._proposed: list[int] = []  # what was proposed and has not come yet, the last token first
        self._by = SHORTEST  # how many tokens were equal

    def push(self, token: int) -> None:
        """Add a token, and count whether its proposal was right."""
        self._tokens.append(token)
        if self._proposed:
            is_right = self._proposed.pop() == token
            self._chances[self._by].add(is_right)
            if not is_right:
                self._proposed = []

    def propose(self, most: int) -> tuple[list[int], float]:
        """Return at most `most` tokens that may come next, and the chance of each, as in Proposal."""
        tokens = np.frombuffer(self._tokens, np.int32)
        skipped = max(len(tokens) - SEARCHED, 0)
        begin, equal = latest_repetition(tokens[skipped:])
        begin += skipped
        if not equal:
            self._proposed = []
            return [], 0.0
        ahead = tokens[begin : begin + most]
        if begin >= self._first and len(ahead) < most:  # the repetition reaches the end: it repeats once more
            ahead = np.resize(ahead, most)
        proposed = ahead.tolist()
        proposed = proposed[: proposed.index(END)] if END in proposed else proposed
        self._proposed, self._by = proposed[::-1], equal
        return proposed, self._chances[equal].value


def latest_repetition(tokens: NDArray[np.int32]) -> tuple[int, int]:
    """Return the index after the latest earlier occurrence of the last tokens, and their number.

    Both are 0 if fewer than SHORTEST tokens occur again. At most LONGEST are compared, and of occurrences with equally
    many tokens the latest counts. tokens: int32 [n], n > 0.
    """
    ends, equal = np.flatnonzero(tokens[:-1] == tokens[-1])[-COMPARED:], 1
    while equal < LONGEST:
        longer = ends[ends >= equal]
        longer = longer[tokens[longer - equal] == tokens[-1 - equal]] if len(longer) else longer
        if not len(longer):
            break
        ends, equal = longer, equal + 1
    return (int(ends[-1]) + 1, equal) if equal >= SHORTEST else (0, 0)

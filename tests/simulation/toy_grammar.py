"""A grammar over the hash model's vocabulary without a compiler: a hash of the output selects the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.actors.requests import Stops
from baton.models.text.grammars.errors import GrammarError
from tests.simulation.talks import VOCABULARY

WORDS = -(-VOCABULARY // 32)
MODULUS = 2**31 - 1


@dataclass(frozen=True)
class ToyGrammar:
    """A grammar that allows a few pseudo-random tokens after each output."""

    seed: int  # selects which tokens may follow
    longest: int  # an output of this length is complete
    choices: int  # the largest number of tokens that may follow
    trouble: int | None = None  # output length from which the matcher fails; None: never

    def to_text(self) -> str:
        """Return the grammar as the text that requests carry."""
        return f"{self.seed} {self.longest} {self.choices} {self.trouble if self.trouble is not None else -1}"

    @classmethod
    def read(cls, text: str) -> ToyGrammar:
        seed, longest, choices, trouble = map(int, text.split())
        return cls(seed, longest, choices, None if trouble < 0 else trouble)

    def state(self, output: Sequence[int]) -> int:
        state = self.seed
        for token in output:
            state = (state * 48271 + token + 1) % MODULUS
        return state

    def allowed(self, output: Sequence[int]) -> list[int]:
        """Return the tokens that may follow `output`, ascending; none if the output is complete."""
        if len(output) >= self.longest:
            return []
        state = self.state(output)
        return sorted({(state * (at + 7) + at * 11) % VOCABULARY for at in range(self.choices)})

    def accepts(self, output: Sequence[int]) -> bool:
        """Return whether the output may end after these tokens."""
        return len(output) >= self.longest or self.state(output) % 4 == 0

    def fails(self, output: Sequence[int]) -> bool:
        """Return whether the matcher fails after this output."""
        return self.trouble is not None and len(output) >= self.trouble


class ToyMatcher:
    """Implements models.text.grammars.matcher.GrammarMatcher."""

    def __init__(self, text: str) -> None:
        self._grammar = ToyGrammar.read(text)
        self._output: list[int] = []

    def consume(self, token: int) -> None:
        if token not in self._grammar.allowed(self._output):
            raise GrammarError(f"{token} does not follow {self._output}")
        self._output.append(token)

    def fork(self) -> ToyMatcher:
        copy = ToyMatcher(self._grammar.to_text())
        copy._output = [*self._output]
        return copy

    def accepts(self) -> bool:
        return self._grammar.accepts(self._output)

    def is_complete(self) -> bool:
        return not self._grammar.allowed(self._output)

    def mask(self) -> bytes:
        if self._grammar.fails(self._output):
            raise GrammarError("injected: the grammar is too complex")
        return pack_mask(self._grammar.allowed(self._output))


def pack_mask(allowed: Sequence[int]) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(4 * WORDS, "little")


def unpack_mask(words: bytes) -> list[int]:
    bits = int.from_bytes(words, "little")
    return [token for token in range(8 * len(words)) if bits >> token & 1]


def may_draw(grammar: ToyGrammar, output: Sequence[int], stops: Stops) -> list[int]:
    """Return the tokens that may be drawn after this output, ascending; none if the request has ended.

    The grammar's tokens may be drawn, and stop tokens too where the grammar accepts. Before min_tokens, stop tokens are
    left out unless nothing else is allowed.
    """
    ends, allowed = set(stops.token_ids), set(grammar.allowed(output))
    if not allowed or (len(output) > stops.min_tokens and output[-1] in ends):
        return []
    if len(output) < stops.min_tokens:
        return sorted(allowed - ends or allowed)
    return sorted(allowed | ends if grammar.accepts(output) else allowed)

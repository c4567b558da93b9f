"""Interfaces of what the result-processor is given: text, constraints of grammars, and drafters."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from baton.actors.requests import Request
from baton.models.text.grammars.errors import GrammarError


class TextStream(Protocol):
    """The text of an output, token by token. Text is returned as soon as later tokens can no longer change it."""

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens, and return the text that can now be shown."""
        ...

    def flush(self) -> str:
        """End the stream, and return the text that was held back."""
        ...


class Vocabulary(Protocol):
    def detokenizer(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> TextStream:
        """Return the text stream of an output. prompt_tail: the last tokens of the prompt."""
        ...


class OutputConstraint(Protocol):
    """The limits that a request's grammar sets to its output. A GrammarError from a method ends the request."""

    def consume(self, token: int) -> bool:
        """Advance by a token that does not stop the output. Return whether the output must end after it."""
        ...

    def words(self, drawn: int) -> bytes | None:
        """Return RowMask.words for the next token, after `drawn` output tokens; None if the output must end here."""
        ...

    def ahead(self, tokens: Sequence[int], drawn: int) -> list[bytes]:
        """Return RowMask.words after each of these tokens, if they were consumed, up to the first that may not be.

        Nothing is consumed, and no error ends the request.
        """
        ...


class Drafter(Protocol):
    """A source of drafts for one request, which is given every token of the request's history."""

    name: str  # the kind of drafter that made the newest proposal, for metrics

    def push(self, token: int) -> None:
        """Add a token."""
        ...

    @property
    def chance(self) -> float:
        """How likely a token is right that the model's head predicts, for any request, if those before it are."""
        ...

    def predicted(self, tokens: Sequence[int]) -> None:
        """Keep tokens that the model's head has predicted, the first of which may come next."""
        ...

    def propose(self, most: int) -> tuple[list[int], float]:
        """Return at most `most` tokens that may come next, and the chance of each, as in Proposal."""
        ...


Draft: TypeAlias = Callable[[Request, Sequence[int]], Drafter | None]  # given a request and its history
Constrain: TypeAlias = Callable[[Request, Sequence[int]], OutputConstraint]  # given a request and its output so far


def refuse_grammars(request: Request, output: Sequence[int]) -> OutputConstraint:
    """Raise GrammarError for every request: a Constrain for servers without grammars."""
    raise GrammarError("grammars are not supported here")


def no_drafts(request: Request, history: Sequence[int]) -> None:
    """Return None for every request: a Draft for servers without drafts."""

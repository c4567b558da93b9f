"""The matcher of one output, with limits on its CPU time and on white space in a row."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from baton.models.text.grammars.errors import ForbiddenToken, GrammarError, TooManyItems
from baton.models.text.grammars.explaining import explained

# CPU seconds that an output's matcher may use: an allowance at the start, and an addition for each token.
MOST_AT_ONCE, MOST_PER_TOKEN = 0.25, 0.002
FORKED = 0.004  # CPU seconds that a fork may use, for the masks after drafts, and MOST_PER_TOKEN more for each draft
# Tokens of white space in a row, after which another token follows if the grammar allows one. Texts inside strings and
# thoughts, and clients' own grammars, have no other limit of white space, and some models would write it without end.
MOST_SPACES = 64
# Parts of llguidance's messages: for a token that is not allowed, for an error of the lexer, for one of the parser.
FORBIDDEN, LEXER, ITEMS = "doesn't satisfy the grammar", "lexer error", " items"
SHOWN_TOKENS, SHOWN_CHARACTERS = 40, 60


@dataclass(frozen=True)
class ModelTokens:
    """The tokens of a model."""

    tokenizer: LLTokenizer
    mask_bytes: int  # size of a mask
    ends: int  # the mask of the tokens that end a sequence
    spaces: bytes  # the mask of the tokens that consist of white space


class CopiedMatcher:
    """A GrammarMatcher that may use `allowance` CPU seconds, and MOST_PER_TOKEN more for each token.

    on_lexer_error: called when the lexer fails, whose states all copies of a matcher share.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokens: ModelTokens,
        on_lexer_error: Callable[[], None],
        allowance: float = MOST_AT_ONCE,
    ) -> None:
        self._matcher, self._tokens, self._on_lexer_error, self._allowance = matcher, tokens, on_lexer_error, allowance
        self._latest = deque[int](maxlen=SHOWN_TOKENS)
        self._spaces = 0  # how many of the latest tokens, in a row, are white space

    def consume(self, token: int) -> None:
        began = time.thread_time()
        if not self._matcher.consume_token(token) and FORBIDDEN in self._matcher.get_error():
            raise ForbiddenToken(explained(self._matcher.get_error()))
        self._latest.append(token)
        is_space = self._tokens.spaces[token // 8] >> token % 8 & 1
        self._spaces = self._spaces + 1 if is_space else 0
        self._check()
        self._pay(began, MOST_PER_TOKEN)

    def fork(self) -> "CopiedMatcher":
        """Return a matcher at the same position, with an allowance of its own of FORKED CPU seconds."""
        copy = CopiedMatcher(self._matcher.deep_copy(), self._tokens, self._on_lexer_error, FORKED)
        copy._latest.extend(self._latest)
        copy._spaces = self._spaces
        return copy

    def accepts(self) -> bool:
        return self._matcher.is_accepting()

    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def mask(self) -> bytes:
        size = self._tokens.mask_bytes
        if self._matcher.is_stopped():
            return bytes(size)
        began = time.thread_time()
        words = self._matcher.compute_bitmask()
        self._check()
        self._pay(began, 0.0)
        allowed = int.from_bytes(words[:size], "little") & ~self._tokens.ends
        accepts = self._matcher.is_accepting()
        if self._spaces >= MOST_SPACES:
            others = allowed & ~int.from_bytes(self._tokens.spaces, "little")
            allowed = others if others or accepts else allowed
        if not allowed and not accepts:
            raise self._error("no token of this model can continue the grammar, and it cannot end here")
        return allowed.to_bytes(size, "little")

    def _check(self) -> None:
        """Raise GrammarError if the matcher reports an error."""
        if self._matcher.is_error():
            message = self._matcher.get_error()
            if LEXER in message:
                self._on_lexer_error()
            raise self._error(explained(message), TooManyItems if ITEMS in message else GrammarError)

    def _pay(self, began: float, allowed: float) -> None:
        """Charge the CPU time since `began` to the allowance, after adding `allowed` to it."""
        self._allowance += allowed - (time.thread_time() - began)
        if self._allowance < 0:
            raise self._error("the grammar is too complex: its masks take too long")

    def _error(self, problem: str, kind: type[GrammarError] = GrammarError) -> GrammarError:
        """Return the error that a problem is at this point of the output."""
        text = self._tokens.tokenizer.decode_str([*self._latest])[-SHOWN_CHARACTERS:]
        return kind(f"after {text!r}: {problem}" if self._latest else f"at the beginning: {problem}")


def check(matcher: LLMatcher) -> None:
    """Raise GrammarError if the matcher reports an error."""
    if matcher.is_error():
        raise GrammarError(explained(matcher.get_error()))

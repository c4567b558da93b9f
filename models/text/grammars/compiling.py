"""Compilation of grammars for a tokenizer, with llguidance: once per text, cached, and copied for every output."""

import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from math import inf, prod
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.models.text.grammars.checking import Checker
from baton.models.text.grammars.errors import GrammarError, TooManyItems
from baton.models.text.grammars.matcher import GrammarMatcher
from baton.models.text.grammars.matching import MOST_AT_ONCE, CopiedMatcher, ModelTokens, check

# Limits of one parser step, below llguidance's defaults: a mask must not block the event loop longer than milliseconds.
LIMITS = LLParserLimits(max_items_in_row=1050, step_lexer_fuel=50_000, max_lexer_states=100_000, verbose_errors=False)
# Limits for a part of a grammar by itself. It gets fewer items, because other parts may follow at the same place.
LIMITS_OF_A_PART = LLParserLimits(
    max_items_in_row=1000, step_lexer_fuel=50_000, max_lexer_states=100_000, verbose_errors=False
)
# CPU seconds that the first mask of a copied matcher may take, after the first mask of the original was computed.
MOST_FOR_A_COPY = 0.05
# Outputs that are tried when a grammar is compiled: their number, their length in tokens, and their CPU seconds in sum.
TRIALS, TRIAL_TOKENS, MOST_FOR_TRIALS = 4, 8, 0.1
# Bytes of the cache of compiled grammars. A grammar's size is estimated from the number of characters of its text.
KEPT_BYTES = 256 * 2**20
BYTES_OF_ONE, BYTES_PER_CHARACTER = 100_000, 160
MOST_CHARACTERS = 500_000
# multipleOf in JSON schemas: its compilation takes time that grows with the factors and with their product, and none of
# llguidance's limits bounds it.
MULTIPLES = re.compile(r'"multipleOf"\s*:\s*(-?[0-9]+(?:\.[0-9]+)?)')
ESCAPED = re.compile(r"\\u00([0-9a-fA-F]{2})")
POINTS = str.maketrans("", "", "-.")
MOST_OF_A_MULTIPLE, MOST_OF_ALL_MULTIPLES = 999, 1_000_000
ANY_SPACE = r"[ \t\r\n\f\v]+"


class Grammars:
    """The compiler and cache of grammars for one model. Safe to use from several threads.

    tokenizer: the text of tokenizer.json. Raises ValueError if llguidance cannot read it.
    known: the tokenizer's ids are below this.
    vocab_size: the number of the model's logits; ids that the tokenizer lacks are never allowed.
    eos_ids: tokens that end an output; they are in no mask.
    """

    def __init__(self, tokenizer: str, known: int, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=max(known, vocab_size), eos_token=list(eos_ids) or None)
        mask_bytes = 4 * -(-vocab_size // 32)
        ends = sum(1 << id for id in set(self._tokenizer.eos_tokens) if id < 8 * mask_bytes)
        self._tokens = ModelTokens(self._tokenizer, mask_bytes, ends, self._spaces()[:mask_bytes])
        self._checker = Checker(LIMITS_OF_A_PART)
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()  # least recently used first
        # All compiled grammars that exist: in the cache, or held by a caller.
        self._known: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()
        self._lock = threading.Lock()

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Return a matcher at the beginning of an output. Raises GrammarError if compiling the grammar fails."""
        found = self.known(grammar)
        return (found if found is not None else self.compile(grammar)).matcher()

    def compile(self, grammar: str) -> "CompiledGrammar":
        """Return a compiled grammar. Unless the grammar is `known`, compiling it may take a second.

        A grammar stays known while a caller holds the result. It is compiled again if it is no longer `usable`. Raises
        GrammarError, which says what is wrong.
        """
        found = self.known(grammar)
        return found if found is not None and found.usable else self._keep(grammar, self._compiled(grammar))

    def check(self, grammar: str) -> None:
        """Raise GrammarError if a grammar without a model's special tokens is wrong. It is not kept."""
        self._checker.check_alone(grammar)

    def known(self, grammar: str) -> "CompiledGrammar | None":
        """Return the compiled grammar if it is in the cache or a caller still holds it."""
        with self._lock:
            found = self._known.get(grammar)
            if found is not None:
                self._cache[grammar] = found
                self._cache.move_to_end(grammar)
            return found

    def _keep(self, grammar: str, compiled: "CompiledGrammar") -> "CompiledGrammar":
        with self._lock:
            other = self._known.get(grammar)
            compiled = other if other is not None and other.usable else compiled
            self._known[grammar] = self._cache[grammar] = compiled
            while len(self._cache) > 1 and sum(map(bytes_of, self._cache)) > KEPT_BYTES:
                self._cache.popitem(last=False)
            return compiled

    def _compiled(self, grammar: str) -> "CompiledGrammar":
        if len(grammar) > MOST_CHARACTERS:
            raise GrammarError(f"it has {len(grammar)} characters; at most {MOST_CHARACTERS} are supported")
        check_multiples(grammar)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        check(matcher)
        self._checker.check(grammar)
        compiled = CompiledGrammar(matcher, self._tokens)
        compiled.warm_up()
        return compiled

    def _spaces(self) -> bytes:
        """Return the mask of the tokens that consist of white space."""
        return bytes(LLMatcher(self._tokenizer, LLMatcher.grammar_from_regex(ANY_SPACE), log_level=0).compute_bitmask())


class CompiledGrammar:
    """A compiled grammar: a matcher at the beginning of an output. Each output gets a copy of the matcher."""

    def __init__(self, matcher: LLMatcher, tokens: ModelTokens) -> None:
        self._matcher, self._tokens = matcher, tokens
        self.usable = True
        """False after the lexer has failed. Copies share its states, so that a copy that uses up their number makes all
        others fail, even at the beginning of an output."""

    def matcher(self, allowance: float = MOST_AT_ONCE) -> CopiedMatcher:
        return CopiedMatcher(self._matcher.deep_copy(), self._tokens, self._fail, allowance)

    def _fail(self) -> None:
        self.usable = False

    def warm_up(self) -> None:
        """Compute the first mask, whose intermediate results all copies then share, and try a few outputs.

        Raises GrammarError if the grammar allows no output, if an output fails, or if a copy's first mask is still
        slow.
        """
        CopiedMatcher(self._matcher, self._tokens, self._fail, allowance=inf).mask()
        before = time.thread_time()
        self.matcher().mask()
        if time.thread_time() - before > MOST_FOR_A_COPY:
            raise GrammarError("it is too complex: its masks take too long")
        for number in range(TRIALS):
            if time.thread_time() - before < MOST_FOR_TRIALS:
                with suppress(TooManyItems):  # The draws are at random, so the model's output may never come there.
                    self._try_output(random.Random(number))

    def _try_output(self, rng: random.Random) -> None:
        """Follow the grammar for a few tokens, which are drawn. Raises GrammarError if that fails."""
        matcher = self.matcher(allowance=inf)
        for _ in range(TRIAL_TOKENS):
            mask = int.from_bytes(matcher.mask(), "little")
            if not mask:
                break
            first = rng.randrange(mask.bit_length())
            above = mask >> first
            matcher.consume(first + (above & -above).bit_length() - 1)


def check_multiples(grammar: str) -> None:
    """Raise GrammarError for schemas in which multipleOf has numbers with many digits, or too many numbers."""
    plain = ESCAPED.sub(lambda escaped: chr(int(escaped[1], 16)), grammar)
    digits = {found[1].translate(POINTS).strip("0")[:10] for found in MULTIPLES.finditer(plain)}
    factors = [int(each) for each in digits if each]
    if max(factors, default=1) > MOST_OF_A_MULTIPLE or prod(factors) > MOST_OF_ALL_MULTIPLES:
        raise GrammarError(
            "multipleOf: numbers with more than three significant digits are not supported, nor different ones whose"
            " digits have a product above 1,000,000"
        )


def bytes_of(grammar: str) -> int:
    """Estimate the memory that a grammar takes when it is compiled."""
    return BYTES_OF_ONE + BYTES_PER_CHARACTER * len(grammar)

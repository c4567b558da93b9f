"""Right results by the definition of the hash model: outputs and log probabilities."""

from collections.abc import Callable, Sequence

from baton.actors.requests import Sampling, TokenLogprob
from baton.models.hash_definition import MODULUS, add_entry, next_state, output_hash

VOCABULARY = 61
ANY = range(VOCABULARY)


def draw_token(state: int, fold: int, sampling: Sampling, position: int, allowed: Sequence[int] = ANY) -> int:
    """Return the token drawn at an absolute position; the greedy token if the temperature is 0."""
    noise = 0 if sampling.temperature == 0 else (sampling.seed + 1) * 40503 * (position + 1)
    return allowed[(output_hash(state, fold) + noise) % MODULUS % len(allowed)]


def oracle(
    tokens: Sequence[int],
    count: int,
    sampling: Sampling,
    paged: bool,
    allowed: Callable[[list[int]], Sequence[int]] = lambda output: ANY,
) -> list[int]:
    """Return the right continuation of `tokens`: `count` tokens, or fewer where no token is allowed any more."""
    state, fold, output = 0, 0, []
    for position in range(len(tokens) + count - 1):
        if not allowed(output):
            break
        token = tokens[position] if position < len(tokens) else output[-1]
        state = next_state(state, token, position)
        fold = add_entry(fold, state, position) if paged else 0
        if position + 1 >= len(tokens):
            output.append(draw_token(state, fold, sampling, position + 1, allowed(output)))
    return output


def right_logprobs(tokens: Sequence[int], begin: int) -> list[TokenLogprob]:
    """Return the right log probabilities of tokens[begin:]."""
    logprobs, state = [], 0
    for position, token in enumerate(tokens):
        if position >= begin:
            logprobs.append(TokenLogprob(token, float(state) if position else None, []))
        state = next_state(state, token, position)
    return logprobs


def right_pooled(tokens: Sequence[int], span: tuple[int, int]) -> bytes:
    """Return what the device reports for the pooling of tokens[begin:end]: the sum of the states after them."""
    total, state = 0, 0
    for position, token in enumerate(tokens):
        state = next_state(state, token, position)
        total += state if span[0] <= position < span[1] else 0
    return str(total).encode()

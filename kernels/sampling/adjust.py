"""What is done to logits before the draw: penalties, and biases with banned tokens. Only for rows that ask for it."""

import torch
from torch import Tensor

from baton.kernels.runtime import triton


class TokenCounts:
    """Which tokens the penalised rows have seen: one line per such row, none for the others.

    prompt_seen: bool [lines, V]; output_counts: int32 [lines, V]: 5·V bytes a line. Lines are reused, and their number
    doubles when none is free, so memory stays below twice the most penalised rows that ever ran at once.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.prompt_seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def open(self, prompt: Tensor, output: Tensor) -> int:
        """The line of a new row with these tokens (int64 [n] each). `output` is not empty where a request resumes."""
        if not self._free:
            self._grow()
        line = self._free[-1]
        self.prompt_seen[line].zero_()[prompt] = True
        counts = self.output_counts[line].zero_()
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self._free.pop()  # Now that nothing can fail.
        return line

    def add(self, lines: Tensor, tokens: Tensor) -> None:
        """Count one output token on each line, int64 [n] both: O(1) a line, in place, on the stream."""
        if triton.takes(self.output_counts):
            from baton.kernels.sampling import triton_adjust

            triton_adjust.count(self.output_counts, lines, tokens)
            return
        self.output_counts.index_put_((lines, tokens), self.output_counts.new_ones(()), accumulate=True)

    def close(self, line: int) -> None:
        """The row is gone; its line may be opened again."""
        self._free.append(line)

    def _grow(self) -> None:
        lines = len(self.prompt_seen)
        added = max(lines, 1)
        grown = [torch.cat((old, old.new_zeros(added, old.shape[1]))) for old in (self.prompt_seen, self.output_counts)]
        self.prompt_seen, self.output_counts = grown  # Both or, where memory runs out, none.
        self._free.extend(range(lines + added - 1, lines - 1, -1))


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    prompt_seen: Tensor,
    output_counts: Tensor,
    lines: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalise rows of logits, float32 [R, V], in place, as vLLM and Hugging Face define it, and return the logits.

    rows, lines: int64 [n], no row twice; the line of TokenCounts that says what a row has seen. The penalties: float32
    [n]. Repetition (> 0) divides positive and multiplies negative logits of tokens in the prompt or the output; then
    each output token costs `frequency` for every occurrence and `presence` once.
    """
    if triton.takes(logits):
        from baton.kernels.sampling import triton_adjust

        given = rows, prompt_seen, output_counts, lines, repetition, presence, frequency
        return triton_adjust.apply_penalties(logits, *given)
    before, counts, scale = logits[rows], output_counts[lines], repetition[:, None]
    in_output = counts > 0
    repeated = torch.where(before > 0, before / scale, before * scale)
    penalised = torch.where(prompt_seen[lines] | in_output, repeated, before)
    penalised.sub_(counts * frequency[:, None]).sub_(in_output * presence[:, None])
    return logits.index_copy_(0, rows, penalised)


def apply_bias(logits: Tensor, rows: Tensor, tokens: Tensor, addends: Tensor) -> Tensor:
    """Add addends[i] to logits[rows[i], tokens[i]] in place, and return the logits.

    rows, tokens: int64 [n]; addends: float32 [n], finite, or -inf to ban a token (as min_tokens bans the stop tokens).
    A token may be banned as well as biased, but not biased twice: the order of additions is not defined.
    """
    if triton.takes(logits):
        from baton.kernels.sampling import triton_adjust

        return triton_adjust.apply_bias(logits, rows, tokens, addends)
    return logits.index_put_((rows, tokens), addends, accumulate=True)

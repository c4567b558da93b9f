"""What is done to logits before the draw: penalties, and biases with banned tokens. Only for rows that ask for it."""

import torch
from torch import Tensor


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
        line = self._free.pop()
        self.prompt_seen[line].zero_()[prompt] = True
        counts = self.output_counts[line].zero_()
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return line

    def add(self, lines: Tensor, tokens: Tensor) -> None:
        """Count one output token on each line, int64 [n] both: O(1) a line, in place, on the stream."""
        self.output_counts.index_put_((lines, tokens), self.output_counts.new_ones(()), accumulate=True)

    def close(self, line: int) -> None:
        """The row is gone; its line may be opened again."""
        self._free.append(line)

    def _grow(self) -> None:
        lines = len(self.prompt_seen)
        added = max(lines, 1)
        self.prompt_seen = torch.cat((self.prompt_seen, self.prompt_seen.new_zeros(added, self.prompt_seen.shape[1])))
        self.output_counts = torch.cat(
            (self.output_counts, self.output_counts.new_zeros(added, self.output_counts.shape[1]))
        )
        self._free.extend(range(lines + added - 1, lines - 1, -1))


def apply_penalties(
    logits: Tensor,
    prompt_seen: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalised logits, a new float32 [R, V], as vLLM and Hugging Face define them; the penalties are float32 [R].

    Repetition (> 0) divides positive and multiplies negative logits of tokens in the prompt or the output; then each
    output token costs `frequency` for every occurrence and `presence` once.
    """
    in_output = output_counts > 0
    scale = repetition[:, None]
    repeated = torch.where(logits > 0, logits / scale, logits * scale)
    penalised = torch.where(prompt_seen | in_output, repeated, logits)
    return penalised.sub_(output_counts * frequency[:, None]).sub_(in_output * presence[:, None])


def apply_bias(logits: Tensor, rows: Tensor, tokens: Tensor, addends: Tensor) -> Tensor:
    """Add addends[i] to logits[rows[i], tokens[i]] in place, and return the logits.

    rows, tokens: int64 [n]; addends: float32 [n], finite, or -inf to ban a token (as min_tokens bans the stop tokens).
    """
    return logits.index_put_((rows, tokens), addends, accumulate=True)

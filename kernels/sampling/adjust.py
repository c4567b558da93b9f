"""Changes to logits before the draw: penalties, and biases with banned tokens. Only rows that request them change."""

import torch
from torch import Tensor

from baton.kernels.runtime import triton


class TokenCounts:
    """Token counts of the rows that have penalties: two tables with one line (5·V bytes in all) for each such row.

    Lines are reused. The number of lines doubles when none is free, so memory stays below twice what the largest number
    of simultaneous rows with penalties needs.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.prompt_seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # [lines, V]
        self.output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [lines, V]
        self._free: list[int] = []  # lines that belong to no row; the last one is used next

    def open(self, prompt: Tensor, output: Tensor) -> int:
        """Set a free line of both tables to the tokens of a new row, and return the line's index.

        prompt, output: int64 [n]; `output` is empty unless the request resumes.
        """
        if not self._free:
            self._grow()
        line = self._free[-1]
        self.prompt_seen[line].zero_()[prompt] = True
        counts = self.output_counts[line].zero_()
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self._free.pop()  # Removed last: a failure above (out of memory) must not lose the line.
        return line

    def add(self, lines: Tensor, tokens: Tensor, valid: Tensor | None = None) -> None:
        """Count tokens[i], an output token, on line lines[i], both int64 [n]: O(1) each, in place, in stream order.

        valid: bool [n], false for tokens that do not count; None: all count.
        """
        if valid is not None:
            self.output_counts.index_put_((lines, tokens), valid.int(), accumulate=True)
        elif triton.takes(self.output_counts):
            from baton.kernels.sampling import triton_adjust

            triton_adjust.count(self.output_counts, lines, tokens)
        else:
            self.output_counts.index_put_((lines, tokens), self.output_counts.new_ones(()), accumulate=True)

    def after(self, lines: Tensor, index: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Return prompt_seen and output_counts of each line, int64 [n], with drafts[i] counted for element index[i]."""
        counts = self.output_counts[lines]
        counts.index_put_((index, drafts), counts.new_ones(()), accumulate=True)
        return self.prompt_seen[lines], counts

    def close(self, line: int) -> None:
        """Free the line of a row that has ended."""
        self._free.append(line)

    def _grow(self) -> None:
        """Double the number of lines of both tables."""
        lines = len(self.prompt_seen)
        added = max(lines, 1)
        grown = [torch.cat((old, old.new_zeros(added, old.shape[1]))) for old in (self.prompt_seen, self.output_counts)]
        self.prompt_seen, self.output_counts = grown  # Assigned together: if memory runs out, neither table has grown.
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
    """Apply penalties to rows of logits, float32 [R, V], in place, as vLLM and Hugging Face do; return the logits.

    `repetition` (> 0) divides positive and multiplies negative logits of tokens that occur in the prompt or the output.
    Then `frequency` is subtracted for each occurrence in the output, and `presence` once.

    rows: int64 [n], the rows to penalise, all different.
    prompt_seen, output_counts: the tensors of TokenCounts.
    lines: int64 [n], each row's line in these tensors.
    repetition, presence, frequency: float32 [n].
    """
    if triton.takes(logits):
        from baton.kernels.sampling import triton_adjust

        arguments = rows, prompt_seen, output_counts, lines, repetition, presence, frequency
        return triton_adjust.apply_penalties(logits, *arguments)
    before, counts, scale = logits[rows], output_counts[lines], repetition[:, None]
    in_output = counts > 0
    repeated = torch.where(before > 0, before / scale, before * scale)
    penalised = torch.where(prompt_seen[lines] | in_output, repeated, before)
    penalised.sub_(counts * frequency[:, None]).sub_(in_output * presence[:, None])
    return logits.index_copy_(0, rows, penalised)


def apply_bias(logits: Tensor, rows: Tensor, tokens: Tensor, addends: Tensor) -> Tensor:
    """Add addends[i] to logits[rows[i], tokens[i]] in place, and return the logits, float32 [R, V].

    A token of a row may be both banned and biased, but not biased twice, because the order of additions is undefined.

    rows, tokens: int64 [n].
    addends: float32 [n], finite, or -inf to ban a token (as min_tokens bans the stop tokens).
    """
    if triton.takes(logits):
        from baton.kernels.sampling import triton_adjust

        return triton_adjust.apply_bias(logits, rows, tokens, addends)
    return logits.index_put_((rows, tokens), addends, accumulate=True)

"""Run transformers' `generate` over one static batch, greedily.

run_transformers.py CHECKPOINT THREADS auto|float32
"""

import os
import sys
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

if TYPE_CHECKING:
    from scripts.benchmarks.peers.serve_lines import Answer, serve
else:  # Run as a script, so that the folder of this file is in sys.path.
    from serve_lines import Answer, serve


class Stamps:
    """A streamer that notes when tokens arrive. put() is called with the prompts, then with one token per row."""

    def __init__(self, rows: int) -> None:
        self.answer = Answer(rows)
        self._prompts_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompts_seen:
            for row, token in enumerate(value.tolist()):
                self.answer.add(row, [token])
        self._prompts_seen = True

    def end(self) -> None:
        pass


class Loop:
    """A model of transformers and its `generate`."""

    def __init__(self, checkpoint: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        self._model: Any = model.eval()

    def generate(self, prompts: list[list[int]], tokens: int) -> Answer:
        """Generate for one static batch, shorter prompts padded on the left."""
        stamps, width = Stamps(len(prompts)), max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=mask, do_sample=False, streamer=stamps, **length)
        return stamps.answer


if __name__ == "__main__":
    serve(Loop(sys.argv[1], int(sys.argv[2]), sys.argv[3]).generate)

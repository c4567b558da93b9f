"""Run llama.cpp through its low-level API, greedily.

    run_llama_cpp.py GGUF THREADS ROWS

Prompts are read one after another, in batches of 512 tokens; then all rows decode in one batch.
"""

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np

if TYPE_CHECKING:
    from scripts.benchmarks.peers.serve_lines import Answer, serve
else:  # Run as a script, so that the folder of this file is in sys.path.
    from serve_lines import Answer, serve

UBATCH, MOST_TOKENS = 512, 8192


class Context:
    """A llama.cpp context for up to `rows` sequences."""

    def __init__(self, file: str, threads: int, rows: int) -> None:
        llama_cpp.llama_backend_init()
        model_settings = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(str(Path(file)).encode(), model_settings)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = MOST_TOKENS * rows
        settings.n_batch = settings.n_ubatch = UBATCH
        settings.n_seq_max = rows
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(UBATCH, 0, 1)

    def generate(self, prompts: list[list[int]], tokens: int) -> Answer:
        llama_cpp.llama_memory_clear(self._memory, True)
        answer, last = Answer(len(prompts)), list[int]()
        for row, prompt in enumerate(prompts):
            for start in range(0, len(prompt), UBATCH):
                chunk = prompt[start : start + UBATCH]
                ends = start + len(chunk) == len(prompt)
                entries = [(token, start + i, row, ends and i == len(chunk) - 1) for i, token in enumerate(chunk)]
                found = self._decode(entries)
            last.append(found[0])
            answer.add(row, found)
        for step in range(tokens - 1):
            last = self._decode([(last[row], len(prompt) + step, row, True) for row, prompt in enumerate(prompts)])
            for row, token in enumerate(last):
                answer.add(row, [token])
        return answer

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run a batch of (token, position, row, has_logits). Return the likeliest next token for each has_logits."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, position, row, has_logits) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = has_logits
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {code}")
        return [self._likeliest(index) for index, entry in enumerate(entries) if entry[3]]

    def _likeliest(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, (self._vocabulary,)).argmax())


if __name__ == "__main__":
    serve(Context(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).generate)

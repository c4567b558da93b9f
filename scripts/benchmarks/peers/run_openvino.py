"""Run OpenVINO's continuous batching, greedily.

    run_openvino.py FOLDER THREADS ROWS f32|bf16

Prefix caching stays on: without it the pipeline loses the recurrent states when it decodes.
"""

import sys
from typing import TYPE_CHECKING

import numpy as np
import openvino
import openvino_genai

if TYPE_CHECKING:
    from scripts.benchmarks.peers.serve_lines import Answer, serve
else:  # Run as a script, so that the folder of this file is in sys.path.
    from serve_lines import Answer, serve

STEP_TOKENS, CACHE_GB = 512, 2
# OpenVINO requires an end-of-sequence token. No vocabulary has this token, so that it never ends an answer.
NO_TOKEN = 2**31 - 1


class Pipeline:
    """A pipeline of up to `rows` requests in one batch."""

    def __init__(self, folder: str, threads: int, rows: int, precision: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = rows
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings)
        self._next_id = 0

    def generate(self, prompts: list[list[int]], tokens: int) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        config.set_eos_token_id(NO_TOKEN)
        answer, handles = Answer(len(prompts)), []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._next_id, ids, config))
            self._next_id += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for row, handle in enumerate(handles):
                while handle.can_read():
                    [output] = handle.read().values()
                    answer.add(row, list(output.generated_ids))
        return answer


if __name__ == "__main__":
    serve(Pipeline(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]).generate)

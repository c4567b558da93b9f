"""Run Baton's bare loop over one static batch, without a server.

run_bare.py CHECKPOINT THREADS ROWS STEP_TOKENS
"""

import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from baton.api.machine.threads import spin_briefly

spin_briefly()

import torch  # noqa: E402

from baton.kernels.runtime.cpp.prepare import prepare  # noqa: E402
from baton.models.loading.checkpoint import load_model  # noqa: E402
from scripts.benchmarks.common.bare import Bare  # noqa: E402
from scripts.benchmarks.peers.serve_lines import Answer, serve  # noqa: E402


class Loop:
    """Baton's bare loop (common/bare.py), run in a peer's process."""

    def __init__(self, checkpoint: str, threads: int, rows: int, step_tokens: int) -> None:
        torch.set_num_threads(threads)
        prepare().install(threads)
        self._bare = Bare(load_model(Path(checkpoint), None, torch.device("cpu")), rows, step_tokens)

    def generate(self, prompts: list[list[int]], tokens: int) -> Answer:
        answer = Answer(len(prompts))
        for drawn in islice(self._bare.generate(prompts), tokens):
            for row, token in enumerate(drawn.tolist()):
                answer.add(row, [token])
        return answer


if __name__ == "__main__":
    serve(Loop(sys.argv[1], *map(int, sys.argv[2:])).generate)

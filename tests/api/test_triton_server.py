"""A whole server on Triton's kernels, in their interpreter: the same tokens as from a default server here."""

from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.common.shapes import checkpoint_of
from tests.api.server_process import SERVE, ServerProcess
from tests.models.oracle import CHECKPOINTS

PROMPT = [(5 * i * i + 3 * i) % 500 for i in range(80)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, config = CHECKPOINTS["granitemoehybrid-rope"]
    return checkpoint_of(
        {"model_type": "granitemoehybrid", "vocab_size": 512, "torch_dtype": "float32", **config},
        tmp_path_factory.mktemp("hybrid"),
    )


def tell(checkpoint: Path, **variables: str) -> list[tuple[list[int], int]]:
    """Return (answer, cached tokens) of a prompt, its repetition, two turns of a session, and a fork of the session."""
    arguments = (*SERVE, str(checkpoint), "--max-running", "4", "--max-model-len", "256", "--memory", "64M")
    with ServerProcess(arguments, variables=variables, patience_s=300) as server:

        def generate(tokens: list[int], **more: Any) -> tuple[list[int], int]:
            body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 4}, **more}
            status, answer = server.post("/generate", body)
            assert status == 200, answer
            rids.append(answer["meta_info"]["id"])
            return answer["output_ids"], answer["meta_info"]["cached_tokens"]

        is_interpreted = any(line["event"] == "Triton" and line["interpreted"] for line in server.log)
        assert is_interpreted == ("TRITON_INTERPRET" in variables)
        rids = list[str]()
        alone = [generate(PROMPT), generate(PROMPT), generate([*PROMPT, 7, 8, 9])]
        server.post("/open_session", {"capacity_of_str_len": 1000, "session_id": "a"})
        turns = [generate(PROMPT[:40], session_params={"id": "a"})]
        turns += [generate(more, session_params={"id": "a", "rid": rids[3]}) for more in ([1, 2], [3])]
        return alone + turns


def test_the_same_tokens_cold_and_cached_and_in_sessions(checkpoint: Path) -> None:
    expected, found = tell(checkpoint), tell(checkpoint, TRITON_INTERPRET="1")
    assert found == expected
    (cold, none), (again, cached), *_ = found
    assert cold == again and none == 0 < cached

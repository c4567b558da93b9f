"""--quantize in a server: it is reported, gives the same tokens in native code and torch, and has states of its own."""

from pathlib import Path
from typing import Any

from tests.api.machine.test_machine import MEMORY, answer_of
from tests.api.server_process import SERVE, ServerProcess

OPTIONS = (*MEMORY, "--dtype", "float32")


def test_native_code_and_torch_answer_alike() -> None:
    answers = []
    for kernels in ("native", "torch"):
        with ServerProcess([*SERVE, *OPTIONS, "--quantize", "int8", "--kernels", kernels]) as server:
            answers.append(answer_of(server))
            info = server.get("/model_info")
            assert server.get("/server_info")["options"]["quantize"] == "int8"
        assert info["quantize"] == "int8"
        assert 2_500_000 < info["weight_bytes"] < 3_200_000
    assert "19" in answers[0]
    assert answers[0] == answers[1]


def test_a_state_of_other_weights_is_not_resumed(tmp_path: Path) -> None:
    """A session whose state was computed with other weights continues from its tokens."""
    session, resumed = "", list[Any]()
    for quantize in ("none", "int8", "int8", "int4", "none"):
        options = ("--session-dir", str(tmp_path), "--kernels", "torch", "--quantize", quantize)
        with ServerProcess([*SERVE, *OPTIONS, *options]) as server:
            if not session:
                session = server.post("/v1/sessions", {})[1]["id"]
            turn = {"text": "My name is Clara.", "max_tokens": 8}
            status, answer = server.post(f"/v1/sessions/{session}/turns", turn)
            assert status == 200
            resumed.append(answer["resumed_from"])
    assert resumed[1:] == ["tokens", "disk", "tokens", "tokens"]

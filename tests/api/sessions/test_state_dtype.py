"""A server with another --state-dtype than the states of its folder: the session continues from its tokens."""

from pathlib import Path
from typing import Any

from tests.api.server_process import SERVE, ServerProcess


def say(server: ServerProcess, session: str, text: str) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "temperature": 0}
    status, answer = server.post(f"/v1/sessions/{session}/turns", body)
    assert status == 200
    return answer


def test_states_of_another_type_are_not_loaded(tmp_path: Path) -> None:
    options = [*SERVE, "--memory", "64M", "--session-dir", str(tmp_path)]
    with ServerProcess([*options, "--state-dtype", "bfloat16"]) as server:
        session = server.post("/v1/sessions", {})[1]["id"]
        say(server, session, "My name is Clara.")
    with ServerProcess([*options, "--state-dtype", "bfloat16"]) as server:
        assert server.get("/server_info")["options"]["state_dtype"] == "bfloat16"
        again = say(server, session, "Hi!")
        assert again["resumed_from"] == "disk"
    with ServerProcess([*options, "--state-dtype", "float32"]) as server:
        line = server.wait_for("a state file is of no use and was deleted")
        assert line["error"] == "it is of another model, or of another --state-dtype"
        answer = say(server, session, "What is my name?")
        assert (answer["resumed_from"], answer["text"]) == ("tokens", "Your name is Clara.")

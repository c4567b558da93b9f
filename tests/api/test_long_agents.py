"""Forty steps of an agent with 20,000 tokens of tools and results: how many tokens are computed again."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted import make_checkpoint
from tests.api.server_process import ServerProcess

STEPS = 40
EVERY = 5
RESULT = "result " * 70
THOUGHT = "<think>\nI think about what to do next, and why.\n</think>\n\n"
TOOLS = [
    {"type": "function", "function": {"name": f"tool_{index}", "description": "What it does. " * 15}}
    for index in range(10)
]


def replies() -> list[str]:
    return [
        f'{THOUGHT}<tool_call>\n{{"name": "tool_{step % 10}", "arguments": {{"step": {step}}}}}\n</tool_call>'
        for step in range(STEPS)
    ]


@pytest.mark.soak
@pytest.mark.parametrize("dropped", ["never", "by the client", "by the template"])
def test_an_agent_of_forty_steps_computes_what_is_new(tmp_path: Path, dropped: str) -> None:
    """A step computes the new result and an answer's header, and also the last call if no state after it can be used.

    If the template drops earlier reasoning, each question also computes everything since the previous question.
    """
    folder = make_checkpoint(tmp_path, replies())
    messages: list[Any] = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Go."}]
    prompts, cached = [], []
    with ServerProcess(["tests.api.scripted_server", str(folder)]) as server:
        for step in range(STEPS):
            status, answer = server.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
            assert status == 200, answer
            message = answer["choices"][0]["message"]
            if dropped == "by the client":
                message.pop("reasoning_content")
            [call] = message["tool_calls"]
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]
            if dropped == "by the template" and step % EVERY == EVERY - 1:
                messages.append({"role": "user", "content": "Go on."})
            prompts.append(answer["usage"]["prompt_tokens"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert prompts[-1] > 20_000
    new = [prompt - known for prompt, known in zip(prompts[1:], cached[1:], strict=True)]
    share = sum(cached) / sum(prompts)
    print(f"reasoning dropped {dropped}: {share:.1%} of the prompts reused, at most {max(new)} tokens new a step")
    answer_length = 0 if dropped == "never" else len(replies()[0]) - len(THOUGHT)
    again = EVERY if dropped == "by the template" else 1
    assert max(new) < again * (answer_length + len(RESULT) + 100)
    assert share > (0.9 if dropped == "by the template" else 0.95)

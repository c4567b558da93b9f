"""The clients of OpenAI, Anthropic and SGLang against a router with two prefill and two decode engines."""

from tests.api.routing.test_clients import run_tests

PATHS = (
    "openai/test_openai.py", "responses/test_responses.py", "responses/test_websocket.py",
    "anthropic/test_messages.py", "sglang/test_sessions.py",
)  # fmt: skip


def test_only_decode_engines_answer_clients() -> None:
    """A prefill engine of these tests fails if it is sent a request."""
    run_tests(PATHS, "prefill,prefill,decode,decode")

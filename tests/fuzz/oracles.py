"""Checks on every answer, and on the server after all requests have been answered."""

import json
from collections.abc import Iterator
from typing import Any

import aiohttp

from baton.models.hash_definition import expected_output
from tests.fuzz.client import Answer
from tests.fuzz.ranges import MAX_TOP
from tests.fuzz.requests import NO_METHOD, FuzzRequest
from tests.fuzz.server import MAX_MODEL_LEN, SESSION_CAP, RunningServer
from tests.fuzz.shapes import BUNDLED_VOCAB, VOCAB

ALLOWED_5XX = (503, 507, 529)
DETAIL = {"message", "type", "param", "code"}
MESSAGES_DETAIL = {"message", "type"}
ENDS = {"stop", "length", "abort"}
# Counters of failures that no client should be able to cause.
WHOLE_COUNTERS = ("rows_failed", "restarts", "lease_violations")
LASTING = {"ended", "counters", "log", "numbers"}  # findings of `astray` that waiting cannot remove
NEUTRAL = {
    "logit_bias": {},
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_new_tokens": 0,
}  # parameters of /generate that leave greedy tokens unchanged at these values


def complaint(request: FuzzRequest, answer: Answer | None, exact: bool) -> str | None:
    """Return what is wrong with the answer, or None.

    exact: whether the server runs the hash model, whose tokens can be predicted
    """
    if answer is None:
        return None
    if answer.status == 0 and request.method == NO_METHOD:
        return None  # The request is not HTTP: the server may close the connection before it reads the body.
    if answer.status <= 0:
        return f"the answer cannot be read: {answer.body.decode(errors='replace') or 'the connection was closed'}"
    if answer.status >= 500 and answer.status not in ALLOWED_5XX:
        return f"status {answer.status}: {answer.body[:500].decode(errors='replace')}"
    try:
        if answer.status == 400 and "x-request-id" not in answer.headers:
            return None  # The request is not HTTP. aiohttp itself answers it, without our headers.
        if answer.status >= 400:
            return None if request.method == "HEAD" else wrong_error(json.loads(answer.body), "the body")
        if request.event:
            return next(wrong_events(answer.events), None)
        return wrong_content(request, answer, exact)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return f"status {answer.status}, and the answer is not in its form ({error!r}): {answer.body[:500]!r}"


def wrong_error(body: Any, where: str) -> str | None:
    """Return what is wrong with an error object, or None.

    OpenAI's error object has a message, a type, a param and a code; param and code may be null. Anthropic's has a
    message and a type.
    """
    detail = body.get("error") if isinstance(body, dict) else None
    if isinstance(detail, dict) and "request_id" in body:
        return wrong_message_error(body, detail)
    if not isinstance(detail, dict) or set(detail) != DETAIL:
        return f"{where} is not an error object: {str(body)[:500]}"
    texts = [detail["message"], detail["type"]]
    if not all(isinstance(text, str) and text for text in texts):
        return f"message and type of the error are not texts: {detail}"
    if not all(isinstance(detail[name], str | None) for name in ("param", "code")):
        return f"param and code of the error are neither text nor null: {detail}"
    return "an error of the server: " + detail["message"] if detail["type"] == "server_error" else None


def wrong_message_error(body: dict[str, Any], detail: dict[str, Any]) -> str | None:
    if (
        body["type"] != "error"
        or set(detail) != MESSAGES_DETAIL
        or not all(isinstance(v, str) for v in detail.values())
    ):
        return f"not an error in Anthropic's form: {str(body)[:500]}"
    return "an error of the server: " + detail["message"] if detail["type"] == "api_error" else None


def wrong_content(request: FuzzRequest, answer: Answer, exact: bool) -> str | None:
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        return next(wrong_events(sse_events(answer.body)), None)
    if not kind.startswith("application/json") or not answer.body:
        return None
    body = json.loads(answer.body, parse_constant=refuse_constant)
    return next(wrong_answer(request, body, exact), None) if isinstance(body, dict | list) else None


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} in JSON")


def sse_events(body: bytes) -> list[dict[str, Any]]:
    """Return the data of each event. Raises ValueError if the stream is cut off."""
    if not body.endswith(b"\n\n"):
        raise ValueError("the stream is cut off")
    lines = [line for block in body.split(b"\n\n") for line in block.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line[6:], parse_constant=refuse_constant) for line in lines if line != b"data: [DONE]"]


def wrong_events(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        detail = event.get("error")
        response = event.get("response")
        if isinstance(response, dict):
            detail = detail or response["error"]
            if detail and detail["code"] == "internal_error":
                yield f"a response failed: {detail}"
        elif detail is not None and (wrong := wrong_error(event, "an event")):
            yield wrong


def wrong_answer(request: FuzzRequest, body: dict[str, Any] | list[Any], exact: bool) -> Iterator[str]:
    """Yield each part of the answer that would be wrong from any endpoint."""
    for item in walk(body):
        if (
            item.get("finish_reason") is not None
            and isinstance(item["finish_reason"], str)
            and item["finish_reason"] not in ENDS
        ):
            yield f"finish_reason {item['finish_reason']!r}"
        if any(not 0 <= id < (VOCAB if exact else BUNDLED_VOCAB) for id in item.get("output_ids", ())):
            yield "an output id that is no token"
        if request.path == "/v1/chat/completions" and len(item.get("top_logprobs") or ()) > MAX_TOP:
            yield "more alternatives than may be asked for"
    fields = read(request)
    if fields is not None and isinstance(body, dict):
        yield from too_short(request, fields, body)
        yield from wrong_tokens(request, fields, body) if exact else ()


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(item, dict | list):
            yield from walk(item)


def read(request: FuzzRequest) -> dict[str, Any] | None:
    """Return the fields of a request, or None if its body is not a plain JSON object."""
    if any(name == b"Content-Encoding" for name, _ in request.headers):
        return None
    try:
        fields = json.loads(request.body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def too_short(request: FuzzRequest, fields: dict[str, Any], body: dict[str, Any]) -> Iterator[str]:
    """Yield a complaint if an answer has fewer tokens than min_tokens although the context was not full."""
    usage, least = body.get("usage"), fields.get("min_tokens")
    if not (isinstance(usage, dict) and isinstance(least, int) and fields.get("n") in (None, 1)):
        return
    if not ("choices" in body or request.path.endswith("/turns")) or len(body.get("choices", [0])) != 1:
        return
    ended = body["choices"][0]["finish_reason"] if "choices" in body else body["finish_reason"]
    count = usage["completion_tokens"]
    if ended == "length" and 0 < count < least and usage["prompt_tokens"] + count < MAX_MODEL_LEN:
        yield f"{count} tokens, though min_tokens is {least}"


def wrong_tokens(request: FuzzRequest, fields: dict[str, Any], body: dict[str, Any]) -> Iterator[str]:
    """Yield a complaint if greedy tokens of the hash model differ from the expected ones."""
    params, prompt = fields.get("sampling_params"), fields.get("input_ids")
    if request.path != "/generate" or not isinstance(params, dict) or params.get("temperature") != 0:
        return
    if (
        fields.get("session_params")
        or not prompt
        or any(params.get(name) not in (None, value) for name, value in NEUTRAL.items())
    ):
        return
    tokens = body["output_ids"]
    if tokens != expected_output(prompt, len(tokens), VOCAB):
        yield f"other tokens than the model's: {tokens}"


async def astray(server: RunningServer) -> dict[str, Any]:
    """Return the findings about a server without open requests. Keys in LASTING do not go away with time."""
    if server.task.done():
        return {"ended": server.task}
    try:
        info = await server.get("/server_info")
        sessions = (await server.get("/v1/sessions"))["data"]
    except (OSError, aiohttp.ClientError) as error:
        return {"ended": repr(error)}
    slots, pages = info["gauges"]["slots"], info["gauges"]["pages"]
    lost = {name: info["counters"][name] for name in WHOLE_COUNTERS if info["counters"].get(name)}
    busy = [each["id"] for each in sessions if each["status"] != "idle"]
    wrong = {
        "open requests": info["open_requests"],
        "audit": info["audit"],
        "slots astray": sum(slots.values()) - slots["free"] - slots["cached"],
        "pages astray": pages["used"],
        "counters": lost,
        "sessions beyond the cap": max(info["sessions"]["open"] - SESSION_CAP, 0),
        "responses that run": info["responses"]["running"],
        "sessions in a turn": busy,
        "log": server.troubles(),
        "numbers": server.wrong_numbers,
    }
    return {name: value for name, value in wrong.items() if value}

"""`baton chat`: a terminal chat over /v1/chat/completions. The history is kept here."""

import json
import sys
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

HELP = "/new begins anew, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."
TIMEOUT_S = 600


class ChatError(Exception):
    """The server cannot be reached, or refused; the message says why."""


def chat(
    url: str,
    api_key: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> int:
    """Read turns from standard input and print the answers as they come. Returns the exit code."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        model = fetch_model(url, api_key)
    except ChatError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    print(f"{model} at {url}. {HELP}")
    start = [{"role": "system", "content": system}] if system else []
    history = list(start)
    settings = {"temperature": temperature, "max_tokens": max_tokens}
    while (line := read_line()) is not None:
        if line == "/quit":
            break
        if line == "/new":
            history = list(start)
        elif line.startswith("/"):
            print(HELP)
        elif line:
            body = {"model": model, "messages": [*history, {"role": "user", "content": line}], "stream": True}
            body |= {name: value for name, value in settings.items() if value is not None}
            answer = answer_turn(url, api_key, body)
            if answer is not None:
                history += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]
    return 0


def read_line() -> str | None:
    """One trimmed line of input; None at its end."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def answer_turn(url: str, api_key: str | None, body: dict[str, Any]) -> str | None:
    """Stream one answer to the terminal; what was printed of it, or None if the server refused."""
    parts: list[str] = []
    try:
        for text in stream_answer(url, api_key, body):
            parts.append(text)
            print(printable(text), end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except ChatError as error:
        print(f"baton: {error}", file=sys.stderr)
        return "".join(parts) or None
    print()
    return "".join(parts)


def printable(text: str) -> str:
    """Without control characters: a model's answer must not drive the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)


def stream_answer(url: str, api_key: str | None, body: dict[str, Any]) -> Iterator[str]:
    with call(f"{url}/v1/chat/completions", api_key, body) as response:
        try:
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ChatError(event["error"]["message"])
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text
        except OSError as error:
            raise ChatError(f"the connection broke: {error}") from None


def fetch_model(url: str, api_key: str | None) -> str:
    with call(f"{url}/v1/models", api_key) as response:
        return str(json.load(response)["data"][0]["id"])


def call(url: str, api_key: str | None, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        request = Request(url, json.dumps(body).encode() if body else None, headers)
        return urlopen(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        raise ChatError(reason(error)) from None
    except (URLError, OSError, ValueError) as error:
        raise ChatError(f"cannot reach {url}: {getattr(error, 'reason', error)}") from None


def reason(error: HTTPError) -> str:
    """The message in an error object, else the status line."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"

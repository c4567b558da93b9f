"""A fake ring: it answers Submit with a fixed text, one token at a time, so that the api can be tested alone."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import Any

from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from baton.actors import tokens
from baton.actors.actor import Address
from baton.actors.messages import (
    Abort,
    Continue,
    Delta,
    Drain,
    Drained,
    Ended,
    Flush,
    Flushed,
    Kept,
    Message,
    Name,
    Pause,
    Paused,
    Submit,
    Suspend,
    Suspended,
    Unname,
)
from baton.actors.requests import EndReason, Hit, MissReason, Output, Request, TokenLogprob
from baton.actors.runtime.timings import Timings
from baton.api.app import make_app
from baton.api.config import Config
from baton.api.connections.registry import CONNECTIONS
from baton.api.generation.gateway import Gateway
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import GrammarCompiler, no_grammars
from baton.api.responses.store import RESPONSES, ResponseStore
from baton.api.server import Server
from baton.api.sessions.store import SESSIONS, SessionStore
from baton.api.telemetry.metrics import Metrics
from baton.models.text.formats.hermes import HERMES
from baton.models.text.formats.picking import OutputFormats
from baton.models.text.formats.thinking import THINK
from baton.models.text.grammars.compiling import Grammars
from baton.models.text.template import Beginning
from tests.api.through_router import THROUGH_ROUTER, roles_of, router_of, together

EOS = 256
VOCAB = 260
HIDDEN = 4  # numbers of an embedding
NO_FORMATS = OutputFormats()
Client = TestClient[web.Request, web.Application]
AGENT = OutputFormats(HERMES, THINK)


class FakeText:
    """A tokenizer and chat template whose tokens are bytes; token 256 ends a text.

    Tool calls are in Hermes' format, reasoning is in <think>.
    """

    has_chat_template = True
    added_tokens = frozenset({"</s>"})
    templates = {"default": "{{ tool_calls }}"}  # noqa: RUF012
    template_variables = frozenset({"messages", "tools", "enable_thinking", "begun"})
    eos_ids = (EOS,)
    max_token_bytes: int | None = None
    kept_reasoning = None
    between_parts = ""

    def __init__(self) -> None:
        self.generation_defaults: dict[str, Any] = {}
        # Many checkpoints have this model_max_length, an integer of more than 64 bits.
        self.tokenizer_info = {"tokenizer_class": "Bytes", "chat_template": "{{ é }}", "model_max_length": int(1e30)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> tuple[list[int], list[int]]:
        ids = list(f"tools:{json.dumps(variables['tools'])}\n".encode()) if variables.get("tools") else []
        ends: list[int] = []
        for message in messages:
            if message["content"] == "refuse me":
                raise ValueError("roles must alternate")
            ids += f"{message['role']}:{shown(message)}\n".encode()
            ends.append(len(ids))
        if continue_final_message:
            return ids[:-1], ends[:-1]
        begun = "<think>" if variables.get("begun") or variables.get("enable_thinking") else ""
        return ids + list(f"assistant:{begun}".encode() if add_generation_prompt else b""), ends

    def encode_marked_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        beginnings: Sequence[Beginning],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        salt: str = "",
        **variables: Any,
    ) -> tuple[list[int], list[int], list[int]]:
        ids, ends = self.encode_chat(messages, add_generation_prompt, continue_final_message, **variables)
        parts = [self.encode_chat(each.messages, False, **{**variables, **each.variables})[0] for each in beginnings]
        shared = [takewhile(lambda pair: pair[0] == pair[1], zip(part, ids, strict=False)) for part in parts]
        return ids, ends, sorted({len(list(pairs)) for pairs in shared})

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = bytes(i for i in ids if i < 256).decode(errors="replace")
        return text + ("" if skip_special_tokens else "</s>" * sum(i >= 256 for i in ids))

    def token_bytes(self, id: int) -> bytes | None:
        return bytes([id]) if id < 256 else None


def shown(message: Mapping[str, Any]) -> str:
    thought = message.get("reasoning_content")
    calls = [
        f'<tool_call>{{"name": "{call["function"]["name"]}", "arguments": {json.dumps(call["function"]["arguments"])}}}'
        "</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    return "".join([f"<think>{thought}</think>" if thought else "", message["content"], *calls])


class FakeRing:
    """A ring without actors: it records the api's messages, and its attributes decide how it answers.

    It may answer several engines. Then it sends its replies to the gateway that has asked, and other messages to all.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.sent: list[Message] = []  # all messages from the api, in order
        self.reply = "Hello, wörld."
        self.held_names = False  # if true, Name gets no answer
        self.held = False  # if true, requests wait until `release` is called
        self.cached = 0
        self.miss_reason: MissReason = ""
        self.refusal: EndReason | None = None  # if set, every Submit ends at once for this reason
        self.failing = False
        self.pause = 0.0
        self.open: dict[str, Request] = {}
        self._gateways = [gateway]
        self._asking = dict[str, Gateway]()  # the gateway of each open request
        self._sent = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        gateway.bind(self.send)

    def join(self, gateway: Gateway) -> None:
        """Answer a further engine too."""
        self._gateways.append(gateway)
        gateway.bind(partial(self.send, gateway=gateway))

    def send(self, to: Address, message: Message, gateway: Gateway | None = None) -> None:
        gateway = gateway or self._gateways[0]
        self.sent.append(message)
        self._sent.set()
        loop = asyncio.get_running_loop()

        def reply(message: Message) -> None:
            loop.call_soon(self.deliver, message, gateway)

        match message:
            case Submit(request):
                assert to == "scheduler"
                if self.refusal is not None:
                    reply(Ended(request.id, self.refusal, f"ended: {self.refusal}"))
                    return
                self.open[request.id], self._asking[request.id] = request, gateway
                if not self.held:
                    self._start(request)
            case Abort(id):
                if id in self.open:
                    loop.call_soon(self.finish, id)
            case Flush(ticket):
                assert to == "cache"
                reply(Flushed(ticket))
            case Pause(ticket):
                assert to == "scheduler"
                reply(Paused(ticket))
            case Continue():
                assert to == "scheduler"
            case Name(session, ticket=ticket):
                assert to == "cache"
                if not self.held_names:
                    reply(Kept(session, "tokens", 0, ticket))
            case Unname():
                assert to == "cache"
            case Suspend(ticket):
                assert to == "cache"
                reply(Suspended(ticket, "host", 5))
            case Drain():
                reply(Drained([]))
            case _:
                raise AssertionError(message)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` is true, checking it after each message."""
        async with asyncio.timeout(10):
            while not condition():
                self._sent.clear()
                await self._sent.wait()

    def release(self) -> None:
        self.held = False
        for request in list(self.open.values()):
            self._start(request)

    def submitted(self) -> list[Request]:
        return [message.request for message in self.sent if isinstance(message, Submit)]

    def aborted(self) -> list[str]:
        return [message.request for message in self.sent if isinstance(message, Abort)]

    def finish(self, id: str) -> None:
        request = self.open.pop(id, None)
        if request is not None:
            ended = Output(id, "", b"", request.prompt_len, 0, "abort", "aborted", hit=Hit(self.cached))
            self.deliver(Delta([ended]), self._asking[id])

    def deliver(self, message: Message, gateway: Gateway | None = None) -> None:
        """Deliver a message to a gateway, or to all."""
        for each in [gateway] if gateway is not None else self._gateways:
            each.receive(message)
            each.act()

    def _start(self, request: Request) -> None:
        task = asyncio.ensure_future(self._play(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, request: Request) -> None:
        """Send the reply, one character per message. The tokens are the character's bytes; EOS ends the reply."""
        hit = Hit(self.cached, miss_reason=self.miss_reason)
        first = Output(request.id, "", b"", request.prompt_len, 0, hit=hit)
        gateway = self._asking[request.id]
        self.deliver(Delta([first]), gateway)
        count = 0
        prompt_logprobs = prompt_items(request)
        for letter in [*self.reply, ""]:
            await asyncio.sleep(self.pause)
            if request.id not in self.open:
                return
            ids = (list(letter.encode()) or [EOS])[: request.stops.max_tokens - count]
            count += len(ids)
            ended = EOS in ids and EOS in request.stops.token_ids
            full = count >= request.stops.max_tokens
            finish = "error" if self.failing else "stop" if ended else "length" if full or not letter else None
            output = Output(
                request.id, letter, tokens.pack(ids), request.prompt_len, count, finish,
                EOS if ended else None, items(request, ids), prompt_logprobs, hit, pooled=pooled_of(request, count),
            )  # fmt: skip
            prompt_logprobs = []
            if finish is not None:
                del self.open[request.id]
            self.deliver(Delta([output]), gateway)
            if finish is not None:
                return

    # Figures that a real relay reports

    def watch_states(self) -> None:
        """Return None: this ring has no states."""

    def unwatch_states(self) -> None:
        pass

    def token_seconds(self) -> float:
        return 0.0

    def step_seconds(self) -> float:
        return 0.0

    def running_rows(self) -> int:
        return len(self.open)

    def ended_rows(self) -> int:
        return 0

    def slots_by_use(self) -> dict[str, int]:
        return {}

    def counters(self) -> dict[str, int]:
        return {"checkpoints_missed": 3, "generation_tokens": 7}

    @property
    def timings(self) -> Timings:
        timings = Timings()
        timings.waits["cache"].observe(2e-5)
        timings.busy["cache"] += 0.5
        return timings

    def lease_moves(self) -> Mapping[str, int]:
        return {"take": 5, "free": 4}

    def gauges(self) -> dict[str, float | Mapping[str, float]]:
        return {"running": len(self.open), "waiting": 0, "slots": {"free": 7, "owned": 1}}

    def audit(self) -> Sequence[object]:
        return []

    def debug_slots(self) -> list[dict[str, object]]:
        return [{"slot": 0, "place": "free"}]

    def debug_tree(self) -> list[dict[str, object]]:
        return [{"id": 1, "parent": None}]


def items(request: Request, ids: Sequence[int]) -> list[TokenLogprob]:
    if request.logprobs is None:
        return []
    logprobs = [-float(id) for id in request.logprob_ids]
    return [TokenLogprob(i, -0.5, [(i, -0.5), (i ^ 1, float("-inf"))][: request.logprobs], logprobs) for i in ids]


def pooled_of(request: Request, count: int) -> bytes:
    """Return a made-up result of pooling, which comes with the first tokens: the numbers of the pooled tokens."""
    if request.pooled is None or count > 1:
        return b""
    ids = tokens.unpack(request.tokens)[slice(*request.pooled)]
    return struct.pack(f"<{HIDDEN}f", *(ids + [0] * HIDDEN)[:HIDDEN])


def prompt_items(request: Request) -> list[TokenLogprob]:
    start = request.prompt_logprobs_from
    if start is None:
        return []
    ids = tokens.unpack(request.tokens)[start : request.prompt_len]
    logprobs = [-float(id) for id in request.logprob_ids]
    first, others = TokenLogprob(ids[0], None, []), [TokenLogprob(i, -1.5, [], logprobs) for i in ids]
    return others if start else [first, *others[1:]]


@cache
def byte_grammars() -> Grammars:
    """Return the grammars of a byte tokenizer. They compile, but the fake ring does not apply them."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return Grammars(tokenizer.to_str(), tokenizer.get_vocab_size(), VOCAB, [EOS])


def make_server(config: Config, ready: bool = True, formats: OutputFormats = NO_FORMATS) -> tuple[Server, FakeRing]:
    [server], ring = make_servers(config, ready, formats)
    return server, ring


def make_servers(
    config: Config, ready: bool, formats: OutputFormats, roles: Sequence[str] = ("both",)
) -> tuple[list[Server], FakeRing]:
    """Make engines with one model and one ring, to which those with the role "prefill" must not send anything."""
    servers = list[Server]()
    for role in roles:
        metrics = Metrics("fake")
        servers.append(Server(replace(config, role=role), Gateway(config.request_timeout, metrics), metrics, "fake"))
    first, *others = answering(servers)
    ring = FakeRing(first.gateway)
    for other in others:
        ring.join(other.gateway)
    if ready:
        model = make_model(config, formats)
        for server in servers:
            server.model, server.relay, server.phase = model, ring, "ready"
            server.metrics.watch_ring(ring)
    return servers, ring


def answering(servers: Sequence[Server]) -> list[Server]:
    """Return the engines that answer clients."""
    return [server for server in servers if server.config.role != "prefill"]


def make_model(config: Config, formats: OutputFormats) -> ServedModel:
    grammars = GrammarCompiler(byte_grammars()) if formats.tools is not None else no_grammars()
    length = config.max_model_len or 256
    rows = config.max_running or 16
    return ServedModel(FakeText(), VOCAB, length, {"family": "fake"}, formats, grammars, rows, hidden_size=HIDDEN)


@dataclass
class Served:
    """A server on a free local port, and a client for it."""

    client: Client
    server: Server
    ring: FakeRing
    sessions: SessionStore
    responses: ResponseStore

    @property
    def url(self) -> str:
        return str(self.client.make_url("/"))

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        async with self.client.post(path, json=body, **more) as response:
            return response.status, await response.json()

    async def error(self, path: str, body: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        """Post a body that is refused; return the status and the error object, which must have all four fields."""
        status, answer = await self.post(path, body, **more)
        assert set(answer) == {"error"}, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return status, answer["error"]


class WatchedRunner(web.AppRunner):
    @property
    def server(self) -> Any:
        server = super().server
        return self.app[CONNECTIONS].served_by(server) if server is not None else None


class WatchedServer(TestServer):
    """aiohttp's server for tests, with connections watched as in the real server."""

    async def _make_runner(self, **options: Any) -> web.AppRunner:
        return WatchedRunner(self.app, **options)


@asynccontextmanager
async def serving(ready: bool = True, formats: OutputFormats = NO_FORMATS, **options: Any) -> AsyncIterator[Served]:
    """Run an engine, and a client for it.

    If BATON_TESTS_THROUGH_ROUTER is set: engines with these roles, and a router for the client.
    """
    servers, ring = make_servers(Config(**options), ready, formats, roles_of(options, ready))
    apps = [make_app(server) for server in servers]
    chosen = answering(servers)
    stores = [app for app, server in zip(apps, servers, strict=True) if server in chosen]
    try:
        async with AsyncExitStack() as stack:
            clients = list[Client]()
            for app in apps:
                await app[SESSIONS].restore(VOCAB)
                clients.append(await stack.enter_async_context(client_of(app)))
            watching = [asyncio.ensure_future(app[CONNECTIONS].watch()) for app in apps]
            client = clients[0]
            if THROUGH_ROUTER:
                urls = [str(each.make_url("/")) for each in clients]
                client = await stack.enter_async_context(router_of(urls, options, client_of))
            yield Served(
                client,
                together(chosen),
                ring,
                together([app[SESSIONS] for app in stores]),
                together([app[RESPONSES] for app in stores]),
            )
            for each in watching:
                each.cancel()
    finally:
        for app in apps:
            await app[SESSIONS].close_files()


def client_of(app: web.Application) -> Client:
    """Return a client of an application's server, which runs as long as the client is open."""
    return TestClient(WatchedServer(app))


async def read_events(response: ClientResponse) -> list[bytes]:
    """Return the raw blocks of an event stream."""
    assert response.headers["Content-Type"].startswith("text/event-stream")
    body = await response.read()
    assert body.endswith(b"\n\n")
    return body.removesuffix(b"\n\n").split(b"\n\n")


def payloads(blocks: Sequence[bytes]) -> list[Any]:
    """Return the JSON of each event before [DONE], and skip comments."""
    assert blocks[-1] == b"data: [DONE]"
    data = [block for block in blocks[:-1] if not block.startswith(b":")]
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in data)
    return [json.loads(block[len(b"data: ") :]) for block in data]

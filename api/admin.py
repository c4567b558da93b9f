"""Endpoints for operators: models, health, information, metrics, debugging, abort, flush and pause."""

import time
from datetime import UTC, datetime
from typing import Any, Literal

from aiohttp import web
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST

from baton.api import errors
from baton.api.exchange import answer_json, new_id, ring_id, submit
from baton.api.generation.answers import collect
from baton.api.generation.fields import SamplingParams
from baton.api.generation.request_builder import Prompt, build_request
from baton.api.generation.served_model import ServedModel
from baton.api.parsing import convert, read_object
from baton.api.responses.store import RESPONSES
from baton.api.security import GUARD, owner_of
from baton.api.server import SERVER, RingView, Server
from baton.api.sessions.store import SESSIONS
from baton.api.version import VERSION

routes = web.RouteTableDef()
MOST_URGENT = -(2**31)  # the smallest priority, which is served first
IGNORED_TO_CONTINUE = frozenset({"torch_empty_cache"})


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """Answer 200 as long as the process is alive."""
    return answer_json({"status": "ok"})


@routes.get("/health_generate")
async def health_generate(request: web.Request) -> web.Response:
    """Generate one token, ahead of waiting requests, to show that the ring works. Answer 503 if not ready or paused."""
    model = request.app[SERVER].ready()
    if request.app[SERVER].gateway.paused is not None:
        raise errors.unavailable("generation is paused", "paused")
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, priority=MOST_URGENT, salt="health")
    with submit(request, [build_request(model, new_id("health"), Prompt([0]), params)]) as generation:
        await collect(generation)
    return answer_json({"status": "ok"})


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """Answer 200 if the server accepts requests, 503 while it is loading or draining."""
    request.app[SERVER].ready()
    return answer_json({"status": "ready"})


@routes.get("/version")
async def version(request: web.Request) -> web.Response:
    return answer_json({"version": VERSION})


def card(server: Server, model: ServedModel, name: str) -> dict[str, Any]:
    """Return the model object under one of its names, with the fields of OpenAI's API and those of Anthropic's."""
    started, length = int(server.started), model.max_model_len
    openai = {"object": "model", "created": started, "owned_by": "baton", "root": server.name, "max_model_len": length}
    anthropic = {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }
    return {"id": name, **openai, **anthropic}


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    names = (server.name, *server.other_names)
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # the list's fields in Anthropic's API
    return answer_json({"object": "list", "data": [card(server, server.ready(), name) for name in names], **page})


@routes.get("/v1/models/{model:.+}")
async def model(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    name = request.match_info["model"]
    return answer_json(card(server, server.ready(name), name if name in server.other_names else server.name))


@routes.get("/model_info")
@routes.get("/get_model_info")
async def model_info(request: web.Request) -> web.Response:
    """Describe the model, in the format of SGLang."""
    server = request.app[SERVER]
    model = server.ready()
    path = server.config.model or server.name
    return answer_json(
        {
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": server.name,
            "is_generation": True,
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
            "has_chat_template": model.text.has_chat_template,
            "generation_defaults": dict(model.text.generation_defaults),
            **model.info,
        }
    )


@routes.get("/server_info")
@routes.get("/get_server_info")
async def server_info(request: web.Request) -> web.Response:
    """Report options, stores, and the ring's counters, gauges and audit of leases, in the format of SGLang."""
    server, sessions, responses = request.app[SERVER], request.app[SESSIONS], request.app[RESPONSES]
    info: dict[str, Any] = {
        "disable_radix_cache": False,
        "version": VERSION,
        "phase": server.phase,
        "paused": server.gateway.paused,
        "uptime_s": round(time.time() - server.started, 3),
        "served_model_name": server.name,
        "options": server.config.redacted(),
        "open_requests": server.gateway.open_requests,
        "sessions": {"open": len(sessions), "bytes": sessions.memory_bytes},
        "responses": {
            "stored": len(responses),
            "running": responses.running,
            "bytes": responses.bytes,
        },
    }
    if server.relay is not None:
        info["counters"] = server.relay.counters()
        info["lease_moves"] = dict(server.relay.lease_moves())
        info["gauges"] = server.relay.gauges()
        info["audit"] = [str(violation) for violation in server.relay.audit()]
    return answer_json(info)


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[SERVER].metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


@routes.get("/debug/peers")
async def debug_peers(request: web.Request) -> web.Response:
    """List the links to other engines, with their load, and the states that are asked for and lent."""
    return answer_json(ring(request).debug_peers())


@routes.get("/debug/slots")
async def debug_slots(request: web.Request) -> web.Response:
    """List all slots with place, holder, age and contents. `?session=` marks the slots of that session's history."""
    relay = ring(request)
    slots = relay.debug_slots()
    if "session" in request.query:
        mark(slots, request.query["session"], slots_of(find_key(request), relay.debug_tree()))
    return answer_json(slots)


def find_key(request: web.Request) -> str | None:
    """Return the ring's name for the session in the query. This does not count as a use of the session."""
    sessions = request.app[SESSIONS].list(owner_of(request))
    return next((session.key for session in sessions if session.id == request.query["session"]), None)


def slots_of(key: str | None, tree: list[dict[str, Any]]) -> set[int]:
    """Return the slots of all states on the path to the node that the session continues from."""
    nodes = {node["id"]: node for node in tree}
    node = next((node for node in tree if key in node["sessions"]), None)
    slots = set()
    while node is not None:
        slots.add(node["slot"])
        node = nodes.get(node["parent"])
    return slots


def mark(slots: list[dict[str, Any]], session: str, own: set[int]) -> None:
    """Add the session's id to the entries of its own slots, and null to the others."""
    for entry in slots:
        entry["session"] = session if entry["slot"] in own else None


@routes.get("/debug/tree")
async def debug_tree(request: web.Request) -> web.Response:
    """List the nodes of the cache's radix tree, without their tokens."""
    return answer_json(ring(request).debug_tree())


def ring(request: web.Request) -> RingView:
    """Return the read-only view of the ring. Raises ApiError 503 before the ring is made."""
    relay = request.app[SERVER].relay
    if relay is None:
        raise errors.loading()
    return relay


class AbortRequest(Struct, forbid_unknown_fields=True):
    """The body of /abort_request, which sets one of the two fields."""

    rid: str = ""  # id of a request or a batch
    abort_all: bool = False  # end every request, of all API keys


@routes.post("/abort_request")
async def abort_request(request: web.Request) -> web.Response:
    """End a request or a batch of this API key by its id, or the requests of all keys. Answer how many were open."""
    server = request.app[SERVER]
    body = convert(await read_object(request), AbortRequest)
    if body.abort_all:
        request.app[GUARD].check_operator(request)
        return answer_json({"aborted": server.gateway.abort_all()})
    if not body.rid:
        raise errors.bad_request("rid is required", "rid", "missing_required_parameter")
    return answer_json({"aborted": server.gateway.abort_batch(ring_id(request, body.rid))})


@routes.get("/flush_cache", allow_head=False)
@routes.post("/flush_cache")
async def flush_cache(request: web.Request) -> web.Response:
    """Drop all cached prefixes. Running requests continue. Answer 400, as SGLang does, if they are paused in place."""
    server = request.app[SERVER]
    server.ready()
    running = ring(request).gauges()["running"]
    if server.gateway.paused == "in_place" and running:
        message = f"generation is paused in place: {running} running requests hold their slots and pages"
        raise errors.bad_request(message, code="paused")
    await server.gateway.flush()
    return answer_json({"status": "flushed"})


class PauseRequest(Struct, forbid_unknown_fields=True):
    """The body of /pause_generation.

    mode: what happens to running requests of all API keys. "abort" ends them, "retract" returns them to the queue,
    "in_place" lets them keep their slots and pages.
    """

    mode: Literal["abort", "retract", "in_place"] = "abort"


@routes.post("/pause_generation")
async def pause_generation(request: web.Request) -> web.Response:
    """Run no steps until /continue_generation; requests wait. The answer is sent when no step is in flight."""
    server = request.app[SERVER]
    body = convert(await read_object(request), PauseRequest)
    server.ready()
    if body.mode == "abort":
        server.gateway.abort_all()
    await server.gateway.pause("in_place" if body.mode == "in_place" else "retract")
    return answer_json({"status": "ok", "message": "Generation paused successfully."})


class ContinueRequest(Struct, forbid_unknown_fields=True):
    """The body of /continue_generation: an empty object."""


@routes.post("/continue_generation")
async def continue_generation(request: web.Request) -> web.Response:
    """Run steps again. This works while draining too, so that open requests can finish."""
    server = request.app[SERVER]
    server.loaded()
    convert(await read_object(request), ContinueRequest, IGNORED_TO_CONTINUE)
    server.gateway.resume()
    return answer_json({"status": "ok", "message": "Generation continued successfully."})

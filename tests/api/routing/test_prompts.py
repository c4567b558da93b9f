"""Reading of requests by a router, and what it learns of prompts."""

import json
from typing import Any

import pytest

from baton.api.events.frames import name_of
from baton.api.routing.asking import Asking, read_asking
from baton.api.routing.choice import Demand
from baton.api.routing.prompts import Chains

OWNER = b"owner"
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = "/v1/chat/completions"


def read(path: str = CHAT, owner: bytes = OWNER, **body: Any) -> Asking:
    return read_asking(path, json.dumps(body).encode(), owner)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_chain_continues_the_chain_of_the_messages_before() -> None:
    short, long = read(messages=[SYSTEM, user("a")]), read(messages=[SYSTEM, user("a"), user("b")])
    assert long.chain.digests[:2] == short.chain.digests and len(long.chain.digests) == 3
    assert read(messages=[SYSTEM, user("b")]).chain.digests[0] == short.chain.digests[0]
    assert read(messages=[SYSTEM, user("b")]).chain.digests[1] != short.chain.digests[1]


@pytest.mark.parametrize(
    "change",
    [{"tools": [{"type": "function"}]}, {"cache_salt": "a"}, {"reasoning_effort": "low"}, {"prompt_name": "query"}],
)
def test_what_changes_the_beginning_of_a_prompt_changes_its_chain(change: dict[str, Any]) -> None:
    assert read(messages=[SYSTEM], **change).chain != read(messages=[SYSTEM]).chain
    assert read(messages=[SYSTEM], temperature=1, stream=True).chain == read(messages=[SYSTEM]).chain
    assert read(messages=[SYSTEM], owner=b"other").chain != read(messages=[SYSTEM]).chain


@pytest.mark.parametrize("field", ["input", "prompt", "text", "input_ids"])
def test_other_prompts_are_one_part(field: str) -> None:
    asking = read("/generate", **{field: [1, 2] if field == "input_ids" else "abc"})
    assert len(asking.chain.digests) == 1


@pytest.mark.parametrize("inputs", [["a", "b"], [1, 2], [[1], [2]]])
def test_the_inputs_of_embeddings_are_one_part(inputs: list[Any]) -> None:
    assert len(read("/v1/embeddings", input=inputs).chain.digests) == 1


def test_long_texts_have_their_beginnings_in_common() -> None:
    context = "word " * 2000
    first, second = (read("/v1/completions", prompt=context + end).chain for end in ("a" * 10, "b" * 10))
    same = [one == other for one, other in zip(first.digests, second.digests, strict=True)]
    assert same == [True] * 4 + [False] and first.sizes == second.sizes == [2048, 4096, 6144, 8192, 10012]
    message = read(messages=[SYSTEM, user(context + "c")]).chain, read(messages=[SYSTEM, user(context + "d")]).chain
    assert sum(one == other for one, other in zip(message[0].digests, message[1].digests, strict=True)) == 5


@pytest.mark.parametrize(
    ("path", "body", "id"),
    [
        ("/v1/sessions/abc", {}, "abc"),
        ("/v1/sessions/abc/fork", {}, "abc"),
        ("/v1/conversations/conv_1/items", {}, "conv_1"),
        ("/v1/responses/resp_1/cancel", {}, "resp_1"),
        ("/v1/responses", {"previous_response_id": "resp_1", "input": "a"}, "resp_1"),
        ("/v1/responses", {"conversation": "conv_1", "input": "a"}, "conv_1"),
        ("/v1/responses", {"conversation": {"id": "conv_1"}, "input": "a"}, "conv_1"),
        ("/generate", {"session_params": {"id": "abc", "rid": None}, "text": "a"}, "abc"),
        ("/close_session", {"session_id": "abc"}, "abc"),
        ("/v1/responses", {"input": "a"}, ""),
        ("/v1/responses/input_tokens", {"input": "a"}, ""),
        ("/v1/sessions", {}, ""),
        (CHAT, {"messages": [SYSTEM]}, ""),
    ],
)
def test_a_request_belongs_to_the_engine_of_its_session(path: str, body: dict[str, Any], id: str) -> None:
    assert read(path, **body).bound == (name_of(OWNER, id) if id else "")


def test_a_new_session_is_placed_for_its_turns() -> None:
    opening = [path for path in ("/v1/sessions", "/v1/conversations", "/open_session", CHAT) if read(path).opens]
    assert opening == ["/v1/sessions", "/v1/conversations", "/open_session"]
    assert not read("/v1/sessions/abc/fork").opens


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b"\xff", b'{"messages": 1}', b'{"conversation": [1]}', b"[" * 9999]
)
def test_a_body_that_cannot_be_read_is_left_to_the_engine(body: bytes) -> None:
    assert read_asking(CHAT, body, b"").bound == ""


def test_a_later_turn_may_resume_where_an_earlier_one_ended() -> None:
    chains, first = Chains(()), read(messages=[SYSTEM, user("a" * 100)])
    assert not chains.demand(first.chain).places
    chains.learn(first.chain, 40, [(40, 1), (60, 3), (59, 2)])
    assert chains.demand(first.chain).places == [(60, 3), (59, 2), (40, 1)]
    later = chains.demand(read(messages=[SYSTEM, user("a" * 100), user("b" * 100)]).chain)
    assert later.places == [(60, 3), (59, 2), (40, 1)] and 40 < later.tokens < 100
    assert not chains.demand(read(messages=[SYSTEM, user("c" * 100)]).chain).places


def test_a_state_within_a_prompt_belongs_to_what_prompts_have_in_common() -> None:
    chains = Chains(())
    chains.learn(read(messages=[SYSTEM, user("a" * 100)]).chain, 40, [(0, 0), (40, 1)])
    chains.learn(read(messages=[SYSTEM, user("b" * 100)]).chain, 40, [(25, 7), (40, 2)])
    assert chains.demand(read(messages=[SYSTEM, user("c" * 100)]).chain).places == [(25, 7)]
    chains.learn(read(messages=[SYSTEM, user("b" * 100)]).chain, 40, [(39, 8), (40, 2)])  # the same prompt again
    assert chains.demand(read(messages=[SYSTEM, user("c" * 100)]).chain).places == [(25, 7)]


def test_a_prompt_goes_on_where_it_was_sent_last() -> None:
    chains, first = Chains(()), read(messages=[SYSTEM, user("a" * 100)]).chain
    later = read(messages=[SYSTEM, user("a" * 100), user("b" * 100)]).chain
    other = read(messages=[SYSTEM, user("c" * 100)]).chain
    chains.sent(first, 3)
    assert chains.demand(first) == Demand(chains.demand(first).tokens, [], home=3, coming=chains.demand(first).tokens)
    assert 0 < chains.demand(later).coming == chains.demand(first).tokens < chains.demand(later).tokens
    assert (chains.demand(other).home, chains.demand(other).coming) == (None, 0)
    chains.learn(first, 40, [(40, 1)])  # from now on events say where it lies
    assert (chains.demand(later).home, chains.demand(later).coming) == (3, 0)
    chains.sent(later, 2)
    assert chains.demand(later).home == 2 and chains.demand(first).home == 3


def test_the_least_recently_used_chains_are_forgotten() -> None:
    chains, read_chains = Chains((), least_room=2), [read(messages=[user(letter)]).chain for letter in "abc"]
    chains.learn(read_chains[0], 5, [(5, 1)])
    chains.learn(read_chains[1], 5, [(5, 2)])
    chains.demand(read_chains[0])
    chains.learn(read_chains[2], 5, [(5, 3)])
    assert [bool(chains.demand(chain).places) for chain in read_chains] == [True, False, True]


def test_more_chains_are_known_where_more_states_are() -> None:
    states = set[int]()
    chains, first = Chains(states, least_room=2), read(messages=[user("first")]).chain
    for number in range(8):
        chain = read(messages=[user(str(number))]).chain if number else first
        chains.learn(chain, 5, [(5, number)])
        states.add(number)
    assert chains.demand(first).places


def test_a_prompt_that_is_only_counted_is_not_one_that_an_engine_computes() -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    assert read(**body).chain.digests and not read("/v1/messages/count_tokens", **body).chain.digests

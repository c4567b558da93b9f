"""/generate as SGLang's clients use it, and SGLang's other endpoints."""

import asyncio

import pytest

from tests.api.fake_ring import EOS, payloads, read_events, serving
from tests.api.through_router import not_through_router

pytestmark = pytest.mark.anyio
REPLY = "Hello, wörld."
IDS = [*REPLY.encode(), EOS]


async def test_one_prompt() -> None:
    async with serving() as served:
        served.ring.cached = 1
        body = {"text": "ab", "rid": "r1", "sampling_params": {"temperature": 0, "top_k": -1, "sampling_seed": 5}}
        status, answer = await served.post("/generate", body)
        [request] = served.ring.submitted()
    meta = answer["meta_info"]
    assert (status, answer["text"], answer["output_ids"]) == (200, REPLY, IDS)
    assert meta["id"] == "r1"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, len(IDS), 1)
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert 0 <= meta["e2e_latency"] < 5
    assert "output_token_logprobs" not in meta
    assert (request.stops.max_tokens, request.sampling.seed, request.sampling.top_k) == (128, 5, 0)


async def test_log_probabilities() -> None:
    async with serving() as served:
        body = {
            "input_ids": [97, 98, 99], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1,
            "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 1},
        }  # fmt: skip
        _, answer = await served.post("/generate", body)
        _, later = await served.post("/generate", {**body, "logprob_start_len": 2, "return_text_in_logprobs": False})
        _, none = await served.post("/generate", {**body, "logprob_start_len": -1})
        _, scored = await served.post("/generate", {**body, "sampling_params": {"max_new_tokens": 0}})
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 1}
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-1.5, 98, "b"], [-1.5, 99, "c"]]
    assert meta["output_token_logprobs"] == [[-0.5, 72, "H"]]
    assert meta["output_top_logprobs"] == [[[-0.5, 72, "H"]]]
    assert meta["input_top_logprobs"] == [None, [], []]
    assert later["meta_info"]["input_token_logprobs"] == [[-1.5, 99, None]]
    assert none["meta_info"]["input_token_logprobs"] == []
    assert (scored["output_ids"], scored["meta_info"]["completion_tokens"]) == ([], 0)
    assert len(scored["meta_info"]["input_token_logprobs"]) == 3


async def test_log_probabilities_of_given_ids() -> None:
    async with serving() as served:
        body = {
            "input_ids": [97, 98, 99], "return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [5, 259],
            "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 2},
        }  # fmt: skip
        entry = [[-5.0, 5, "\x05"], [-259.0, 259, "</s>"]]
        meta = (await served.post("/generate", body))[1]["meta_info"]
        assert meta["input_token_ids_logprobs"] == [None, entry, entry]
        assert meta["output_token_ids_logprobs"] == [entry, entry] and "input_top_logprobs" not in meta
        async with served.client.post("/generate", json={**body, "stream": True}) as response:
            assert payloads(await read_events(response))[-1]["meta_info"]["output_token_ids_logprobs"] == [entry] * 2
        for nothing in ({"token_ids_logprob": []}, {"token_ids_logprob": None}, {"return_logprob": False}):
            meta = (await served.post("/generate", body | nothing))[1]["meta_info"]
            assert "output_token_ids_logprobs" not in meta and "input_token_ids_logprobs" not in meta
        batch = {**body, "input_ids": [[1], [2, 3]], "return_text_in_logprobs": False}
        found = []
        for ids in ([4, 5], [[4], [6, 7]], [None, [6, 7]]):
            answers = (await served.post("/generate", {**batch, "token_ids_logprob": ids}))[1]
            metas = [answer["meta_info"].get("output_token_ids_logprobs", [[]]) for answer in answers]
            found.append([[id for _, id, _ in meta[0]] for meta in metas])
        assert found == [[[4, 5], [4, 5]], [[4], [6, 7]], [[], [6, 7]]]
        wrong = [[260], [-1], [[5]], [True], ["a"], 5, [5] * 65, [None]]
        for ids in wrong:
            status, error = await served.error("/generate", {**body, "token_ids_logprob": ids})
            assert (status, error["param"].partition("[")[0]) == (400, "token_ids_logprob"), ids
        for ids in ([[1]], [[1], [260]], [[1], 2], [[1], [2], [3]], [[1], ["a"]]):
            assert (await served.error("/generate", {**batch, "token_ids_logprob": ids}))[0] == 400, ids


async def test_batches() -> None:
    async with serving() as served:
        body = {
            "text": ["a", "bc"], "rid": "r", "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
            "return_logprob": [False, True],
        }  # fmt: skip
        _, answers = await served.post("/generate", body)
        _, single = await served.post("/generate", {"input_ids": [[1]], "sampling_params": {"max_new_tokens": 1}})
        _, many = await served.post("/generate", {"text": "x", "rid": "n", "sampling_params": {"n": 3, "seed": 1}})
        seeds = [request.sampling.seed for request in served.ring.submitted()[-3:]]
    assert [a["text"] for a in answers] == ["H", "He"]
    assert [a["meta_info"]["id"] for a in answers] == ["r_0", "r_1"]
    assert [("output_token_logprobs" in a["meta_info"]) for a in answers] == [False, True]
    assert len(single) == 1
    assert [a["meta_info"]["id"] for a in many] == ["n_0", "n_1", "n_2"]
    assert seeds == [1, 2, 3]


async def test_a_stream_carries_everything_so_far() -> None:
    async with (
        serving() as served,
        served.client.post("/generate", json={"text": "a", "stream": True, "return_logprob": True}) as response,
    ):
        events = payloads(await read_events(response))
    assert [e["text"] for e in events[:3]] == ["H", "He", "Hel"]
    assert events[-1]["text"] == REPLY and events[-1]["output_ids"] == IDS
    assert len(events[-1]["meta_info"]["output_token_logprobs"]) == len(IDS)
    assert events[0]["meta_info"]["finish_reason"] is None
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"


async def test_a_batch_stream_has_indices() -> None:
    async with (
        serving() as served,
        served.client.post("/generate", json={"text": ["a", "b"], "stream": True}) as response,
    ):
        events = payloads(await read_events(response))
    for index in (0, 1):
        assert [e for e in events if e["index"] == index][-1]["text"] == REPLY


async def test_abort_request() -> None:
    async with serving() as served:
        served.ring.held = True
        waiting = asyncio.ensure_future(served.post("/generate", {"text": "a", "rid": "mine"}))
        await served.ring.until(lambda: served.ring.open)
        assert await served.post("/abort_request", {"rid": "other"}) == (200, {"aborted": 0})
        assert await served.post("/abort_request", {"rid": "mine"}) == (200, {"aborted": 1})
        status, answer = await waiting
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        assert await served.post("/abort_request", {"abort_all": True}) == (200, {"aborted": 0})


async def test_tokens_and_back() -> None:
    async with serving() as served:
        _, answer = await served.post("/tokenize", {"model": "fake", "prompt": "hö", "return_token_strs": True})
        assert (answer["tokens"], answer["count"]) == ([104, 195, 182], 3)
        assert answer["token_strs"][0] == "h"
        _, chat = await served.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
        assert bytes(chat["tokens"]) == b"user:x\nassistant:"
        _, back = await served.post("/detokenize", {"tokens": [*"hö".encode(), EOS]})
        assert back == {"prompt": "hö</s>", "text": "hö</s>"}
        _, back = await served.post("/detokenize", {"tokens": [104, EOS], "skip_special_tokens": True})
        assert back["text"] == "h"


async def test_tokenizer_info() -> None:
    async with serving() as served, served.client.get("/tokenizer_info") as response:
        info = {"tokenizer_class": "Bytes", "chat_template": "{{ é }}", "model_max_length": int(1e30)}
        assert (response.status, await response.json()) == (200, info)
    async with serving(ready=False) as served, served.client.get("/tokenizer_info") as response:
        assert response.status == 503


async def test_information() -> None:
    async with serving(api_key=("secret",)) as served:
        headers = {"Authorization": "Bearer secret"}
        async with served.client.get("/server_info", headers=headers) as response:
            text = await response.text()
            info = await response.json()
        assert "secret" not in text
        assert info["options"]["api_key"] == ["***"]
        assert (info["phase"], info["audit"], info["gauges"]["slots"]) == ("ready", [], {"free": 7, "owned": 1})
        async with served.client.get("/model_info", headers=headers) as response:
            model = await response.json()
        assert (model["is_generation"], model["family"], model["has_chat_template"]) == (True, "fake", True)
        async with served.client.get("/version", headers=headers) as response:
            assert set(await response.json()) == {"version"}
        for method in ("GET", "POST"):
            async with served.client.request(method, "/flush_cache", headers=headers) as response:
                assert (response.status, await response.json()) == (200, {"status": "flushed"})


@not_through_router
async def test_metrics() -> None:
    async with serving() as served:
        served.ring.cached = 1
        await served.post("/generate", {"text": "ab"})
        await served.post("/nothing", {})
        async with served.client.get("/metrics") as response:
            assert response.content_type == "text/plain"
            lines = (await response.text()).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    model = '{model_name="fake"}'
    assert float(values[f"baton:prompt_tokens_total{model}"]) == 2
    assert float(values[f"baton:generation_tokens_total{model}"]) == len(IDS)
    assert float(values[f"baton:prefix_cache_hits_total{model}"]) == 1
    assert float(values[f"baton:time_to_first_token_seconds_count{model}"]) == 1
    assert float(values[f"baton:inter_token_latency_seconds_count{model}"]) == len(IDS) - 1
    assert float(values[f"baton:e2e_request_latency_seconds_count{model}"]) == 1
    assert float(values[f"baton:num_requests_running{model}"]) == 0
    assert float(values[f"baton:checkpoints_missed_total{model}"]) == 3
    assert float(values['baton:slots{model_name="fake",place="free"}']) == 7
    assert float(values['baton:lease_moves_total{kind="take",model_name="fake"}']) == 5
    waits = 'baton:mailbox_wait_seconds_{}actor="cache",{}model_name="fake"}}'
    counts = [float(values[waits.format("bucket{", f'le="{le}",')]) for le in ("1e-05", "2.5e-05", "+Inf")]
    assert counts == [0, 1, 1] and float(values[waits.format("sum{", "")]) == 2e-5
    assert float(values['baton:actor_busy_seconds_total{actor="cache",model_name="fake"}']) == 0.5
    assert float(values[f"baton:relay_overhead_seconds_count{model}"]) == 0
    assert float(values[f"baton:steps_total{model}"]) == 0
    assert float(values['baton:http_requests_total{path="/generate",status="200"}']) == 1
    assert float(values['baton:http_requests_total{path="unknown",status="404"}']) == 1
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))

"""The steps from options to a ring, and error messages for what cannot be served."""

import asyncio
import json
from pathlib import Path
from typing import Literal, cast

import msgspec
import pytest
import structlog
import torch

from baton.actors.forward.streams import CpuStream
from baton.actors.runtime.relay import Relay
from baton.actors.scheduler.strategy import Strategy
from baton.actors.storage.host_memory import HostStates
from baton.api import wiring
from baton.api.config import Config
from baton.api.generation.gateway import Gateway
from baton.api.machine.batch import batch_limits
from baton.api.machine.host_arena import lines_of
from baton.api.machine.memory import free_in_container, free_memory
from baton.api.serve import StartError
from baton.api.wiring import (
    EXAMPLE_MODEL,
    build_lower_tiers,
    bundled_model,
    cpu_arena,
    load,
    model_length,
    name_quantization,
    name_states,
    size,
)
from baton.kernels.linear.quantized import Form
from baton.kernels.linear.quantized.native import random_groups
from baton.kernels.moe.experts import keep
from baton.kernels.runtime.triton import dot_precision, use_tf32
from baton.models.batch import Model
from baton.models.hash import HashModel
from baton.models.layers.experts import Experts
from baton.models.loading.checkpoint import random_model
from baton.models.text.template import ChatTemplate
from baton.models.text.tokenizer import load_text
from tests.actors.storage.host import arena_of
from tests.actors.test_ring import MAMBA2
from tests.api.hash_traffic import make_checkpoint

HASH = {"model_type": "hash", "vocab_size": 256, "chunk_size": 8, "max_position_embeddings": 64}


def refused(config: Config) -> str:
    with pytest.raises(StartError) as caught:
        load(config, lambda done, total: None)
    return str(caught.value)


def test_checkpoints_that_cannot_be_loaded(tmp_path: Path) -> None:
    assert "not a name on the hub" in refused(Config(model="org/name/part"))
    assert str(tmp_path / "none") in refused(Config(model=str(tmp_path / "none")))
    assert "config.json" in refused(Config(model=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "gpt2" in refused(Config(model=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(HASH))
    assert "tokenizer.json" in refused(Config(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_k", 20.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("max_new_tokens", 0),
    ],
)
def test_defaults_that_no_client_may_ask_for(tmp_path: Path, name: str, value: float) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    assert f"generation_config.json: {name} = {value}" in refused(Config(model=str(tmp_path)))


def test_defaults_in_range_are_taken(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    variables = {"temperature": 0.7, "top_k": 20.0, "top_p": 1, "max_new_tokens": 16}
    (tmp_path / "generation_config.json").write_text(json.dumps(variables))
    loaded = load(Config(model=str(tmp_path)), lambda done, total: None)
    assert loaded.model.text.generation_defaults == variables


def test_a_chat_template_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "TEMPLATE_LIMIT_S", 0.2)
    text = load_text(bundled_model())
    text._template = ChatTemplate({"default": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3}, {})
    with pytest.raises(StartError, match="the chat template did not finish"):
        wiring.render_probes(text)


def test_pools_that_hold_no_request(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    config = Config(model=str(tmp_path), state_slots=4, tree_slots=2, state_strategy=Strategy.EXTRA_BUFFER)
    assert "it needs 3 slots" in refused(config)
    loaded = load(msgspec.structs.replace(config, no_overlap=True), lambda done, total: None)
    assert "1 requests fit: 4 slots less 2 for the tree, 2 a request (extra_buffer)" in loaded.notes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_device(tmp_path: Path) -> None:
    assert refused(Config(model=str(tmp_path), device="cuda")).startswith("--device: ")


def test_the_longest_sequence() -> None:
    model = HashModel(256, 8, 64)
    assert model_length(Config(), model) == 64
    assert model_length(Config(max_model_len=32), model) == 32
    assert model_length(Config(), HashModel(256, 8, 2**31 - 1)) == 131_072
    with pytest.raises(StartError, match=r"--max-model-len: .* 64"):
        model_length(Config(max_model_len=65), model)


def test_states_are_distinguished_by_the_dtype_of_their_weights(tmp_path: Path) -> None:
    """Mamba-2's states are float32 under any --dtype, so the dtype of the weights must be part of their fingerprint."""
    (tmp_path / "config.json").write_text(json.dumps({**MAMBA2, "dtype": "bfloat16"}))

    def name(dtype: Literal["auto", "float32", "bfloat16"]) -> str:
        weights = torch.float32 if dtype == "float32" else torch.bfloat16
        model = random_model(MAMBA2, weights, torch.device("cpu"), seed=0)
        return name_states(Config(dtype=dtype), model, tmp_path)

    assert name("auto") == name("bfloat16") != name("float32")


def test_states_are_distinguished_by_what_is_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of a version that quantized other weights are not resumed; without --quantize they are."""
    (tmp_path / "config.json").write_text(json.dumps(MAMBA2))
    model, before = random_model(MAMBA2, torch.float32, torch.device("cpu"), seed=0), list[str]()
    for rule in ("other weights", wiring.QUANTIZED):
        monkeypatch.setattr(wiring, "QUANTIZED", rule)
        before += [name_states(Config(quantize=quantize), model, tmp_path) for quantize in ("none", "int8", "int4")]
    assert before[0] == before[3] and len(set(before)) == 5
    assert name_states(Config(quantize="int8", activation_dtype="int8"), model, tmp_path) not in before


def test_tf32_is_off_unless_asked(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    torch.backends.cudnn.allow_tf32 = True
    try:
        for tf32 in (True, False):
            load(Config(model=str(tmp_path), tf32=tf32), lambda done, total: None)
            assert torch.backends.cudnn.allow_tf32 == tf32
            assert torch.backends.cuda.matmul.allow_tf32 == tf32
            assert dot_precision() == ("tf32" if tf32 else "ieee")
    finally:
        use_tf32(False)


@pytest.mark.parametrize("lines", [0, 9])
def test_host_memory_is_counted_as_it_is_kept(tmp_path: Path, lines: int) -> None:
    model, config = HashModel(256, 8, 64), Config(page_size=4)
    sizes = size(config, batch_limits(config, False, 0), model, 64, CpuStream())
    cut = lines_of(model, 4)
    limits = build_lower_tiers(config, model, sizes, "", HostStates(arena_of(cut, lines))).limits
    assert (limits.host_bytes, limits.page_size, limits.lines) == (lines * cut.nbytes, 4, cut)


def test_on_a_cpu_the_arena_is_within_host_memory() -> None:
    model = HashModel(256, 8, 64)
    cut = lines_of(model, 4)
    assert cpu_arena(Config(host_memory=10 * cut.nbytes - 1, page_size=4), model).nbytes == 9 * cut.nbytes
    assert cpu_arena(Config(host_memory=0), model).nbytes == 0
    with pytest.raises(StartError, match=r"--host-memory: the system refuses \d+ bytes of memory: Cannot"):
        cpu_arena(Config(host_memory=2**60), model)


def test_the_loaded_model_says_how_many_requests_run_and_how_large_steps_are(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    for options, rows, tokens in (({}, 16, 512), ({"max_running": 3, "step_tokens": 64}, 3, 64)):
        loaded = load(Config(model=str(tmp_path), **options), lambda done, total: None)
        assert (loaded.model.max_running, loaded.model.info["max_running"], loaded.model.info["step_tokens"]) == (
            rows, rows, tokens,
        )  # fmt: skip
        assert f"{rows} requests run at once, in steps of up to {tokens} tokens" in loaded.notes


def test_free_memory_is_within_this_machine() -> None:
    assert 0 < free_memory(torch.device("cpu")) < 2**50


def test_free_memory_is_within_the_containers_limit_but_files_that_were_read(tmp_path: Path) -> None:
    assert free_in_container(tmp_path, 7) == 7
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert free_in_container(tmp_path, 7) == 7
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_in_container(tmp_path, 7) == 300
    (tmp_path / "memory.stat").write_text("anon 250\nfile 450\nactive_file 150\ninactive_file 300\n")
    assert free_in_container(tmp_path, 7) == 750


def test_a_violation_is_logged_with_the_trace_of_the_message_that_showed_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)

    async def scenario() -> None:
        loaded = load(Config(model=str(tmp_path), state_slots=4, host_memory=0), lambda done, total: None)
        relay = loaded.build_relay(Gateway(1.0))
        assert isinstance(relay, Relay)
        relay.unit.traces.current = "a" * 32
        relay.ledger.quarantine(1, "claimed by a test")
        relay.unit.traces.current = ""
        relay.ledger.quarantine(2, "claimed by a test")
        await relay.unit.close()

    with structlog.testing.capture_logs() as logged:
        asyncio.run(scenario())
    violations = [line for line in logged if line["event"] == "lease violation"]
    assert [(line["slot"], line.get("trace_id")) for line in violations] == [(1, "a" * 32), (2, None)]


def test_the_log_says_that_the_bundled_model_is_an_example(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    folders = {"": str(bundled_model()), str(tmp_path): None}
    for model, folder in folders.items():
        with structlog.testing.capture_logs() as log:
            load(Config(model=model or None, memory=2**26, kernels="torch"), lambda done, total: None)
        assert next((line["folder"] for line in log if line["event"] == EXAMPLE_MODEL), None) == folder


def test_experts_of_integers_have_a_name_of_their_own() -> None:
    """Otherwise states of a model whose experts are integers could be mixed with those of dequantized experts."""
    form, generator = Form(4, 32), torch.Generator().manual_seed(0)
    experts = Experts(64, 32, 2, "silu_gated", torch.float32)
    model = cast(Model, experts)
    assert name_quantization(Config(), model) == "none"
    matrices = [random_groups(form, 32, 64, generator) for _ in range(4)]
    experts.keep("input_linear", keep(enumerate(matrices), form, (4, 32, 64), 2, torch.float32))
    assert name_quantization(Config(), model) == "as in the file"
    assert name_quantization(Config(quantize="int8"), model) == "int8"

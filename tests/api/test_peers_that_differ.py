"""Engines that differ are refused by the name of the option or version in which they differ."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from baton.actors.forward.streams import CpuStream
from baton.actors.peers.frames import Hello, disagreement
from baton.actors.storage.host_memory import HostStates
from baton.api.config import Config
from baton.api.generation.served_model import ServedModel
from baton.api.machine.batch import batch_limits
from baton.api.peering.links import Peering
from baton.api.wiring import DTYPES, STATE_DTYPES, dtype_name, name_states, size
from baton.models.loading.checkpoint import load_model
from scripts.benchmarks.common.shapes import checkpoint_of
from tests.api.engines import CPU, LENGTH, ByteText
from tests.models.oracle import settings_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {**settings_of("granitemoehybrid-rope"), "torch_dtype": "float32"}
    return checkpoint_of(settings, tmp_path_factory.mktemp("hybrid"))


def hello_of(checkpoint: Path, **options: Any) -> Hello:
    """Return what a server of this checkpoint says of itself."""
    config = Config(engine_name="engine", peer=("127.0.0.1:9000",), memory=1 << 24, max_running=4, **options)
    model = load_model(checkpoint, DTYPES[config.dtype], CPU, state_dtype=STATE_DTYPES[config.state_dtype])
    sizes = size(config, batch_limits(config, False, 0), model, LENGTH, CpuStream())
    served = ServedModel(ByteText(), model.vocab_size, LENGTH)
    names = name_states(config, model, checkpoint), dtype_name(config, checkpoint)
    return Peering(config, *names, sizes, HostStates(), served).hello


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, ""),
        ({"dtype": "float32"}, ""),
        ({"role": "prefill", "state_strategy": "no_buffer", "kv_pages": 40, "track_interval": 32}, ""),
        ({"page_size": 32}, "page_size is 32 here and 16 at the peer"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16 here and float32 at the peer"),
        ({"state_dtype": "bfloat16"}, "state_dtype is bfloat16 here and float32 at the peer"),
        ({"quantize": "int8"}, "quantize is int8 here and none at the peer"),
        (
            {"quantize": "int8", "activation_dtype": "int8"},
            "quantize is int8 with int8 activations here and none at the peer",
        ),
    ],
)
def test_options_that_must_agree(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    assert disagreement(hello_of(checkpoint, **options), hello_of(checkpoint)) == message


def test_weights_that_were_trained_further_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Names, shapes and options are the same: only the fingerprint differs."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    same = hello_of(tmp_path)
    assert disagreement(same, hello_of(checkpoint)) == ""
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] += 0.01
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    other = hello_of(tmp_path)
    assert disagreement(other, same) == f"model is {other.model} here and {same.model} at the peer"
    assert other.model != same.model

"""--activation-dtype int8 in a server: it answers, says so, and is refused where it could not be what was asked for."""

from typing import Any

import pytest

from baton.api.config import Config
from baton.api.serve import StartError
from baton.api.wiring import bundled_model, load
from baton.kernels.linear import int8_activations
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.targets import targets_here
from tests.api.machine.test_machine import MEMORY, answer_of
from tests.api.server_process import SERVE, ServerProcess

BYTES = {"avx512_vnni", "avx_vnni", "asimddp"}
"""CPU features with which integers of 8 bits are multiplied."""


def start(**options: Any) -> None:
    """Load the bundled model, and remove native code from this process."""
    try:
        load(Config(model=str(bundled_model()), memory=2**26, activation_dtype="int8", **options), lambda *sizes: None)
    finally:
        cpp.uninstall()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_server_answers_with_rounded_activations(quantize: str) -> None:
    if not targets_here()[0].needs & BYTES:
        with pytest.raises(StartError, match="needs native code for a CPU that multiplies integers of 8 bits"):
            start(quantize=quantize)
        return
    options = ("--quantize", quantize, "--activation-dtype", "int8")
    with ServerProcess([*SERVE, *MEMORY, *options]) as server:
        answer, info = answer_of(server), server.get("/model_info")
    assert info["quantize"] == f"{quantize}, int8 activations"
    assert "19" in answer


def test_what_cannot_round_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match="no projection has weights of integers; --quantize int8 or int4 makes them"):
        start()
    with pytest.raises(StartError, match="needs --device cpu and --kernels native"):
        start(quantize="int8", kernels="torch")
    monkeypatch.setattr(int8_activations, "pays", lambda: False)
    with pytest.raises(StartError, match="needs native code for a CPU that multiplies integers of 8 bits"):
        start(quantize="int8")

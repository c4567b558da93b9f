"""Every kernel compiles for every target, and needs no more resources than its GPU has."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.kernels.attention.paged.tiles import prefill_candidates

ROOT = Path(__file__).parents[3]
TARGETS = ("80", "86", "89", "90", "100", "120", "gfx942")
OLDEST = "3.6.0"
"""The oldest version of Triton that pyproject.toml allows."""
SMALLEST = ("89", "gfx942")
"""The targets with the least shared memory, which are always compiled for; the soak compiles for all."""
TABLE = ROOT / "kernels" / "runtime" / "triton" / "configs.json"


@pytest.fixture(scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty folder for compiled kernels, so that no kernel of an earlier run is used."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def widest(triton_cache: Path) -> dict[str, Any]:
    return compiled(triton_cache, "--widest", "--targets", *SMALLEST)


def compiled(triton_cache: Path, *options: str, packages: Path | None = None) -> dict[str, Any]:
    """Run compile_shapes in a process that does not interpret kernels, and return its output.

    packages: a folder whose packages come before the installed ones.
    """
    command = [sys.executable, "-m", "tests.kernels.gpu.compile_shapes", *options]
    environment = os.environ | {"TRITON_CACHE_DIR": str(triton_cache)}
    if packages is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def test_every_kernel_fits(widest: dict[str, Any]) -> None:
    """The widest variant of each kernel fits; test_all_variants_fit compiles the others, and for the other targets."""
    assert widest["excess"] == []
    by_target = {
        target: {each["kernel"] for each in widest["taken"] if each["target"] == target} for target in SMALLEST
    }
    assert len(set(map(frozenset, by_target.values()))) == 1
    assert {
        "attention.paged.triton._prefill",
        "mamba2.ssd.triton._scan",
        "mamba2.state_update.triton._step",
    } <= by_target["89"]


@pytest.mark.soak
def test_a_target_compiles_what_its_gpus_choose(triton_cache: Path) -> None:
    """An A100, an H100 and a B200 have room for one more pipeline stage of the scan than an RTX 4090."""
    found = compiled(triton_cache, "--cases", "mixer_prefill: mamba2-2.7b torch.bfloat16 torch.float32")
    assert found["excess"] == []
    shared = {each["target"]: each["shared"] for each in found["taken"] if each["kernel"] == "mamba2.ssd.triton._scan"}
    assert max(shared["86"], shared["89"], shared["120"]) <= 99 * 1024 < min(shared["80"], shared["90"], shared["100"])


def test_attention_over_latents_fits_the_smallest_gpus(triton_cache: Path) -> None:
    """Attention over latents is not the widest variant, because a program holds only a piece of its columns."""
    found = compiled(triton_cache, "--cases", "latents", "--targets", *SMALLEST)
    assert found["excess"] == []
    assert {(each["target"], each["is_float32"]) for each in found["taken"] if each["kernel"].endswith("_decode")} == {
        (target, is_float32) for target in SMALLEST for is_float32 in (False, True)
    }


def test_no_kernel_is_left_out(widest: dict[str, Any]) -> None:
    assert widest["unused"] == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.soak
def test_all_variants_fit(triton_cache: Path, target: str) -> None:
    assert compiled(triton_cache, "--targets", target)["excess"] == []


@pytest.fixture(scope="module")
def older_triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the oldest Triton that is allowed; skip the test if no package index has it."""
    folder = tmp_path_factory.mktemp("older")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"triton=={OLDEST}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"Triton {OLDEST} cannot be installed: {done.stderr.strip()[-300:]}")
    return folder


@pytest.mark.soak
def test_kernels_compile_with_the_oldest_triton(triton_cache: Path, older_triton: Path) -> None:
    """Triton 3.6 comes with torch 2.11, and needs more registers for some kernels."""
    options = ("--targets", "90", "--cases", "bfloat16|int[48]|sampling")
    found = compiled(triton_cache / OLDEST, *options, packages=older_triton)
    assert found["triton"] == OLDEST
    assert found["excess"] == []


def test_every_configuration_of_the_table_fits_its_gpu(triton_cache: Path) -> None:
    found = compiled(triton_cache, "--table", str(TABLE))
    assert found["excess"] == []
    assert found["unmet"] == []


@pytest.mark.parametrize("index", range(5))
@pytest.mark.soak
def test_candidates_of_attention_over_prompts_do_not_spill(triton_cache: Path, tmp_path: Path, index: int) -> None:
    """Each candidate fits the GPUs for which it is one, at the widths of models; latents are compiled elsewhere."""
    tables = dict[str, dict[str, dict[str, object]]]()
    for gpu, shared in (("NVIDIA A100", 163), ("NVIDIA H100", 227), ("NVIDIA B200", 227)):
        shapes = tables.setdefault(gpu, {}).setdefault("attention.paged.prefill", {})
        for heads, kv_heads, width in ((32, 8, 64), (32, 8, 128), (16, 2, 256)):
            found = prefill_candidates(heads // kv_heads, width, torch.bfloat16, shared * 1024)
            if index < len(found):
                config = {"blocks": found[index].blocks, "warps": found[index].warps, "stages": found[index].stages}
                shapes[f"heads={heads} kv_heads={kv_heads} width={width} page=16 bfloat16"] = config
    (tmp_path / "table.json").write_text(json.dumps(tables))
    found = compiled(triton_cache, "--table", str(tmp_path / "table.json"))
    assert found["excess"] == found["unmet"] == []


def test_kernels_that_do_not_fit_are_found(triton_cache: Path, tmp_path: Path) -> None:
    """Too much shared memory, too many registers, and a shape that no case has are reported."""
    attention = "heads=32 kv_heads=8 width=128 page=16 bfloat16"
    tables = {
        "NVIDIA GeForce RTX 4090": {
            "attention.paged.prefill": {
                attention: {"blocks": {"BLOCK_M": 128, "BLOCK_N": 128}, "warps": 8, "stages": 4}
            },
            "norm.gated.gated_norm": {"width=8192": {"blocks": {"PARTS": 1}, "warps": 1}},
            "state_pool.move": {"words=3": {"blocks": {"BLOCK": 1024}}},
        }
    }
    (tmp_path / "table.json").write_text(json.dumps(tables))
    found = compiled(triton_cache, "--table", str(tmp_path / "table.json"))
    assert {each["target"] for each in found["taken"]} == {"89"}
    excess = " ".join(found["excess"])
    assert "attention.paged.triton._prefill on 89" in excess and "bytes of shared memory" in excess
    assert "norm.gated.triton._gated_norm on 89" in excess and "bytes of registers spilled" in excess
    assert found["unmet"] == ["NVIDIA GeForce RTX 4090: state_pool.move: words=3"]

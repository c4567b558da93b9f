"""Tensors that fill parts of parameters, and parameters that several tensors fill."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models.config import ModelConfig, ModelError
from baton.models.families.mamba2 import FAMILY
from baton.models.family import Piece
from baton.models.loading import checkpoint
from tests.models.loading.test_loading import Change, copied, load, parameters
from tests.models.oracle import Oracle

HEADS = ("A_log", "D", "dt_bias")
LAYER = "backbone.layers.1.mixer."


def row(index: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[index]


def every_fourth(first: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[first::4]


def fused(name: str, config: ModelConfig) -> list[Piece]:
    """Return the parameters that a tensor of fused files fills, for a made-up file format.

    `heads` holds A_log, D and dt_bias. `in_proj.I` holds every fourth row of in_proj from row I on, transposed.
    `expert.I` holds row I of D.
    """
    path, _, leaf = name.rpartition("mixer.")
    if leaf == "heads":
        return [Piece(f"{path}mixer.{part}", take=row(index)) for index, part in enumerate(HEADS)]
    if leaf.removeprefix("in_proj.").isdigit():
        place = every_fourth(int(leaf.removeprefix("in_proj.")))
        return [Piece(f"{path}mixer.in_proj.weight", take=lambda tensor: tensor.T, place=place)]
    if leaf.startswith("expert."):
        return [Piece(f"{path}mixer.D", place=row(int(leaf.removeprefix("expert."))))]
    return FAMILY.pieces(name, config)


def fuse(tensors: dict[str, Any]) -> None:
    for path in ("backbone.layers.0.mixer.", LAYER):
        weight = tensors.pop(f"{path}in_proj.weight")
        tensors |= {f"{path}in_proj.{first}": weight[first::4].T.contiguous() for first in range(4)}
        tensors[f"{path}heads"] = torch.stack([tensors.pop(path + part) for part in HEADS])


@pytest.fixture
def original(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint of mamba2, and let that family also read fused files."""
    path = oracle.checkpoint("mamba2")
    monkeypatch.setitem(checkpoint.FAMILIES, "mamba2", replace(FAMILY, pieces=fused))
    return path


def scatter(path: Path) -> None:
    """Store each tensor in a file of its own, so that a parameter is filled from several files."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = {name: f"{index}.safetensors" for index, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("scattered", [False, True])
def test_parts_fill_parameters(original: Path, tmp_path: Path, scattered: bool, bits: int | None) -> None:
    path = copied(original, tmp_path / "copy", tensors=fuse)
    if scattered:
        scatter(path)
    cpu = torch.device("cpu")
    found, expected = (parameters(checkpoint.load_model(p, None, cpu, bits=bits)) for p in (path, original))
    assert found.keys() == expected.keys()
    assert {name for name in found if not torch.equal(found[name], expected[name])} == set()


def lose_a_part(tensors: dict[str, Any]) -> None:
    del tensors[f"{LAYER}in_proj.1"]


def fill_twice(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}in_proj.weight"] = torch.ones(296, 64)


def one_expert_too_many(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}expert.8"] = torch.ones(())


def shorten(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}in_proj.2"] = torch.ones(64, 73)


def flatten(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}heads"] = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_part, r"in_proj\.weight \(14208 of 18944 elements, from \S*in_proj\.0, \S*in_proj\.2, \S*in_proj\.3\)"),
        (
            fill_twice,
            r"in_proj\.weight \(37888 of 18944 elements, from \S*\.0, \S*\.1, \S*\.2 and 2 more",
        ),
        (one_expert_too_many, r"surplus tensors: backbone\.layers\.1\.mixer\.expert\.8"),
        (
            shorten,
            r"in_proj\.2 \[64, 73\], of which \[73, 64\] does not fit \[74, 64\] of \S*weight \[296, 64\]",
        ),
        (flatten, r"heads \[2, 8\], which has no part for \[8\] of \S*dt_bias \[8\]"),
    ],
)
def test_parts_that_do_not_fit_are_named(original: Path, tmp_path: Path, change: Change, message: str) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        fuse(tensors)
        change(tensors)

    with pytest.raises(ModelError, match=message):
        load(copied(original, tmp_path / "copy", tensors=spoil))


def test_two_files_may_not_hold_the_same_name(oracle: Oracle, tmp_path: Path) -> None:
    path = copied(oracle.checkpoint("mamba2"), tmp_path / "copy")
    (path / "model.safetensors").rename(path / "a.safetensors")
    save_file({"backbone.norm_f.weight": torch.ones(64)}, path / "b.safetensors")
    with pytest.raises(ModelError, match=r"a\.safetensors and \S*b\.safetensors both hold backbone\.norm_f\.weight"):
        load(path)

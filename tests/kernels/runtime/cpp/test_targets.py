"""The choice of a CPU's target."""

from pathlib import Path

import pytest

from baton.kernels.runtime.cpp.targets import (
    AMX,
    TARGETS,
    V2,
    V3,
    V4,
    V4_BF16,
    chosen,
    cpu_features,
    cpu_vendor,
    permitted,
    preferred,
    usable_targets,
)


@pytest.mark.parametrize(
    ("machine", "features", "best"),
    [
        ("x86_64", V4 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"}, "x86-64-v4-amx"),
        ("x86_64", V4 | {"avx512_bf16", "avx512_vnni", "amx_tile"}, "x86-64-v4-bf16"),
        ("x86_64", V4 | {"avx512_vnni"}, "x86-64-v4-vnni"),
        ("x86_64", V4 | {"avx512_bf16"}, "x86-64-v4"),
        ("x86_64", V4 - {"avx512bw"}, "x86-64-v3"),
        ("x86_64", V3 | {"avx_vnni"}, "x86-64-v3-vnni"),
        ("x86_64", V3 - {"fma"}, "x86-64-v2"),
        ("x86_64", V2 - {"popcnt"}, None),
        ("aarch64", {"asimd", "asimdhp", "asimddp", "bf16", "sve"}, "armv8.2-a-bf16"),
        ("aarch64", {"asimd", "asimdhp", "asimddp"}, "armv8.2-a"),
        ("aarch64", set[str](), "armv8-a"),
        ("riscv64", {"i", "v"}, None),
    ],
)
def test_the_best_target_whose_instructions_are_all_there(machine: str, features: set[str], best: str | None) -> None:
    usable = usable_targets(machine, frozenset(features))
    assert (usable[0].name if usable else None) == best
    assert usable == [target for target in TARGETS if target in usable]


def test_on_intel_s_cpus_the_product_of_bfloat16_is_slower_than_that_of_float32(tmp_path: Path) -> None:
    usable = usable_targets("x86_64", V4_BF16 | AMX)
    assert preferred(usable, "AuthenticAMD") == preferred(usable, "") == usable
    names = [target.name for target in preferred(usable, "GenuineIntel")]
    assert names == ["x86-64-v4-amx", "x86-64-v4-vnni", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v3", "x86-64-v2"]
    for lesser in (usable_targets("x86_64", V4), usable_targets("x86_64", V3), usable_targets("aarch64", V2)):
        assert preferred(lesser, "GenuineIntel") == lesser
    (tmp_path / "x86").write_text("processor : 0\nvendor_id\t: GenuineIntel\nflags : fpu\n")
    assert cpu_vendor(tmp_path / "x86") == "GenuineIntel" and cpu_vendor(tmp_path / "none") == ""


def test_a_target_with_tiles_needs_the_system_s_permission() -> None:
    with_tiles = usable_targets("x86_64", V4_BF16 | AMX)
    assert with_tiles[0].name == "x86-64-v4-amx"
    assert permitted(with_tiles, lambda: True) == with_tiles
    assert permitted(with_tiles, lambda: False) == with_tiles[1:]


def test_permission_is_only_asked_for_if_there_are_tiles() -> None:
    without = usable_targets("x86_64", V4_BF16)
    assert permitted(without, lambda: pytest.fail("asked")) == without


def test_a_variable_chooses_a_target_that_the_cpu_has() -> None:
    usable = usable_targets("x86_64", V4)
    assert chosen(usable, {}) == chosen(usable, {"BATON_TARGET": ""}) == usable
    assert [target.name for target in chosen(usable, {"BATON_TARGET": "x86-64-v3"})] == ["x86-64-v3", "x86-64-v2"]
    with pytest.raises(ValueError, match="BATON_TARGET: expected x86-64-v4, x86-64-v3, x86-64-v2 on this CPU"):
        chosen(usable, {"BATON_TARGET": "x86-64-v4-bf16"})


def test_features_are_those_that_every_processor_has(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text("processor : 0\nflags\t\t: fpu avx2 fma\n\nprocessor : 1\nflags\t\t: fpu avx2\n")
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: asimd bf16\n")
    assert cpu_features(tmp_path / "x86") == {"fpu", "avx2"}
    assert cpu_features(tmp_path / "arm") == {"asimd", "bf16"}
    assert cpu_features(tmp_path / "none") == frozenset()

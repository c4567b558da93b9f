"""GGUF files of repositories on the hub: which one a name stands for, what is fetched, and what the commands say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.api import cli
from baton.api.hub.errors import HubError
from baton.api.hub.gguf_names import chosen, grouped
from baton.api.hub.names import HubName, default_served_name, hub_name
from baton.api.serve import StartError
from tests.api.hub.conftest import NAME, point_to
from tests.api.hub.fake_hub import COMMIT, FakeHub
from tests.api.hub.test_by_name import inspect, load
from tests.api.test_gguf import BUNDLED, choose, write_vocabulary
from tests.models.gguf.converting import convert

FILES = (
    "Clara-Q4_K_M.gguf", "Clara-Q8_0.gguf", "Clara.F16.gguf", "mmproj-Clara-F16.gguf", "imatrix.gguf",
    "BF16/Clara-BF16-00001-of-00002.gguf", "BF16/Clara-BF16-00002-of-00002.gguf", "other/Clara_IQ4_XS.gguf",
)  # fmt: skip


@pytest.fixture(scope="module")
def clara(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bundled model as a GGUF file."""
    return convert(BUNDLED, tmp_path_factory.mktemp("gguf") / "m.gguf", choose, write_vocabulary).read_bytes()


@pytest.mark.parametrize(
    ("quantization", "files"),
    [
        ("Q4_K_M", FILES[:1]),
        ("q8_0", FILES[1:2]),
        ("F16", FILES[2:3]),
        ("BF16", FILES[5:7]),
        ("IQ4_XS", FILES[7:]),
        ("Clara-Q8_0", FILES[1:2]),
    ],
)
def test_a_name_stands_for_a_file_with_all_its_parts(quantization: str, files: tuple[str, ...]) -> None:
    name = hub_name(f"{NAME}:{quantization}")
    assert name == HubName(NAME, None, quantization)
    assert chosen(grouped(FILES), name) == [*files]


@pytest.mark.parametrize("name", [HubName(NAME), HubName(NAME, None, "Q5_0"), HubName(NAME, None, "M")])
def test_a_name_that_stands_for_no_single_file_gets_the_choices(name: HubName) -> None:
    with pytest.raises(HubError, match=r"org/model:Q4_K_M, org/model:Q8_0, org/model:F16"):
        chosen(grouped(sorted(FILES[:3])), name)


def test_a_file_without_all_its_parts_is_refused() -> None:
    with pytest.raises(HubError, match=r"org/model:BF16 has 1 of 2 parts: BF16/Clara-BF16-00002-of-00002\.gguf"):
        chosen(grouped(FILES[6:7]), HubName(NAME, None, "BF16"))


def test_the_served_name_of_a_link_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "0123abcd").touch()
    (tmp_path / "Clara-Q8_0.gguf").symlink_to("0123abcd")
    assert default_served_name(str(tmp_path / "Clara-Q8_0.gguf")) == "Clara-Q8_0"


def test_the_served_name_says_the_quantization() -> None:
    assert default_served_name(f"{NAME}@v1:Q8_0") == f"{NAME}:Q8_0"
    assert str(hub_name(f"{NAME}@v1:Q8_0")) == f"{NAME}@v1:Q8_0"


def test_inspection_reads_only_the_header(
    hub: FakeHub, clara: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.api.hub.gguf_files.FIRST_READ", 4096)
    hub.add(NAME, None, {"Clara-Q8_0.gguf": clara, "Clara-Q4_0.gguf": clara[:4096]})
    found = inspect(capsys, f"{NAME}:Q8_0")
    assert (found["folder"], found["family"], found["refused"]) == (f"{NAME}:Q8_0", "granitemoehybrid", [])
    assert found["weights_on_disk"].keys() == {"Q8_0", "F32"} and found["chat_template"]
    assert found["download"] == len(clara)
    assert hub.sent() < 2**17 < len(clara)
    [reason] = inspect(capsys, f"{NAME}:Q4_0", 1)["refused"]
    assert reason.startswith(f"{NAME}:Q4_0 is damaged")


def test_only_the_file_is_fetched_and_served(
    hub: FakeHub, clara: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, None, {"Clara-Q8_0.gguf": clara, "Clara-F16.gguf": b"GGUF", "config.json": b"{}"})
    with pytest.raises(StartError, match="is not fetched, because it cannot be served"):
        load(f"{NAME}:Q8_0", memory=2**17)
    assert hub.sent() <= 2**20
    assert cli.main(["pull", f"{NAME}:Q8_0"]) == 0
    file = Path(capsys.readouterr().out.splitlines()[-1])
    assert (file.name, file.parent.name) == ("Clara-Q8_0.gguf", COMMIT) and file.read_bytes() == clara
    assert hub.sent("Clara-F16.gguf") == 0
    point_to("http://127.0.0.1:9", monkeypatch)
    assert load(f"{NAME}:Q8_0").model.info["family"] == "granitemoehybrid"
    assert cli.main(["list", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["family"], listed["size"]) == (f"{NAME}:Q8_0", "granitemoehybrid", len(clara))


def test_a_damaged_file_is_never_served(hub: FakeHub, clara: bytes) -> None:
    hub.add(NAME, None, {"Clara-Q8_0.gguf": clara})
    hub.damaged = True
    with pytest.raises(StartError, match=r"Clara-Q8_0\.gguf of org/model is damaged"):
        load(NAME)


def test_a_repository_without_the_file_lists_what_it_has(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, Any] = {f"m-{kind}.gguf": b"GGUF" for kind in ("Q4_K_M", "Q8_0")}
    hub.add(NAME, None, files)
    for name, text in ((NAME, "stands for 2"), (f"{NAME}:Q5_K", "stands for none")):
        assert cli.main(["inspect", name]) == 1
        shown = capsys.readouterr().err
        assert text in shown and "org/model:Q4_K_M, org/model:Q8_0" in shown
    hub.add(NAME, BUNDLED)
    assert cli.main(["pull", f"{NAME}:Q8_0"]) == 1
    assert "org/model has no GGUF files" in capsys.readouterr().err


def test_pulling_does_not_import_torch() -> None:
    code = "import sys; import baton.api.cli.pulling; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def test_a_name_that_stands_for_several_files_is_not_answered_by_the_cache(
    hub: FakeHub, clara: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(NAME, None, {"m-Q8_0.gguf": clara, "m-UD-Q8_0.gguf": clara + b"0", "m.mmproj-Q8_0.gguf": b"GGUF"})
    assert cli.main(["pull", f"{NAME}:Q8_0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("/m-Q8_0.gguf"), "the exact name wins"
    assert cli.main(["pull", NAME]) == 1
    assert "stands for 2 of the GGUF files" in capsys.readouterr().err

"""The commands `inspect`, `pull`, `list` and the start of `serve`, with names on the hub."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

from baton.api import cli
from baton.api.cli.commands import loader
from baton.api.config import Config
from baton.api.serve import StartError
from tests.api.hub.conftest import NAME, point_to
from tests.api.hub.fake_hub import COMMIT, FakeHub
from tests.models.loading.formats.writing import WAYS, quantize
from tests.models.loading.test_loading import copied
from tests.models.test_bundled import BUNDLED

SMALL = sum(file.stat().st_size for file in BUNDLED.iterdir() if file.suffix != ".safetensors")
SIZES = {"memory": 2**26, "max_running": 4, "host_memory": 0, "kernels": "torch"}


def inspect(capsys: pytest.CaptureFixture[str], name: str, code: int = 0) -> dict[str, Any]:
    assert cli.main(["inspect", name, "--memory", "64M", "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def load(name: str, **options: Any) -> Any:
    config = Config(model=name, **SIZES | options)
    return loader(config)(config, lambda done, total: None)


def test_inspection_reads_only_settings_and_headers(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    found, folder = inspect(capsys, NAME), inspect(capsys, str(BUNDLED))
    for each in (found, folder):
        each["room"].pop("free")  # It changes from moment to moment.
    missing = ("model.safetensors", "tokenizer.json")
    assert found.pop("download") == sum((BUNDLED / name).stat().st_size for name in missing)
    assert folder.pop("download") is None
    assert (found.pop("folder"), folder.pop("folder")) == (NAME, str(BUNDLED))
    assert found == folder and found["layers"] and found["chat_template"]
    assert hub.sent() < 2**16 and hub.sent("tokenizer.json") == 0


@pytest.mark.parametrize("way", ["awq", "packed", "nvfp4 of modelopt", "nf4, nested"])
def test_quantized_weights_are_inspected_by_their_headers(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    folder = copied(BUNDLED, tmp_path / "quantized")
    quantize(folder, WAYS[way])
    hub.add(NAME, folder)
    found, local = inspect(capsys, NAME), inspect(capsys, str(folder))
    assert found["refused"] == [] and found["quantized"] and found["unquantized"]
    for key in ("quantization", "quantized", "unquantized", "weights_in_memory", "loaded_as"):
        assert found[key] == local[key]
    assert hub.sent("model.safetensors") < 2**17


def test_the_inspection_of_a_cached_model_fetches_nothing(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["pull", NAME]) == 0
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    assert folder.name == COMMIT and (folder / "model.safetensors").stat().st_size > 10**7
    point_to("http://127.0.0.1:9", monkeypatch)
    assert inspect(capsys, NAME)["folder"] == str(folder)


def test_long_headers_and_damaged_files_are_reported(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    weights = (BUNDLED / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(weights[:8], "little")
    longer = weights[8:end] + b" " * 2**15
    files = hub.models[NAME].files
    files["model.safetensors"] = len(longer).to_bytes(8, "little") + longer + weights[end:]
    assert inspect(capsys, NAME)["parameters"] == 2727194
    files["model.safetensors"] = weights[:-100]
    [reason] = inspect(capsys, NAME, 1)["refused"]
    assert reason.startswith(f"{NAME}/model.safetensors is cut short")


def test_shards_are_inspected_by_their_index(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(BUNDLED, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"1.safetensors": names[:20], "2.safetensors": names[20:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.add(NAME, folder, {"consolidated.safetensors": b"not read"})
    found, local = inspect(capsys, NAME), inspect(capsys, str(folder))
    assert found["files"] == 2 and found["weights_on_disk"] == local["weights_on_disk"]
    assert hub.sent() < 2**17
    del hub.models[NAME].files["2.safetensors"]
    [reason] = inspect(capsys, NAME, 1)["refused"]
    assert reason.startswith(f"{NAME} lacks the shards 2.safetensors")


def test_other_files_of_weights(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(NAME, BUNDLED)
    weights = hub.models[NAME].files.pop("model.safetensors")
    hub.models[NAME].files["model.pt"] = b"PK"
    [reason] = inspect(capsys, NAME, 1)["refused"]
    assert reason.startswith(f"{NAME} holds no safetensors files and no pytorch_model.bin")
    hub.models[NAME].files["pytorch_model.bin"] = weights
    found = inspect(capsys, NAME)
    assert (found["missing"], found["refused"], hub.sent(".bin")) == (["weights"], [], 0)


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_fetched(hub: FakeHub) -> None:
    with pytest.raises(StartError, match=r"org/model is not fetched, because it cannot be served: no request fits"):
        load(NAME, memory=2**17)
    hub.models[NAME].files["config.json"] = b'{"model_type": "gpt2"}'
    with pytest.raises(StartError, match=r"is not fetched.*model_type 'gpt2' is not supported"):
        load(NAME)
    assert 0 < hub.sent() < 2 * SMALL + 2**17
    with pytest.raises(StartError, match="there is no folder org/none, and no model org/none at"):
        load("org/none")


def test_an_error_of_the_hub_ends_a_command_with_1(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "pull"):
        assert cli.main([command, "org/none"]) == 1
        assert f"baton: there is no folder org/none, and no model org/none at {hub.url}" in capsys.readouterr().err
    assert cli.main(["pull", "none"]) == 1
    assert "none is not a name on the hub, as ORG/NAME or ORG/NAME@REVISION" in capsys.readouterr().err


def test_the_list_says_what_can_be_served(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["list", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
    hub.add("org/other", None, {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": b"x"})
    for name in (NAME, "org/other@v1"):
        assert cli.main(["pull", name]) == 0
    capsys.readouterr()
    assert cli.main(["list"]) == 0
    served, refused = capsys.readouterr().out.splitlines()[1:]
    assert served.split() == [NAME, "main", "10.4", "MiB", "granitemoehybrid", "yes"]
    assert refused.startswith("org/other  v1") and "model_type 'gpt2' is not supported" in refused
    cached = Path(constants.HF_HUB_CACHE) / "models--org--model" / "snapshots" / COMMIT
    (cached / "model.safetensors").unlink()
    assert cli.main(["list", "--json"]) == 0
    model, _ = json.loads(capsys.readouterr().out)
    assert (model["family"], model["refused"]) == ("granitemoehybrid", ["weights not fetched"])


def test_a_start_with_a_folder_does_not_import_the_hubs_library() -> None:
    code = (
        "import sys; from baton.api.cli.commands import loader; from baton.api.config import Config; "
        f"import baton.api.serve; loader(Config(model={str(BUNDLED)!r})); print('huggingface_hub' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"

"""Downloads: what is fetched, resumed, checked, and refused."""

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants, scan_cache_dir, snapshot_download, try_to_load_from_cache

from baton.api.cli.pulling import fetch
from baton.api.hub.checkpoint import HubCheckpoint, find
from baton.api.hub.connection import Hub
from baton.api.hub.errors import HubError
from baton.api.hub.names import HubName, default_served_name, hub_name
from baton.models.loading.shards import find_shards
from tests.api.hub.conftest import NAME, point_to
from tests.api.hub.fake_hub import COMMIT, HALF, TOKEN, FakeHub, running, sha256
from tests.models.test_bundled import BUNDLED

MODEL = HubName(NAME)
WEIGHTS = (BUNDLED / "model.safetensors").read_bytes()


def cache() -> Path:
    return Path(constants.HF_HUB_CACHE) / "models--org--model"


def partial() -> Path:
    return cache() / "blobs" / f"{sha256(WEIGHTS)}.incomplete"


def refused(name: HubName = MODEL) -> str:
    with pytest.raises(HubError) as caught:
        fetch(name)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/model", HubName("org/model")),
        ("Qwen/Qwen3.5-0.8B@v1.0", HubName("Qwen/Qwen3.5-0.8B", "v1.0")),
        ("org/model@refs/pr/3", HubName("org/model", "refs/pr/3")),
        ("org/model@../../x", None),
        ("./org/model", None),
        ("/org/model", None),
        ("../model", None),
        ("org/model/part", None),
        ("org/model:Q4_K_M", HubName("org/model", None, "Q4_K_M")),
        ("model", None),
        (None, None),
    ],
)
def test_names(model: str | None, name: HubName | None) -> None:
    assert hub_name(model) == name


def test_a_folder_that_exists_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (hub_name(NAME), default_served_name(NAME)) == (MODEL, NAME)
    (tmp_path / NAME).mkdir(parents=True)
    assert (hub_name(NAME), default_served_name(NAME)) == (None, "model")


def test_the_files_that_a_server_reads_are_fetched_into_the_shared_cache(hub: FakeHub) -> None:
    hub.add(NAME, BUNDLED, {"model.gguf": b"x", "pytorch_model.bin": b"x", "onnx/model.safetensors": b"x"})
    folder = fetch(MODEL)
    fetched = {file.relative_to(folder).as_posix() for file in folder.rglob("*")}
    assert fetched == {file.name for file in BUNDLED.iterdir()} - {"README.md"}
    assert all((folder / name).read_bytes() == (BUNDLED / name).read_bytes() for name in fetched)
    assert hub.sent() == sum((BUNDLED / name).stat().st_size for name in fetched)
    # All that huggingface_hub does with its cache works with these files.
    assert snapshot_download(NAME, local_files_only=True) == str(folder)
    assert try_to_load_from_cache(NAME, "config.json") == str(folder / "config.json")
    scan = scan_cache_dir(constants.HF_HUB_CACHE)
    [model] = scan.repos
    assert [(each.commit_hash, each.refs) for each in model.revisions] == [(COMMIT, {"main"})]
    assert scan.warnings == []
    sent = hub.sent()
    assert snapshot_download(NAME, allow_patterns=[*fetched], endpoint="http://127.0.0.1:9") == str(folder)
    assert fetch(HubName(NAME, "v1")) == fetch(HubName(NAME, COMMIT)) == folder
    assert hub.sent() == sent


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["model.safetensors", "consolidated.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["a.safetensors", "b.safetensors", "consolidated.safetensors", "I"], ["a.safetensors", "b.safetensors"]),
        (["consolidated.safetensors", "pytorch_model.bin", "x/y.safetensors"], ["consolidated.safetensors"]),
        (["pytorch_model.bin", "model.pth", "model.gguf"], ["pytorch_model.bin"]),
    ],
)
def test_the_weights_are_those_that_loading_reads(
    hub: FakeHub, tmp_path: Path, files: list[str], chosen: list[str]
) -> None:
    index = json.dumps({"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}}).encode()
    contents = {"model.safetensors.index.json" if file == "I" else file: index * (file == "I") for file in files}
    hub.add(NAME, None, {"config.json": b"{}", **{name: text or name.encode() for name, text in contents.items()}})
    folder = fetch(MODEL)
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    assert [file.name for file in find_shards(folder)] == [file.name for file in find_shards(tmp_path)] == chosen
    assert sorted(file.name for file in folder.iterdir() if file.suffix != ".json") == chosen


def test_a_connection_that_is_cut_is_resumed(hub: FakeHub) -> None:
    hub.cut_after = [3 * HALF, 2 * HALF, 0]
    assert (fetch(MODEL) / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [each.range for each in hub.requests if each.path.startswith("/content/")]
    assert len(ranges) == 4 and ranges[0] is None and None not in ranges[1:]
    # An end of the connection may lose bytes that have been sent, but no byte that has arrived is sent twice.
    assert len(WEIGHTS) <= hub.sent(".safetensors") <= len(WEIGHTS) + 6 * HALF


def test_a_download_that_was_given_up_goes_on_where_it_ended(hub: FakeHub) -> None:
    hub.cut_after, hub.cuts_at_once = [20 * HALF], True
    assert "model.safetensors of org/model: " in refused()
    hub.cuts_at_once = False
    there = partial().stat().st_size
    assert 0 < there < len(WEIGHTS)
    before = hub.sent(".safetensors")
    assert (fetch(MODEL) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent(".safetensors") - before == len(WEIGHTS) - there
    assert hub.requests[-1].range == f"bytes={there}-"
    assert not partial().exists()


def test_a_server_without_ranges_sends_everything_again(hub: FakeHub) -> None:
    hub.cut_after, hub.ignores_ranges = [20 * HALF], True
    assert (fetch(MODEL) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent(".safetensors") > len(WEIGHTS) + 15 * HALF


def test_a_busy_server_is_asked_again(hub: FakeHub) -> None:
    hub.busy = [503, 429, 500, 502]
    assert (fetch(MODEL) / "model.safetensors").read_bytes() == WEIGHTS
    (cache() / "blobs" / sha256(WEIGHTS)).unlink()
    hub.busy = [503] * 5
    assert f"model.safetensors of org/model: 0 of {len(WEIGHTS):,} bytes arrived: " in refused()
    assert hub.busy == []


def test_a_file_that_ends_too_early_is_not_served(hub: FakeHub) -> None:
    hub.ends_after = 10 * HALF
    assert f"model.safetensors of org/model is damaged: {10 * HALF:,} bytes" in refused()
    assert not partial().exists()


def test_a_file_that_has_arrived_but_was_not_checked_yet_is_checked(hub: FakeHub) -> None:
    partial().parent.mkdir(parents=True)
    partial().write_bytes(WEIGHTS)
    assert (fetch(MODEL) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent(".safetensors") == 0
    (cache() / "blobs" / sha256(WEIGHTS)).rename(partial())
    partial().write_bytes(WEIGHTS[:-1] + b"?")
    assert "model.safetensors of org/model is damaged" in refused()


def test_a_repository_without_weights(hub: FakeHub) -> None:
    hub.add(NAME, None, {"config.json": b"{}", "model.pt": b"x"})
    assert refused() == "org/model holds no safetensors files and no pytorch_model.bin"


@pytest.mark.parametrize("begun", [False, True])
def test_a_wrong_checksum_is_never_served(hub: FakeHub, begun: bool) -> None:
    if begun:  # The part that an earlier download has left is wrong.
        partial().parent.mkdir(parents=True)
        partial().write_bytes(b"?" * HALF)
    else:
        hub.damaged = True
    message = refused()
    assert "model.safetensors of org/model is damaged" in message and sha256(WEIGHTS) in message
    assert [*(cache() / "snapshots").rglob("model.safetensors")] == []
    assert not partial().exists() and not (cache() / "blobs" / sha256(WEIGHTS)).exists()
    hub.damaged, sent = False, hub.sent(".safetensors")
    assert sha256((fetch(MODEL) / "model.safetensors").read_bytes()) == sha256(WEIGHTS)
    assert hub.sent(".safetensors") - sent == len(WEIGHTS)


def test_two_processes_fetch_a_file_once(hub: FakeHub) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(fetch, [MODEL, MODEL])
    assert first == second and (first / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent(".safetensors") == len(WEIGHTS)


def test_a_file_of_the_cache_with_a_wrong_size_is_fetched_again(hub: FakeHub) -> None:
    folder = fetch(MODEL)
    (folder / "model.safetensors").resolve().write_bytes(WEIGHTS[:-1])
    assert (fetch(MODEL) / "model.safetensors").read_bytes() == WEIGHTS


def test_small_files_are_checked_too(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.api.hub.fake_hub.git_id", lambda content: hashlib.sha1(b"other").hexdigest())
    assert "is damaged" in refused() and "Git id" in refused()


def test_a_listing_cannot_name_files_outside_its_folder(hub: FakeHub, tmp_path: Path) -> None:
    outside = "additional_chat_templates/../../../../../x.jinja"
    hub.models[NAME].files |= {outside: b"x", "/additional_chat_templates/x.jinja": b"x"}
    fetch(MODEL)
    assert [each.path for each in hub.requests if "x.jinja" in each.path] == []


@pytest.mark.parametrize(
    ("spoil", "name", "message"),
    [
        (lambda hub: None, "org/none", "no folder org/none, and no model org/none at {url}, or it is private"),
        (lambda hub: None, "org/model@none", "org/model has no revision 'none'"),
        (lambda hub: setattr(hub.models[NAME], "private", True), NAME, "no model org/model at {url}, or it is private"),
        (
            lambda hub: setattr(hub.models[NAME], "gated", True), NAME,
            "org/model is gated: accept its licence at {url}/org/model and set HF_TOKEN",
        ),
        (lambda hub: None, "org/a--b", "org/a--b is not a name on the hub"),
        (lambda hub: setattr(hub, "status", 200), NAME, "{url} does not answer as a hub does for org/model"),
        (lambda hub: setattr(hub, "status", 503), NAME, "the hub at {url} answers 503 for org/model"),
        (lambda hub: setattr(hub, "status", 403), NAME, "the token has no access to org/model"),
    ],
)  # fmt: skip
def test_refusals_are_explained(hub: FakeHub, spoil: Callable[[FakeHub], None], name: str, message: str) -> None:
    spoil(hub)
    found = hub_name(name)
    assert found is not None
    assert message.format(url=hub.url) in refused(found)


def test_the_token_goes_to_the_hub_only(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models[NAME].private = True
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert f"the hub at {hub.url} does not accept the token; check HF_TOKEN" in refused()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch(MODEL)
    assert {each.authorized for each in hub.requests if each.path.startswith(f"/{NAME}")} == {True}
    assert [each.authorized for each in hub.requests if each.path.startswith("/content/")] == [False]


def test_without_the_hub_a_complete_model_comes_from_the_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeHub()) as ended:
        pass
    point_to(ended.url, monkeypatch)
    assert f"cannot reach the hub at {ended.url} for org/model" in refused()
    point_to(hub.url, monkeypatch)
    folder = fetch(MODEL)
    point_to(ended.url, monkeypatch)
    assert fetch(MODEL) == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(HubName(NAME, COMMIT)) == fetch(MODEL) == folder
    assert "org/other is not in the cache, and HF_HUB_OFFLINE forbids fetching it" in refused(HubName("org/other"))
    (folder / "model.safetensors").unlink()
    assert "org/model is not in the cache" in refused()


def test_an_inspection_of_a_new_commit_leaves_the_old_one_usable(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(MODEL)
    monkeypatch.setattr("tests.api.hub.fake_hub.COMMIT", "d" * 40)
    found = find(Hub(), MODEL)
    assert isinstance(found, HubCheckpoint) and found.is_cached
    assert (folder.with_name("d" * 40) / "config.json").is_file()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(MODEL) == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert fetch(MODEL) == folder.with_name("d" * 40)


def test_a_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(constants.HF_HUB_CACHE.rpartition("/")[0])
    monkeypatch.setattr("baton.api.hub.cache.shutil.disk_usage", lambda place: usage._replace(free=2**20))
    assert "org/model needs 0.01 GiB in the cache" in refused()
    assert hub.sent(".safetensors") == 0


def test_a_disk_that_fills_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(*arguments: object) -> None:
        raise OSError(28, "No space left on device", "blob")

    monkeypatch.setattr("baton.api.hub.transfer.PartialFile.write", fill_up)
    assert "the disk is full: org/model does not fit" in refused()

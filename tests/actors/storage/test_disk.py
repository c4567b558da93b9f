"""State files: contents, access rights, rejected files, and which files remain after an error."""

import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from structlog.testing import capture_logs

from baton.actors.messages import Loaded, Written
from baton.actors.storage.files import StateFileHeader, StateFiles, checksum, to_tensors
from baton.actors.storage.host_memory import HostStates
from baton.actors.tokens import pack
from baton.models.batch import TensorSpec
from tests.actors.storage.host import host_states

STATE, KV = torch.arange(24, dtype=torch.uint8), [torch.arange(12.0).view(3, 4)]
TOKENS = pack([1, 2, 3])


class Bench:
    """The state files of a folder, of which each call is complete before the next begins."""

    def __init__(self, folder: Path, model: str = "model") -> None:
        self.host = host_states(24, TensorSpec((4,), torch.float32))
        self.reports, self.folder = list[Written | Loaded](), folder
        self.files = StateFiles(folder, model, self.host)
        self.copy = self.host.from_kv(3, STATE, KV)
        self.host.put(1, self.copy)

    def do(self, *calls: Callable[[StateFiles], None]) -> list[Any]:
        """Make these calls, close the disk, and return the log's entries.

        Writes do not wait for copies still to come.
        """
        with capture_logs() as log:
            self.files.start(self.reports.append)
            for call in calls:
                call(self.files)
            self.files.close()
        self.host.clear()
        self.host.put(1, self.copy)
        return log

    def write(self, salt: str = "", tokens: bytes = TOKENS) -> Path:
        before = set(self.folder.glob("*"))
        self.do(lambda files: files.write(1, salt, tokens))
        assert self.reports.pop() == Written(1)
        [path] = set(self.folder.glob("*")) - before
        return path

    def read(self, salt: str = "", tokens: bytes = TOKENS) -> str:
        """Read the file of these tokens; return the error, "" if there is none."""
        self.do(lambda files: files.read(2, salt, tokens))
        loaded = self.reports.pop()
        assert isinstance(loaded, Loaded) and loaded.key == 2
        return loaded.error


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path / "states")
    structlog.reset_defaults()


def test_a_file_says_what_it_holds_and_is_its_owners(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's mode is 0600 even if the library that writes the file sets another one."""

    def save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata)
        path.chmod(0o644)

    monkeypatch.setattr("baton.actors.storage.files.save_file", save)
    path = bench.write("sält")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with safe_open(path, "pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert (header["format"], header["version"], header["model"]) == ("baton-state", "2", "model")
    assert json.loads(header["salt"]) == "sält" and header["checksum"] == checksum(tensors)
    assert tensors["tokens"].tolist() == [1, 2, 3] and set(tensors) == {"tokens", "state", "kv.0"}
    assert torch.equal(tensors["state"], STATE) and torch.equal(tensors["kv.0"], KV[0])


def test_salts_tokens_and_models_have_files_of_their_own(bench: Bench) -> None:
    paths = {bench.write(), bench.write("other"), bench.write(tokens=pack([1, 2]))}
    other = Bench(bench.folder, "other model")
    paths.add(other.write())
    assert len(paths) == 4


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        done.append("sync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "sync file")
        sync(handle)

    def noted(self: Path, target: Path) -> Path:
        done.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", noted)
    handles = len(os.listdir("/proc/self/fd"))
    bench.write()
    assert done == ["sync file", "rename", "sync folder"]
    assert len(os.listdir("/proc/self/fd")) == handles


def test_a_failed_write_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    log = bench.do(lambda files: files.write(1, "", TOKENS), lambda files: files.write(1, "", TOKENS))
    assert bench.reports == [Written(1, "[Errno 28] No space left on device")] * 2
    assert not list(bench.folder.iterdir())
    assert [entry["log_level"] for entry in log] == ["warning"] * 2


def test_a_deleted_folder_is_created_again_but_not_its_parent(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "of all" / "states")
    (tmp_path / "of all").mkdir()
    for gone in (bench.folder, bench.folder.parent):
        assert bench.write().parent == bench.folder
        shutil.rmtree(gone)
        assert "No such file" in bench.read()
    bench.do(lambda files: files.write(1, "", TOKENS), lambda files: files.delete("", TOKENS))
    assert [message.error[:9] for message in bench.reports if isinstance(message, Written)] == ["[Errno 2]"]
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_never_comes_fails_its_write(bench: Bench) -> None:
    bench.do(lambda files: files.write(9, "", TOKENS))
    assert bench.reports == [Written(9, "copy 9 was not made, or not within 60 s")]


def test_a_write_waits_for_its_copy(bench: Bench) -> None:
    waiting = threading.Timer(0.05, lambda: bench.host.put(5, bench.copy))
    bench.files.start(bench.reports.append)
    bench.files.write(5, "", TOKENS)
    waiting.start()
    waiting.join()
    bench.files.close()
    assert bench.reports == [Written(5)]


def test_an_error_without_a_message_is_reported_by_its_type(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(key: int, seconds: float) -> None:
        raise MemoryError

    monkeypatch.setattr(bench.host, "wait_for", broken)
    bench.do(lambda files: files.write(1, "", TOKENS))
    assert bench.reports == [Written(1, "MemoryError")]


def test_a_file_is_read_as_it_was_written(bench: Bench) -> None:
    bench.write()
    assert bench.read() == ""
    bench.files.start(bench.reports.append)
    bench.files.read(2, "", TOKENS)
    bench.files.close()
    found = bench.host.get(2)
    assert found.position == 3 and torch.equal(bench.host.state_of(found), STATE)
    assert [block.shape for block in found.blocks] == [(2, 64)] and torch.equal(bench.host.kv_of(found)[0], KV[0])


def forge(path: Path, tensors: dict[str, torch.Tensor], **changed: str) -> None:
    header = StateFileHeader("", "model", checksum(tensors)).to_metadata() | changed
    save_file(tensors, path, {name: value for name, value in header.items() if value != "left out"})


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"format": "other"}, "it is not of the format baton-state 2"),
        ({"version": "3"}, "it is not of the format baton-state 2"),
        ({"model": "other"}, "it is of another model"),
        ({"salt": '"other"'}, "it is of another model"),
        ({"salt": "no json"}, "its header is invalid: "),
        ({"salt": "5"}, "its header is invalid: its salt is int, not str"),
        ({"checksum": "left out"}, "its header is invalid: 'checksum'"),
        ({"checksum": "00"}, "its checksum is wrong"),
    ],
)
def test_a_file_with_a_wrong_header_is_refused_and_deleted(bench: Bench, changed: dict[str, str], error: str) -> None:
    path = bench.write()
    forge(path, to_tensors(TOKENS, STATE, KV), **changed)
    assert bench.read().startswith(f"{path.name}: {error}") and not path.exists()


def test_a_file_of_other_tokens_is_refused(bench: Bench) -> None:
    path = bench.write()
    forge(path, to_tensors(pack([3, 2, 1]), STATE, KV))
    assert bench.read() == f"{path.name}: its tokens are not those of its name"


def test_the_checksum_covers_names_shapes_and_types() -> None:
    tensor = torch.zeros(2, 3)
    sums = [
        checksum({"a": tensor}),
        checksum({"b": tensor}),
        checksum({"a": tensor.view(3, 2)}),
        checksum({"a": tensor.int()}),
        checksum({"a": tensor + 1}),
        checksum({"a": tensor, "b": torch.empty(0)}),
    ]
    assert len(set(sums)) == len(sums) and {len(found) for found in sums} == {40}
    assert checksum({"b": tensor, "a": tensor}) == checksum({"a": tensor, "b": tensor})
    assert checksum({"a": tensor.view(3, 2).T}) == checksum({"a": tensor})


@pytest.mark.parametrize(
    ("state", "kv"),
    [
        (STATE[:23], KV),
        (STATE.int(), KV),
        (STATE, []),
        (STATE, [KV[0][:2]]),
        (STATE, [KV[0].half()]),
        (STATE, [KV[0], KV[0].clone()]),
    ],
)
def test_a_file_of_other_sizes_is_refused(bench: Bench, state: torch.Tensor, kv: list[torch.Tensor]) -> None:
    path = bench.write()
    forge(path, to_tensors(TOKENS, state, kv))
    assert bench.read().endswith("is not of this model") and not path.exists()


# Files found at the start


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    StateFiles(folder, "model", HostStates()).scan()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_files_are_found_in_order_of_age_and_returned_once(bench: Bench) -> None:
    for age, tokens in ((30, [1]), (10, [1, 2]), (20, [1, 2, 3])):
        os.utime(bench.write(tokens=pack(tokens)), (1000 - age, 1000 - age))
    found = StateFiles(bench.folder, "model", HostStates())
    found.scan()
    files = list(found.files())
    assert [len(file.tokens) // 4 for file in files] == [1, 3, 2]
    sizes = [path.stat().st_size for path in bench.folder.iterdir()]
    assert sorted(file.size for file in files) == sorted(sizes)
    assert list(found.files()) == []
    bench.write(tokens=pack([9]))
    found.scan_again()
    assert len(found.files()) == 4


@pytest.mark.parametrize("changed", [{"model": "other"}, {"salt": '"other"'}, {"version": "3"}])
def test_files_of_another_model_or_under_a_wrong_name_are_deleted(bench: Bench, changed: dict[str, str]) -> None:
    good, bad = bench.write(), bench.write(tokens=pack([1, 2]))
    forge(bad, to_tensors(pack([1, 2]), STATE, []), **changed)
    without = bench.folder / "without.safetensors"
    forge(without, {"state": STATE})
    (bench.folder / "half.tmp").write_bytes(b"half")
    with capture_logs() as log:
        bench.files.scan()
    assert [file.tokens for file in bench.files.files()] == [TOKENS]
    assert [entry["file"] for entry in log] and {entry["file"] for entry in log} == {bad.name, without.name}
    assert list(bench.folder.iterdir()) == [good]


@pytest.mark.parametrize(
    "tokens", [torch.tensor([1, 2]), torch.tensor([1.0, 2.0]).bfloat16(), torch.zeros(2, 1).int(), torch.zeros(0).int()]
)
def test_tokens_of_a_wrong_shape_are_refused_and_deleted(bench: Bench, tokens: torch.Tensor) -> None:
    """A file with the right name and checksum may stop neither a start nor a read."""
    packed = tokens.view(-1).view(torch.uint8).numpy().tobytes()
    path = bench.files._path("", packed)
    for use in (bench.files.scan, lambda: bench.read(tokens=packed)):
        bench.folder.mkdir(exist_ok=True)
        forge(path, {"tokens": tokens, "state": STATE})
        use()
        assert not path.exists() and not bench.files.files()


def test_what_is_no_file_is_not_opened(bench: Bench) -> None:
    good = bench.write()
    os.mkfifo(bench.folder / "fifo.safetensors")
    (bench.folder / "folder.safetensors").mkdir()
    (bench.folder / "link.safetensors").symlink_to("nowhere")
    (bench.folder / "folder.tmp").mkdir()
    with capture_logs() as log:
        bench.files.scan()
    assert [file.tokens for file in bench.files.files()] == [TOKENS]
    assert {path.name for path in bench.folder.iterdir()} == {good.name, "folder.safetensors", "folder.tmp"}
    assert [line["event"] for line in log].count("a state file could not be deleted") == 2
    good.unlink()
    os.mkfifo(good)
    assert bench.read().endswith("it is no regular file") and not good.exists()


def test_a_folder_that_cannot_be_read_counts_as_empty_and_is_logged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    files = StateFiles(tmp_path / "file" / "states", "model", HostStates())
    with capture_logs() as log:
        files.scan_again()
    assert list(files.files()) == []
    assert [entry["log_level"] for entry in log] == ["error"]
    with pytest.raises(OSError, match="Not a directory"):
        files.scan()


# Going


def test_deleting_a_missing_file_is_no_error(bench: Bench) -> None:
    path = bench.write()
    assert bench.do(lambda files: files.delete("", TOKENS), lambda files: files.delete("", TOKENS)) == []
    assert not path.exists() and bench.reports == []


def test_a_file_that_cannot_be_deleted_is_logged_and_the_next_call_is_carried_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError("no")

    bench.write()
    monkeypatch.setattr(Path, "unlink", denied)
    log = bench.do(lambda files: files.delete("", TOKENS), lambda files: files.read(2, "", TOKENS))
    assert [entry["error"] for entry in log] == ["no"]
    assert [(report.key, report.error) for report in bench.reports] == [(2, "")]


def test_a_disk_can_be_closed_twice_and_started_again(bench: Bench) -> None:
    bench.files.close()
    bench.write()
    bench.files.close()
    assert bench.read() == ""


def test_after_a_restart_a_copy_can_be_waited_for_again(bench: Bench) -> None:
    bench.do()
    assert bench.host.wait_for(9, 0.01) is None
    bench.host.complete()
    assert bench.host.wait_for(1, 60) is bench.copy and bench.host.wait_for(9, 60) is None
    bench.host.drop(1)
    bench.host.drop(1)
    assert bench.host.wait_for(1, 60) is None

"""State files without a ring: tensors that were read do not change with the file, and no write waits for ever."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from baton.actors.messages import Cleared, DiskReport, Written
from baton.actors.storage import files as storage
from baton.actors.storage.files import StateFiles
from baton.actors.storage.host_memory import HostState, HostStates
from baton.actors.tokens import pack
from tests.actors.storage.host import host_states


def successes(reports: list[DiskReport]) -> list[tuple[str, int]]:
    """Return the type and the key of each report of success, without its duration."""
    return [
        (type(report).__name__, report.key)
        for report in reports
        if not isinstance(report, Cleared) and not report.error
    ]


def test_tensors_that_were_read_do_not_change_with_the_file(tmp_path: Path) -> None:
    host, reports = host_states(64 * 64), list[DiskReport]()
    state = torch.randint(256, (64 * 64,), dtype=torch.uint8)
    host.put(1, host.from_kv(3, state, []))
    files = StateFiles(tmp_path, "model", host)
    files.start(reports.append)
    files.write(1, "", pack([1, 2, 3]))
    files.read(2, "", pack([1, 2, 3]))
    files.close()
    assert successes(reports) == [("Written", 1), ("Loaded", 2)]
    [path] = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.seek(-1000, 2)
        file.write(bytes(1000))
    assert torch.equal(host.state_of(host.get(2)), state)


def test_at_the_end_no_write_waits_for_a_copy_that_was_never_made(tmp_path: Path) -> None:
    reports = list[DiskReport]()
    files = StateFiles(tmp_path, "model", HostStates())
    files.start(reports.append)
    files.write(1, "", pack([1]))
    began = time.monotonic()
    files.close()
    assert time.monotonic() - began < 10
    [written] = reports
    assert isinstance(written, Written) and written.error


def test_consecutive_writes_share_one_sync_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write is reported after its bytes and name are on the disk; a failed write is reported for its file only."""
    host, reports, synced = host_states(4), list[DiskReport](), list[tuple[Path, int]]()
    for key in range(50):
        host.put(key, HostState(1, (torch.full((4,), key, dtype=torch.uint8),), ()))
    sync = storage.sync

    def noted_sync(path: Path) -> None:
        synced.append((path, len(reports)))
        sync(path)

    def failing(self: StateFiles, key: int, salt: str, tokens: bytes) -> None:
        if key == 7:
            raise OSError("no space left on the device")
        write(self, key, salt, tokens)

    write = StateFiles._write
    monkeypatch.setattr(storage, "sync", noted_sync)
    monkeypatch.setattr(StateFiles, "_write", failing)
    files = StateFiles(tmp_path, "model", host)
    for key in range(50):
        files.write(key, "", pack([key]))
    files.start(reports.append)
    files.close()
    assert reports == [Written(key, "no space left on the device" if key == 7 else "") for key in range(50)]
    assert synced[-1] == (tmp_path, 0) and [path for path, _ in synced].count(tmp_path) == 1
    assert len({path for path, _ in synced}) == 50 and len(list(tmp_path.iterdir())) == 49


def test_calls_for_one_file_are_carried_out_in_order(tmp_path: Path) -> None:
    host, reports = host_states(4), list[DiskReport]()
    for key in (1, 2):
        host.put(key, HostState(1, (torch.full((4,), key, dtype=torch.uint8),), ()))
    files = StateFiles(tmp_path, "model", host)
    files.write(1, "", pack([5]))
    files.write(2, "", pack([5]))
    files.read(3, "", pack([5]))
    files.delete("", pack([5]))
    files.write(2, "", pack([5]))
    files.delete("", pack([5]))
    files.start(reports.append)
    files.close()
    assert successes(reports) == [("Written", 1), ("Written", 2), ("Loaded", 3), ("Written", 2)]
    assert host.state_of(host.get(3)).tolist() == [2] * 4
    assert not list(tmp_path.iterdir())


COPIED = """
import os, threading, torch
from baton.actors.storage.files import copy_of

torch.set_num_threads(2)
given = [torch.randn(300, 1000), torch.randn(3, 2).bfloat16(), torch.empty(0, 4)]
tasks = lambda: len(os.listdir("/proc/self/task"))

def read():
    before = tasks()
    copies = [copy_of(tensor) for tensor in given]
    after = tasks()
    given[0].clone()
    counts.append((after - before, tasks() - after))
    assert all(torch.equal(copied, tensor) for copied, tensor in zip(copies, given))
    assert copies[0].data_ptr() != given[0].data_ptr()
    counts.append("equal")

counts = []
thread = threading.Thread(target=read)
thread.start()
thread.join()
assert counts == [(0, 1), "equal"], counts
"""


def test_torch_starts_no_threads_for_the_disk_s_thread() -> None:
    """Otherwise the disk's thread would get a libgomp team of its own, and slow down the device's threads."""
    subprocess.run([sys.executable, "-c", COPIED], check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "2"})

"""The folder of --session-dir: one holder, private, no lost or partial turns. Also how logs are written to files."""

import asyncio
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from baton.actors import tokens
from baton.api.config import ConfigError
from baton.api.errors import ApiError
from baton.api.sessions.files import SessionFiles
from baton.api.sessions.records import LogRecord, RewindRecord, encode
from baton.api.sessions.restore import highest_of, read_sessions, session_of
from baton.api.sessions.saver import Saver, SessionDisk
from tests.api.sessions.test_records import HEADER, some_records


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SessionFiles]:
    files = SessionFiles(tmp_path / "new" / "folder")
    yield files
    files.close()


def log_of(files: SessionFiles, key: str = "k") -> list[LogRecord]:
    return next(stored.records for stored in files.read_all() if stored.key == key)


def path_of(files: SessionFiles, key: str = "k") -> Path:
    return files._path(key)


def test_records_in_order(files: SessionFiles) -> None:
    records = some_records()
    size = files.replace("k", records[:2])
    for record in records[2:]:
        size += files.append("k", [record], size)
    assert log_of(files) == records
    assert path_of(files).stat().st_size == size
    files.replace("k", records[:1])
    assert log_of(files) == records[:1]
    files.delete("k")
    files.delete("k")
    assert list(files.read_all()) == []


def test_only_the_owner_may_read(files: SessionFiles, tmp_path: Path) -> None:
    files.replace("k", [HEADER])
    folder = tmp_path / "new" / "folder"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert modes == {"folder": 0o700, "sessions": 0o700, "lock": 0o600, "k.log": 0o600}


def test_one_server_holds_a_folder(tmp_path: Path) -> None:
    first = SessionFiles(tmp_path)
    with pytest.raises(ConfigError, match="is in use by another server"):
        SessionFiles(tmp_path)
    first.close()
    second = SessionFiles(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        first.replace("k", [HEADER])
    second.close()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--session-dir"):
        SessionFiles(tmp_path / "file")


def test_unfinished_files_are_removed(files: SessionFiles) -> None:
    files.replace("k", [HEADER])
    temporary = path_of(files).with_suffix(".tmp")
    temporary.write_bytes(b"half")
    assert [stored.key for stored in files.read_all()] == ["k"]
    assert not temporary.exists()


def test_a_torn_record_is_cut_off_and_the_file_is_continued(files: SessionFiles) -> None:
    files.replace("k", some_records())
    whole = path_of(files).stat().st_size
    os.truncate(path_of(files), whole - 3)
    with structlog.testing.capture_logs() as log:
        assert log_of(files) == some_records()[:-1]
    assert [(line["event"], line["log_level"]) for line in log] == [("a torn record is cut off", "warning")]
    files.append("k", some_records()[-1:], path_of(files).stat().st_size)
    assert log_of(files) == some_records()


@pytest.mark.parametrize("data", [b"", b"not a log", encode(some_records())[1:], encode([RewindRecord(1), HEADER])])
def test_a_damaged_file_is_set_aside(files: SessionFiles, data: bytes) -> None:
    files.replace("good", [HEADER])
    path_of(files).write_bytes(data)
    with structlog.testing.capture_logs() as log:
        assert [session.key for session, _ in read_sessions(files, 2**31, lambda: 0.0)] == ["good"]
    assert [line["event"] for line in log] == ["a session's file is set aside"]
    assert path_of(files).with_suffix(".damaged").read_bytes() == data
    assert not path_of(files).exists()


@pytest.mark.parametrize(
    "records",
    [[some_records()[1]], [HEADER, HEADER], [HEADER, RewindRecord(1)], [HEADER, some_records()[2]]],
    ids=["no header", "two", "rewound to nothing", "goes on from nothing"],
)
def test_records_that_contradict_each_other(files: SessionFiles, records: list[LogRecord]) -> None:
    files.replace("k", records)
    assert read_sessions(files, 2**31, lambda: 0.0) == []
    assert path_of(files).with_suffix(".damaged").exists()


def test_a_restored_session_equals_the_saved_one(files: SessionFiles) -> None:
    files.replace("k", some_records())
    os.utime(path_of(files), (path_of(files).stat().st_mtime - 60,) * 2)
    [(session, size)] = read_sessions(files, 2**31, lambda: 1000.0)
    assert size == path_of(files).stat().st_size
    assert (session.key, session.id, session.owner, session.salt) == ("k", "s", HEADER.owner, "salt")
    assert (session.head_number, session.highest_number, session.parent) == (3, 9, ("p", 3))
    assert 935 < session.used < 945
    assert list(session.turns_by_request) == ["turn-1", "turn-2", "turn-3"]
    assert session.records() == [record for record in some_records() if not isinstance(record, RewindRecord)]
    [stored] = files.read_all()
    session.head = session.turns_by_request["turn-1"]
    assert session.records()[-1] == RewindRecord(1)
    files.replace("k", session.records())
    [stored] = files.read_all()
    assert session_of(stored, lambda: 0.0).head_number == 1


def test_of_sessions_with_one_id_the_later_counts(files: SessionFiles) -> None:
    for key, age in (("a", 9), ("b", 5), ("c", 7)):
        files.replace(key, [HEADER])
        os.utime(path_of(files, key), (time.time() - age,) * 2)
    assert [session.key for session, _ in read_sessions(files, 2**31, lambda: 0.0)] == ["b"]
    assert not path_of(files, "a").exists() and not path_of(files, "c").exists()


def test_a_session_of_another_model_is_left_alone(files: SessionFiles) -> None:
    files.replace("k", some_records())
    with structlog.testing.capture_logs() as log:
        assert read_sessions(files, 2**31 - 1, lambda: 0.0) == []
    assert [line["event"] for line in log] == ["a session is of another model"]
    assert path_of(files).exists()
    assert (highest_of(b""), highest_of(tokens.pack([3, 9, 4]))) == (0, 9)


# Writing logs

pytest_anyio = pytest.mark.anyio


class Log:
    """A session's log records, and the saver that writes them to files."""

    def __init__(self, files: SessionFiles, cap: int = 2**30) -> None:
        self.records: list[LogRecord] = [HEADER]
        self.full = 0
        self.disk = SessionDisk(files, cap, self._on_full)
        self.saver = Saver(self.disk, "k", lambda: list(self.records))
        self.saver.rewrite()

    def add(self, number: int) -> None:
        self.records.append(RewindRecord(number))
        self.saver.append(RewindRecord(number))

    def _on_full(self) -> None:
        self.full += 1


@pytest_anyio
async def test_saved_means_on_the_disk(files: SessionFiles) -> None:
    log = Log(files)
    for number in range(5):
        log.add(number)
        log.add(number)
        await log.saver.wait_saved()
        assert log_of(files) == log.records
        assert log.disk.used == path_of(files).stat().st_size
    log.saver.delete()
    await log.saver.wait_saved()
    assert (list(files.read_all()), log.disk.used) == ([], 0)


@pytest_anyio
async def test_notes_of_a_time_go_together(files: SessionFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    log, gate, syncs = Log(files), threading.Event(), 0
    await log.saver.wait_saved()
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1
        assert gate.wait(10)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    log.add(1)
    await asyncio.sleep(0.01)
    for number in range(2, 9):
        log.add(number)
    gate.set()
    await log.saver.wait_saved()
    assert log_of(files) == log.records
    assert syncs == 2


@pytest_anyio
@pytest.mark.parametrize("call", ["write", "fsync"])
async def test_after_an_error_the_whole_log_is_written(
    files: SessionFiles, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    log = Log(files)
    log.add(1)
    await log.saver.wait_saved()

    def fail(descriptor: int, *data: memoryview) -> int:
        if call == "write":
            real_write(descriptor, data[0][:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    real_write = os.write
    for number in (2, 3):
        with monkeypatch.context() as broken, structlog.testing.capture_logs() as lines:
            broken.setattr(os, call, fail)
            log.add(number)
            with pytest.raises(ApiError, match="No space left") as raised:
                await log.saver.wait_saved()
        assert (raised.value.status, raised.value.code) == (507, "session_not_saved")
        assert [line["event"] for line in lines] == ["a session is not saved"]
        assert log.records[:2] == log_of(files)[:2]
    log.add(4)
    await log.saver.wait_saved()
    assert log_of(files) == log.records
    assert log.disk.used == path_of(files).stat().st_size


@pytest_anyio
async def test_a_deleted_log_is_not_written_again(files: SessionFiles) -> None:
    log = Log(files)
    log.add(1)
    log.saver.delete()
    log.add(2)
    await log.saver.wait_saved()
    log.add(3)
    await log.saver.wait_saved()
    assert (list(files.read_all()), log.disk.used) == ([], 0)


@pytest_anyio
async def test_a_full_disk_is_reported(files: SessionFiles) -> None:
    log = Log(files, cap=path_size(HEADER) + path_size(RewindRecord(1)))
    log.add(1)
    await log.saver.wait_saved()
    assert log.full == 0
    log.add(2)
    await log.saver.wait_saved()
    assert log.full == 1


def path_size(record: LogRecord) -> int:
    return len(encode([record]))

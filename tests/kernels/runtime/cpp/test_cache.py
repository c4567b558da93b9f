"""The cache of libraries: its folder, the folder's owner and mode, and damaged files."""

import os
from pathlib import Path

import pytest

from baton.kernels.runtime.cpp.cache import CacheError, cache_folder, fetch, open_folder


def test_the_folder_follows_the_environment() -> None:
    assert cache_folder({"BATON_CACHE": "/b", "XDG_CACHE_HOME": "/x"}) == Path("/b")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/baton")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "baton"
    assert cache_folder({}) == Path.home() / ".cache" / "baton"


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "home" / ".cache" / "baton"
    open_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    open_folder(folder)


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o701, 0o1700, 0o500])
def test_a_folder_that_others_can_use_or_that_cannot_be_written_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "baton"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CacheError, match=f"mode {mode:o}"):
        open_folder(folder)


def test_a_foreign_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "baton"
    open_folder(folder)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(CacheError, match=f"belongs to user {owner}"):
        open_folder(folder)


def test_only_a_real_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file", "file/below"):
        with pytest.raises(CacheError, match=name):
            open_folder(tmp_path / name)


def test_a_library_is_built_again_only_if_its_file_is_damaged(tmp_path: Path) -> None:
    built = list[Path]()

    def build(path: Path) -> None:
        built.append(path)
        path.write_bytes(b"code")

    first = fetch(tmp_path, "v4-abc", build)
    assert fetch(tmp_path, "v4-abc", build) == first
    assert len(built) == 1
    assert fetch(tmp_path, "v4-def", build) != first
    first.write_bytes(b"cod")
    (tmp_path / "v4-abc.123.new").write_bytes(b"of a process that was killed")
    assert fetch(tmp_path, "v4-abc", build).read_bytes() == b"code"
    assert len(built) == 3
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".so") == ["lock"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half of it")
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        fetch(tmp_path, "key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]

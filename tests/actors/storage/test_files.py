"""State files by themselves: what is read is the reader's own, and nobody waits for a copy that will not be made."""

import time
from pathlib import Path

import torch

from actors.messages import Loaded, Written
from actors.storage.files import StateFiles
from actors.storage.host_memory import HostState, HostStates
from actors.tokens import pack


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    host, told = HostStates(), list[Written | Loaded]()
    state = torch.randn(64, 64)
    host.put(1, HostState(3, [state], []))
    files = StateFiles(tmp_path, "model", host)
    files.start(told.append)
    files.write(1, "", pack([1, 2, 3]))
    files.read(2, "", pack([1, 2, 3]))
    files.close()
    assert told == [Written(1), Loaded(2)]
    [path] = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.seek(-1000, 2)
        file.write(bytes(1000))
    assert torch.equal(host.get(2).state[0], state)


def test_at_the_end_nobody_waits_for_a_copy_that_was_never_made(tmp_path: Path) -> None:
    told = list[Written | Loaded]()
    files = StateFiles(tmp_path, "model", HostStates())
    files.start(told.append)
    files.write(1, "", pack([1]))
    began = time.monotonic()
    files.close()
    assert time.monotonic() - began < 10
    [written] = told
    assert isinstance(written, Written) and written.error

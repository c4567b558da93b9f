"""States in files: one safetensors file each, versioned and checksummed, written whole or not at all."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from baton.actors.messages import Cleared, DiskReport, Loaded, Written
from baton.actors.storage.disk import StateFile
from baton.actors.storage.host_memory import HostStates
from baton.actors.tokens import Tokens, count

FORMAT, VERSION = "baton-state", "2"
COPY_TIMEOUT_S = 60.0
WRITERS, MOST_TOGETHER = 8, 64
FOREIGN = "it is of another model, or of another --state-dtype"
SUFFIX, UNFINISHED = ".safetensors", ".tmp"


class StateFileError(Exception):
    """A file is damaged, of another format, or of another model."""


@dataclass(frozen=True, slots=True)
class StateFileHeader:
    """What the metadata of a file says of it. checksum: of all tensors, in the order of their names."""

    salt: str
    model: str
    checksum: str

    def to_metadata(self) -> dict[str, str]:
        salt = json.dumps(self.salt)
        return {"format": FORMAT, "version": VERSION, "salt": salt, "model": self.model, "checksum": self.checksum}


class StateFiles:
    """The disk of the cache: its calls are carried out in order on a thread of their own, from `start` to `close`.

    Writes behind one another are carried out together, as most of their time goes into waiting for the disk.
    folder: holds nothing else; it is made anew where it is gone, but not what it stands in. model: what tells states
    of this model from those of others.
    Files are `<digest of salt and tokens>.safetensors`: `tokens` int32 [position], `state` uint8, a slot as it lies in
    the pool, and `kv.i`, what the i-th page tensor holds of `position` tokens.
    """

    def __init__(self, folder: Path, model: str, host: HostStates) -> None:
        self._folder, self._model, self._host = folder, model, host
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._together: dict[tuple[str, Tokens], int] | None = None
        self._changing = threading.Lock()
        self._deliver: Callable[[DiskReport], None] = lambda message: None
        self._found: list[StateFile] = []

    def start(self, deliver: Callable[[DiskReport], None]) -> None:
        """deliver: is called from the thread."""
        self._deliver = deliver
        self._thread = threading.Thread(target=self._work, name="disk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish what was asked for, then end the thread. The device has made all the copies that it will."""
        self._host.complete()
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def scan(self) -> None:
        """Look at the files, which may take a while. What is unfinished, damaged or of another model is deleted.

        Raises OSError.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._folder.glob(f"*{UNFINISHED}*"):
            path.unlink()
        paths = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        self._found = list(self._sound(paths))

    def scan_again(self) -> None:
        """The same when the actors are made anew; what cannot be looked at is as if it were not there."""
        try:
            self.scan()
        except OSError as error:
            structlog.get_logger().error("state files cannot be looked at", error=str(error))

    def files(self) -> Sequence[StateFile]:
        """Oldest first, as they were found a moment ago; at once, as it is called on the event loop."""
        found, self._found = self._found, []
        return found

    def write(self, key: int, salt: str, tokens: Tokens) -> None:
        with self._changing:
            together = self._together
            if together is None or (salt, tokens) in together or len(together) == MOST_TOGETHER:
                self._together = together = {}
                self._calls.put(partial(self._write_all, together))
            together[salt, tokens] = key

    def read(self, key: int, salt: str, tokens: Tokens) -> None:
        self._put(lambda: self._deliver(self._load(key, salt, tokens)))

    def delete(self, salt: str, tokens: Tokens) -> None:
        self._put(lambda: self._path(salt, tokens).unlink(missing_ok=True))

    def clear(self, ticket: int) -> None:
        self._put(lambda: self._deliver(Cleared(ticket)))

    def _put(self, call: Callable[[], None]) -> None:
        """Later writes are to be behind it."""
        with self._changing:
            self._together = None
            self._calls.put(call)

    # On the thread

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except OSError as error:
                structlog.get_logger().warning("a state file could not be deleted", error=str(error))

    def _write_all(self, together: dict[tuple[str, Tokens], int]) -> None:
        """And then bring their names to the disk, once for all of them."""
        with self._changing:
            if self._together is together:
                self._together = None
        errors = self._attempts([partial(self._write, key, *name) for name, key in together.items()])
        unsynced = "" if all(errors) else self._attempt(lambda: sync(self._folder))
        for key, error in zip(together.values(), errors, strict=True):
            self._deliver(Written(key, error or unsynced))

    def _load(self, key: int, salt: str, tokens: Tokens) -> Loaded:
        began = time.perf_counter()
        error = self._attempt(lambda: self._read(key, salt, tokens))
        return Loaded(key, error, time.perf_counter() - began)

    def _attempts(self, calls: Sequence[Callable[[], None]]) -> list[str]:
        """Side by side. Where no thread can be had, all have failed."""
        try:
            with ThreadPoolExecutor(min(WRITERS, len(calls)), "state-file") as threads:
                return list(threads.map(self._attempt, calls))
        except Exception as error:
            structlog.get_logger().warning("state files failed", error=f"{type(error).__name__}: {error}")
            return [str(error) or type(error).__name__] * len(calls)

    def _attempt(self, call: Callable[[], None]) -> str:
        try:
            call()
        except Exception as error:
            structlog.get_logger().warning("a state file failed", error=f"{type(error).__name__}: {error}")
            return str(error) or type(error).__name__
        return ""

    def _write(self, key: int, salt: str, tokens: Tokens) -> None:
        copy = self._host.wait_for(key, COPY_TIMEOUT_S)
        if copy is None:
            raise StateFileError(f"copy {key} was not made, or not within {COPY_TIMEOUT_S:.0f} s")
        tensors = to_tensors(tokens, copy.state, self._host.kv_of(copy))
        path = self._path(salt, tokens)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = path.with_suffix(UNFINISHED)
        try:
            save_file(tensors, unfinished, StateFileHeader(salt, self._model, checksum(tensors)).to_metadata())
            unfinished.chmod(0o600)
            sync(unfinished)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _read(self, key: int, salt: str, tokens: Tokens) -> None:
        path = self._path(salt, tokens)
        try:
            header, tensors = read_file(path)
            if (header.salt, header.model) != (salt, self._model):
                raise StateFileError(FOREIGN)
            if checksum(tensors) != header.checksum:
                raise StateFileError("its checksum is wrong")
            if tensors["tokens"].numpy().tobytes() != tokens:
                raise StateFileError("its tokens are not those of its name")
            copy = self._host.from_kv(count(tokens), *of_tensors(tensors))
        except (StateFileError, SafetensorError, KeyError, ValueError) as error:
            path.unlink(missing_ok=True)
            raise StateFileError(f"{path.name}: {error}") from error
        self._host.put(key, copy)

    def _sound(self, paths: list[Path]) -> Iterator[StateFile]:
        log = structlog.get_logger()
        for path in paths:
            try:
                header, tokens = read_tokens(path)
                if header.model != self._model or path != self._path(header.salt, tokens):
                    raise StateFileError(FOREIGN)
                yield StateFile(header.salt, tokens, path.stat().st_size)
            except (StateFileError, SafetensorError, OSError) as error:
                log.warning("a state file is of no use and was deleted", file=path.name, error=str(error))
                path.unlink(missing_ok=True)

    def _path(self, salt: str, tokens: Tokens) -> Path:
        digest = hashlib.blake2b(self._model.encode(), digest_size=20)
        digest.update(json.dumps([salt, count(tokens)]).encode())
        digest.update(tokens)
        return self._folder / f"{digest.hexdigest()}{SUFFIX}"


def to_tensors(tokens: Tokens, state: Tensor, kv: list[Tensor]) -> dict[str, Tensor]:
    named = {"tokens": torch.frombuffer(bytearray(tokens), dtype=torch.int32), "state": state}
    return named | {f"kv.{index}": tensor for index, tensor in enumerate(kv)}


def of_tensors(tensors: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The state, and the KV."""
    return tensors["state"], [tensors[f"kv.{index}"] for index in range(len(tensors) - 2)]


def read_file(path: Path) -> tuple[StateFileHeader, dict[str, Tensor]]:
    """Raises StateFileError, SafetensorError, OSError."""
    with safe_open(path, "pt") as file:
        # What it gives is a view of the file, which may change or go.
        return read_header(file), {name: copy_of(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def copy_of(tensor: Tensor) -> Tensor:
    """Not by torch, which would give the disk's thread a team of threads: see TorchDevice."""
    copied = torch.empty_like(tensor)
    copied.view(-1).view(torch.uint8).numpy()[:] = tensor.view(-1).view(torch.uint8).numpy()
    return copied


def read_tokens(path: Path) -> tuple[StateFileHeader, Tokens]:
    """Of a file without its states. Raises as read_file."""
    with safe_open(path, "pt") as file:
        header = read_header(file)
        if "tokens" not in file.keys():  # noqa: SIM118
            raise StateFileError("it holds no tokens")
        return header, file.get_tensor("tokens").numpy().tobytes()


def read_header(file: Any) -> StateFileHeader:
    found: dict[str, str] = file.metadata() or {}
    if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise StateFileError(f"it is not of the format {FORMAT} {VERSION}")
    try:
        return StateFileHeader(json.loads(found["salt"]), found["model"], found["checksum"])
    except (KeyError, ValueError) as error:
        raise StateFileError(f"its header is incomplete: {error}") from None


def checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

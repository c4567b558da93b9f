"""States in files: one safetensors file for each state, with a version and a checksum, written whole or not at all."""

import hashlib
import json
import os
import stat
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
COPY_TIMEOUT_S = 60.0  # how long a write waits for its copy in host memory to be made
WRITERS, MOST_TOGETHER = 8, 64  # threads that write the files of one batch, and the most files of a batch
FOREIGN = "it is of another model, or of another --state-dtype"
SUFFIX, UNFINISHED = ".safetensors", ".tmp"


class StateFileError(Exception):
    """The error of a state file that is damaged, of another format, or of another model."""


@dataclass(frozen=True, slots=True)
class StateFileHeader:
    """The metadata of a state file."""

    salt: str
    model: str  # fingerprint of the model and the layout of its states
    checksum: str  # digest of all tensors, in the order of their names

    def to_metadata(self) -> dict[str, str]:
        salt = json.dumps(self.salt)
        return {"format": FORMAT, "version": VERSION, "salt": salt, "model": self.model, "checksum": self.checksum}


class StateFiles:
    """The DiskThread of the server: its calls are carried out in order on one thread, from `start` to `close`.

    Consecutive writes are carried out as one batch, because most of their time is spent waiting for the disk.

    A file is named `<digest of model, salt and tokens>.safetensors`. It holds these tensors:

    tokens: int32 [position]
    state: uint8 [bytes of a slot], as in the pool
    kv.0, kv.1, …: one for each page tensor of the model: [position, ...], the KV entries of all tokens
    """

    def __init__(self, folder: Path, model: str, host: HostStates) -> None:
        """folder: the folder of the state files, which holds nothing else; created if missing, but not its parent

        model: fingerprint of the model; files with another fingerprint are deleted
        host: the copies in host memory, which files are written from and read into
        """
        self._folder, self._model, self._host = folder, model, host
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # The batch that later writes can still join: the keys of its copies, by salt and tokens.
        self._batch: dict[tuple[str, Tokens], int] | None = None
        self._changing = threading.Lock()
        self._deliver: Callable[[DiskReport], None] = lambda message: None
        self._found: list[StateFile] = []

    def start(self, deliver: Callable[[DiskReport], None]) -> None:
        """Start the thread. deliver: receives the answers; it is called on that thread."""
        self._deliver = deliver
        self._thread = threading.Thread(target=self._work, name="disk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Carry out all calls so far, then end the thread. Call it only after the device has made its last copy."""
        self._host.complete()
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def scan(self) -> None:
        """Scan all files, and delete each that is unfinished, unreadable or of another model. This may take a while.

        Raise OSError if the folder cannot be created or read.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._folder.glob(f"*{UNFINISHED}*"):
            delete(path)
        paths = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.lstat().st_mtime_ns)
        self._found = list(self._sound(paths))

    def scan_again(self) -> None:
        """Scan the files before the actors are restarted. If that fails, all files are treated as missing."""
        try:
            self.scan()
        except OSError as error:
            structlog.get_logger().error("state files cannot be looked at", error=str(error))

    def files(self) -> Sequence[StateFile]:
        """Return the files that the last scan found, the oldest first. Does not block: the event loop calls it."""
        found, self._found = self._found, []
        return found

    def write(self, key: int, salt: str, tokens: Tokens) -> None:
        """Add a write to the waiting batch; begin a new batch if none waits, or if it is full or has this file."""
        with self._changing:
            batch = self._batch
            if batch is None or (salt, tokens) in batch or len(batch) == MOST_TOGETHER:
                self._batch = batch = {}
                self._calls.put(partial(self._write_all, batch))
            batch[salt, tokens] = key

    def read(self, key: int, salt: str, tokens: Tokens) -> None:
        self._put(lambda: self._deliver(self._load(key, salt, tokens)))

    def delete(self, salt: str, tokens: Tokens) -> None:
        self._put(lambda: self._path(salt, tokens).unlink(missing_ok=True))

    def clear(self, ticket: int) -> None:
        self._put(lambda: self._deliver(Cleared(ticket)))

    def _put(self, call: Callable[[], None]) -> None:
        """Enqueue a call, and close the waiting batch: later writes must come after this call."""
        with self._changing:
            self._batch = None
            self._calls.put(call)

    # On the disk's thread

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except OSError as error:
                structlog.get_logger().warning("a state file could not be deleted", error=str(error))

    def _write_all(self, batch: dict[tuple[str, Tokens], int]) -> None:
        """Write the files of a batch, then sync the folder once so that their names are on the disk too."""
        with self._changing:
            if self._batch is batch:
                self._batch = None
        errors = self._attempts([partial(self._write, key, *name) for name, key in batch.items()])
        sync_error = "" if all(errors) else self._attempt(lambda: sync(self._folder))
        for key, error in zip(batch.values(), errors, strict=True):
            self._deliver(Written(key, error or sync_error))

    def _load(self, key: int, salt: str, tokens: Tokens) -> Loaded:
        began = time.perf_counter()
        error = self._attempt(lambda: self._read(key, salt, tokens))
        return Loaded(key, error, time.perf_counter() - began)

    def _attempts(self, calls: Sequence[Callable[[], None]]) -> list[str]:
        """Run the calls on several threads; return the error text of each, "" for success.

        If the threads cannot be started, every call counts as failed.
        """
        try:
            with ThreadPoolExecutor(min(WRITERS, len(calls)), "state-file") as threads:
                return list(threads.map(self._attempt, calls))
        except Exception as error:
            structlog.get_logger().warning("state files failed", error=f"{type(error).__name__}: {error}")
            return [str(error) or type(error).__name__] * len(calls)

    def _attempt(self, call: Callable[[], None]) -> str:
        """Run a call; return its error text, or "" if it succeeds."""
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
        tensors = to_tensors(tokens, self._host.state_of(copy), self._host.kv_of(copy))
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
            if tokens_in(tensors["tokens"]) != tokens:
                raise StateFileError("its tokens are not those of its name")
            copy = self._host.from_kv(count(tokens), *of_tensors(tensors))
        except (StateFileError, SafetensorError, KeyError, ValueError) as error:
            path.unlink(missing_ok=True)
            raise StateFileError(f"{path.name}: {error}") from error
        self._host.put(key, copy)

    def _sound(self, paths: list[Path]) -> Iterator[StateFile]:
        """Yield the files that can be used, and delete the others."""
        log = structlog.get_logger()
        for path in paths:
            try:
                header, tokens = read_tokens(path)
                if header.model != self._model or path != self._path(header.salt, tokens):
                    raise StateFileError(FOREIGN)
                yield StateFile(header.salt, tokens, path.stat().st_size)
            except (StateFileError, SafetensorError, OSError) as error:
                log.warning("a state file is of no use and was deleted", file=path.name, error=str(error))
                delete(path)

    def _path(self, salt: str, tokens: Tokens) -> Path:
        digest = hashlib.blake2b(self._model.encode(), digest_size=20)
        digest.update(json.dumps([salt, count(tokens)]).encode())
        digest.update(tokens)
        return self._folder / f"{digest.hexdigest()}{SUFFIX}"


def to_tensors(tokens: Tokens, state: Tensor, kv: list[Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file by name."""
    named = {"tokens": torch.frombuffer(bytearray(tokens), dtype=torch.int32), "state": state}
    return named | {f"kv.{index}": tensor for index, tensor in enumerate(kv)}


def of_tensors(tensors: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the state and the KV from the tensors of a file."""
    return tensors["state"], [tensors[f"kv.{index}"] for index in range(len(tensors) - 2)]


def read_file(path: Path) -> tuple[StateFileHeader, dict[str, Tensor]]:
    """Return the header and all tensors of a file. Raise StateFileError, SafetensorError or OSError if that fails."""
    check_regular(path)
    with safe_open(path, "pt") as file:
        # Copy each tensor: get_tensor returns a view of the mapped file, which may change or be deleted.
        return read_header(file), {name: copy_of(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (no dict)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, made by numpy: torch would start a team of threads for the disk's thread."""
    copied = torch.empty_like(tensor)
    copied.view(-1).view(torch.uint8).numpy()[:] = tensor.view(-1).view(torch.uint8).numpy()
    return copied


def read_tokens(path: Path) -> tuple[StateFileHeader, Tokens]:
    """Return the header and the tokens of a file without reading the state. Raise the same errors as `read_file`."""
    check_regular(path)
    with safe_open(path, "pt") as file:
        header = read_header(file)
        if "tokens" not in file.keys():  # noqa: SIM118 (the file of safetensors is no dict)
            raise StateFileError("it holds no tokens")
        return header, tokens_in(file.get_tensor("tokens"))


def tokens_in(tensor: Tensor) -> Tokens:
    """Return the tokens of a file. Raise StateFileError if the tensor is no sequence of at least one token."""
    if tensor.dtype != torch.int32 or tensor.dim() != 1 or not len(tensor):
        raise StateFileError(f"its tokens are {tensor.dtype} {list(tensor.shape)}")
    return tensor.numpy().tobytes()


def check_regular(path: Path) -> None:
    """Raise StateFileError for what is no regular file: a FIFO would be read for ever. Raise OSError for no file."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise StateFileError("it is no regular file")


def delete(path: Path) -> None:
    """Delete a file that is of no use. Log a failure: a folder in its place, for example, stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        structlog.get_logger().warning("a state file could not be deleted", file=path.name, error=str(error))


def read_header(file: Any) -> StateFileHeader:
    """Return the header of an open file. Raise StateFileError if the header is incomplete or of another format."""
    found: dict[str, str] = file.metadata() or {}
    if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise StateFileError(f"it is not of the format {FORMAT} {VERSION}")
    try:
        salt = json.loads(found["salt"])
        if not isinstance(salt, str):
            raise ValueError(f"its salt is {type(salt).__name__}, not str")
        return StateFileHeader(salt, found["model"], found["checksum"])
    except (KeyError, ValueError, RecursionError) as error:
        raise StateFileError(f"its header is invalid: {error}") from None


def checksum(tensors: dict[str, Tensor]) -> str:
    """Return a digest of the names, dtypes, shapes and contents of all tensors."""
    digest = hashlib.blake2b(digest_size=20)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

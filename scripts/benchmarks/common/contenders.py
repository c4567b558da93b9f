"""Who is measured: Baton through its server, its bare loop, and the peers that are installed, from the same weights."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from scripts.benchmarks.common.server import Served
from scripts.benchmarks.common.shapes import checkpoint_of
from scripts.benchmarks.peers.environments import how_to_install, python_of
from scripts.benchmarks.peers.process import HERE, Peer

# By kind, the variants: of weights, or of what OpenVINO computes with (int8 weights go with float32).
VARIANTS = {
    "bare": ("",),
    "transformers": ("auto", "float32"),
    "llama.cpp": ("bf16", "q8_0", "q4_0", "f32"),
    "openvino": ("int8", "bf16", "f32"),
}
STEP_TOKENS = 512
# All contenders hold theirs at once; a server alone would take most of what is free.
MEMORY = ("--memory", "2G", "--host-memory", "512M")


class Contender(Protocol):
    def prefill(self, prompt: list[int]) -> float:
        """Tokens a second until the first token of the answer."""
        ...

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Tokens a second, of all prompts together, while all of them are being answered."""
        ...


@dataclass(frozen=True)
class Entry:
    """A contender as it was named: [NAME=]KIND[:VARIANT]. Of baton the variant is options for its server."""

    name: str
    kind: str
    variant: str

    @classmethod
    def parse(cls, text: str) -> "Entry":
        """ValueError, which says what there is, for what is none."""
        name, named, rest = text.partition("=") if "=" in text.partition(":")[0] else ("", "", text)
        kind, _, variant = rest.partition(":")
        if named and not name:
            raise ValueError(f"{text!r} has no name before its =")
        if kind == "baton":
            return cls(name or rest, kind, variant)
        if kind not in VARIANTS:
            raise ValueError(f"{kind!r} is no contender: there are baton, {', '.join(VARIANTS)}")
        variant = variant or VARIANTS[kind][0]
        if variant not in VARIANTS[kind]:
            raise ValueError(f"{kind} has no variant {variant!r}, but {', '.join(VARIANTS[kind])}")
        return cls(name or (rest if ":" in rest or kind == "bare" else f"{kind}:{variant}"), kind, variant)

    def with_options(self, more: str) -> "Entry":
        """Of Baton's server; others stay as they are."""
        if self.kind != "baton" or not more:
            return self
        return Entry(self.name, self.kind, f"{self.variant} {more}".strip())

    @property
    def options(self) -> list[str]:
        """Of Baton's server."""
        return shlex.split(self.variant) if self.kind == "baton" else []

    def option(self, name: str, default: str) -> str:
        """Of Baton's server, given as one word or as two."""
        words = [word for option in self.options for word in option.split("=", 1)]
        return words[words.index(name) + 1] if name in words[:-1] else default

    def weights(self) -> str:
        """Which of floors.BITS its weights take."""
        if self.kind == "baton":
            return self.option("--quantize", "bf16")
        by_variant = {"auto": "bf16", "float32": "f32", "": "bf16"}
        return by_variant.get(self.variant, self.variant)

    def state_bytes(self) -> int:
        """A number of its states."""
        return 2 if self.option("--state-dtype", "float32") == "bfloat16" else 4


def read_entry(text: str) -> Entry:
    """Entry.parse for argparse, which shows what this error says."""
    try:
        return Entry.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class Workbench:
    """What contenders are opened with. folder: where weights are kept, in every form that was asked for."""

    config: dict[str, Any]
    folder: Path
    threads: int
    rows: int

    @property
    def checkpoint(self) -> Path:
        """Made when it is first asked for."""
        return checkpoint_of(self.config, self.folder)

    @property
    def made(self) -> Path:
        """Where lies what peers make of the checkpoint."""
        path = self.folder / self.checkpoint.name
        path.mkdir(exist_ok=True, parents=True)
        return path

    def log(self, name: str) -> Path:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        return self.folder / "logs" / "".join(letter if letter.isalnum() else "-" for letter in name)

    def missing(self, entry: Entry) -> str:
        """Why it cannot be measured; empty if it can."""
        if entry.kind in ("baton", "bare"):
            return ""
        if python_of(entry.kind) is None:
            return how_to_install(entry.kind)
        if entry.kind == "openvino" and self.config["model_type"] == "mamba2":
            return "optimum-intel exports no mamba2, so openvino is left out"
        return ""

    @contextmanager
    def open(self, entry: Entry) -> Iterator[Contender]:
        if entry.kind == "baton":
            with self.serve(entry) as served:
                yield served
        else:
            with self.peer(entry) as peer:
                yield peer

    def serve(self, entry: Entry, *more: str) -> Served:
        flags = ["--max-running", str(self.rows), "--step-tokens", str(STEP_TOKENS), *MEMORY, "--log-format", "json"]
        return Served(self.checkpoint, self.threads, [*flags, *more, *entry.options], self.log(entry.name))

    def peer(self, entry: Entry) -> Peer:
        log, threads, rows = self.log(entry.name), str(self.threads), str(self.rows)
        if entry.kind == "bare":
            arguments = [str(self.checkpoint), threads, rows, str(STEP_TOKENS)]
            return Peer(sys.executable, "run_bare.py", arguments, self.threads, log)
        python = python_of(entry.kind)
        assert python is not None
        if entry.kind == "transformers":
            return Peer(
                python, "run_transformers.py", [str(self.checkpoint), threads, entry.variant], self.threads, log
            )
        if entry.kind == "llama.cpp":
            arguments = [str(self.gguf(entry.variant)), threads, rows]
            return Peer(python, "run_llama_cpp.py", arguments, self.threads, log)
        exported = str(self.openvino() / ("int8" if entry.variant == "int8" else "plain"))
        precision = "bf16" if entry.variant == "bf16" else "f32"
        return Peer(python, "run_openvino.py", [exported, threads, rows, precision], self.threads, log)

    def gguf(self, kind: str) -> Path:
        """The weights for llama.cpp."""
        file = self.made / f"{kind}.gguf"
        if not file.exists():
            self._make("llama.cpp", "write_gguf.py", file.with_suffix(".part"), kind)
            file.with_suffix(".part").rename(file)
        return file

    def openvino(self) -> Path:
        """A folder with the exports for OpenVINO."""
        folder = self.made / "openvino"
        if not folder.exists():
            self._make("openvino", "export_openvino.py", folder.with_suffix(".part"))
            folder.with_suffix(".part").rename(folder)
        return folder

    def _make(self, peer: str, script: str, target: Path, *more: str) -> None:
        """By a script in the peer's environment; RuntimeError with what it said if it fails."""
        print(f"making {target.stem} for {peer} ...", flush=True)
        python = python_of(peer)
        assert python is not None
        command = [python, str(HERE / script), str(self.checkpoint), str(target), *more]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stderr[-2000:]}")

"""Contenders, the engines that are compared: Baton's server, Baton's bare loop (common/bare.py), and installed peers.

All have the same weights. A peer is an engine of another project. The kind "gguf" is Baton's server with the GGUF file
that llama.cpp gets; options of the server may follow its variant, as in "gguf:q4_k --activation-dtype int8".
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from scripts.benchmarks.common.server import Served
from scripts.benchmarks.common.shapes import checkpoint_of
from scripts.benchmarks.peers.environments import how_to_install, python_of
from scripts.benchmarks.peers.process import HERE, Peer

# Variants of each kind of contender, the default first. A variant is a type of weights, except for OpenVINO: there
# "bf16" and "f32" are the types that it computes in, and "int8" means int8 weights and float32 activations.
VARIANTS = {
    "bare": ("",),
    "transformers": ("auto", "float32"),
    "llama.cpp": ("bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "f32"),
    "gguf": ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "bf16", "f32"),
    "openvino": ("int8", "bf16", "f32"),
}
SERVED = ("baton", "gguf")
"""The kinds that are Baton's server."""
BY_LLAMA_CPP = ("q4_k", "q5_k", "q6_k")  # types that only llama.cpp itself quantizes to
STEP_TOKENS = 512
# Limits for Baton's server, which takes most of the free memory by default: all contenders are open at once.
MEMORY = ("--memory", "2G", "--host-memory", "512M")


class Contender(Protocol):
    """An engine that is open and ready to be measured."""

    def prefill(self, prompt: list[int]) -> float:
        """Return prompt tokens per second; the time ends with the first token of the answer."""
        ...

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Return tokens per second, summed over all rows, while all of them decode."""
        ...


@dataclass(frozen=True)
class Entry:
    """A contender as named on the command line: [NAME=]KIND[:VARIANT]."""

    name: str  # heading of the contender's column in tables
    kind: str  # "baton" or a key of VARIANTS
    variant: str  # one of VARIANTS[kind]; "" if the kind is "baton"
    options: tuple[str, ...] = ()  # of Baton's server, for the kinds "baton" and "gguf"

    @classmethod
    def parse(cls, text: str) -> "Entry":
        """Parse [NAME=]KIND[:VARIANT]. Raises ValueError, which lists the valid kinds or variants."""
        name, equals, rest = text.partition("=") if "=" in text.partition(":")[0] else ("", "", text)
        kind, _, variant = rest.partition(":")
        options = ""
        if kind in SERVED:
            variant, _, options = ("", "", variant) if kind == "baton" else variant.partition(" ")
        if equals and not name:
            raise ValueError(f"{text!r} has no name before its =")
        if kind == "baton":
            return cls(name or rest, kind, "", tuple(shlex.split(options)))
        if kind not in VARIANTS:
            raise ValueError(f"{kind!r} is no contender: there are baton, {', '.join(VARIANTS)}")
        variant = variant or VARIANTS[kind][0]
        if variant not in VARIANTS[kind]:
            raise ValueError(f"{kind} has no variant {variant!r}, but {', '.join(VARIANTS[kind])}")
        name = name or (rest if ":" in rest or kind == "bare" else f"{kind}:{variant}")
        return cls(name, kind, variant, tuple(shlex.split(options)))

    def with_options(self, more: str) -> "Entry":
        """Return this entry with more options for Baton's server. Entries of other kinds are returned as they are."""
        if self.kind not in SERVED:
            return self
        return replace(self, options=(*self.options, *shlex.split(more)))

    def option(self, name: str, default: str) -> str:
        """Return the value of an option of Baton's server, whether it is one word (--x=y) or two."""
        words = [word for option in self.options for word in option.split("=", 1)]
        return words[words.index(name) + 1] if name in words[:-1] else default

    def weights(self) -> str:
        """Return the type of the contender's weights, a key of floors.BITS."""
        if self.kind == "baton":
            return self.option("--quantize", "bf16")
        by_variant = {"auto": "bf16", "float32": "f32", "": "bf16"}
        return by_variant.get(self.variant, self.variant)

    def state_bytes(self) -> int:
        """Return the bytes of one number of the contender's recurrent states."""
        return 2 if self.option("--state-dtype", "float32") == "bfloat16" else 4


def read_entry(text: str) -> Entry:
    """Parse like Entry.parse, but raise ArgumentTypeError, because argparse shows the text of this error."""
    try:
        return Entry.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class StoreEntries(argparse.Action):
    """Store contenders. Two with the same name are an error, because each name has one column."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _: Any = None
    ) -> None:
        names = [entry.name for entry in values]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise argparse.ArgumentError(self, f"two contenders have the name {twice}: write NAME=... for one of them")
        setattr(namespace, self.dest, values)


def add_contenders(parser: argparse.ArgumentParser) -> None:
    """Add the option --contenders: a list of Entry, or None if it is not given."""
    parser.add_argument(
        "--contenders", nargs="+", type=read_entry, action=StoreEntries, metavar="[NAME=]KIND[:VARIANT]"
    )


@dataclass(frozen=True)
class Workbench:
    """A model to measure: makes its weights on first use, and opens the contenders that run it."""

    config: dict[str, Any]  # config.json of the model
    folder: Path  # folder for the checkpoint, the peers' conversions of the checkpoint, and logs
    threads: int  # threads of each contender
    rows: int  # largest batch

    @property
    def checkpoint(self) -> Path:
        """The checkpoint folder, written on first use."""
        return checkpoint_of(self.config, self.folder)

    @property
    def made(self) -> Path:
        """Folder for the peers' conversions of the checkpoint."""
        path = self.folder / self.checkpoint.name
        path.mkdir(exist_ok=True, parents=True)
        return path

    def log(self, name: str) -> Path:
        """Return the file for the output of a server or peer."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        return self.folder / "logs" / "".join(letter if letter.isalnum() else "-" for letter in name)

    def missing(self, entry: Entry) -> str:
        """Return the reason why an entry cannot be measured, or an empty string if the entry can be measured."""
        if entry.kind in ("baton", "bare"):
            return ""
        peer = "llama.cpp" if entry.kind == "gguf" else entry.kind  # which converts the file
        if python_of(peer) is None:
            return how_to_install(peer)
        if entry.kind == "openvino" and self.config["model_type"] == "mamba2":
            return "optimum-intel exports no mamba2, so openvino is left out"
        return ""

    @contextmanager
    def open(self, entry: Entry) -> Iterator[Contender]:
        """Start a contender, and stop it when the context is left."""
        if entry.kind in SERVED:
            with self.serve(entry) as served:
                yield served
        else:
            with self.peer(entry) as peer:
                yield peer

    def serve(self, entry: Entry, *more: str) -> Served:
        """Start Baton's server with the entry's options and `more`; the result is a context manager."""
        flags = ["--max-running", str(self.rows), "--step-tokens", str(STEP_TOKENS), *MEMORY, "--log-format", "json"]
        path = self.gguf(entry.variant) if entry.kind == "gguf" else self.checkpoint
        return Served(path, self.threads, [*flags, *more, *entry.options], self.log(entry.name))

    def peer(self, entry: Entry) -> Peer:
        """Start a contender other than Baton's server in its own process; the result is a context manager."""
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
        """Return the weights as a GGUF file for llama.cpp, converted on first use."""
        file = self.made / f"{kind}.gguf"
        if not file.exists():
            if kind in BY_LLAMA_CPP:
                self._make("llama.cpp", "quantize_gguf.py", self.gguf("f32"), file.with_suffix(".part"), kind)
            else:
                self._make("llama.cpp", "write_gguf.py", self.checkpoint, file.with_suffix(".part"), kind)
            file.with_suffix(".part").rename(file)
        return file

    def openvino(self) -> Path:
        """Return a folder with the exports for OpenVINO (see peers/export_openvino.py), made on first use."""
        folder = self.made / "openvino"
        if not folder.exists():
            self._make("openvino", "export_openvino.py", self.checkpoint, folder.with_suffix(".part"))
            folder.with_suffix(".part").rename(folder)
        return folder

    def _make(self, peer: str, script: str, source: Path, target: Path, *more: str) -> None:
        """Run a conversion script in the peer's environment. Raises RuntimeError with its stderr if it fails."""
        print(f"making {target.stem} for {peer} ...", flush=True)
        python = python_of(peer)
        assert python is not None
        command = [python, str(HERE / script), str(source), str(target), *more]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stderr[-2000:]}")

"""Attention of decoding rows over pages: native code, and torch's over keys and values that are contiguous already."""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.attention.paged import native
from baton.kernels.runtime.cpp.targets import targets_here
from baton.kernels.runtime.memory import empty
from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.machine import cpu_name
from scripts.benchmarks.common.revisions import check_out
from scripts.benchmarks.parts.libraries import Calls, Library, agree, in_turns, library_of
from scripts.benchmarks.parts.products import alternate, in_turn, install

PAGE = 16  # positions of a page
POOL_BYTES = 200 << 20
"""Bytes of the keys and values that calls take in turn: more than the caches hold."""
MOST_LAYERS = 24


@dataclass(frozen=True)
class Shape:
    """The heads of an attention layer."""

    heads: int
    kv_heads: int
    width: int

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.kv_heads} of keys, {self.width} wide"


SHAPES = (Shape(12, 4, 64), Shape(32, 8, 128), Shape(16, 2, 256))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 4, 16), help="numbers of rows that decode together")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=(300, 2000, 6000), help="numbers of tokens of each row"
    )
    parser.add_argument("--target", help="the target of native code (default: the best)")
    parser.add_argument(
        "--against", metavar="REVISION", help="compare with native code of this git revision instead of torch"
    )


def run(options: argparse.Namespace, workbench: Workbench) -> int:
    target = options.target or targets_here()[0].name
    path = install(target, workbench.threads)
    print(f"{cpu_name()}, {target}, {workbench.threads} threads: GB/s of keys and values in bfloat16,")
    with tempfile.TemporaryDirectory() as folder:
        if options.against:
            print(f"here and of {options.against}, and their ratio\n")
            tree = check_out(options.against, "kernels", Path(folder))
            other = library_of(options.against, tree, target, workbench.threads)
            libraries = (Library(path, workbench.threads), other)
        else:
            print("and of torch's scaled_dot_product_attention, which reads no pages; their ratio\n")
            libraries = None
        for shape in SHAPES:
            print(shape, flush=True)
            for rows in options.rows:
                for tokens in options.tokens:
                    compare(shape, rows, tokens, libraries, max(options.rounds or 15, 2))
    return 0


@dataclass(frozen=True)
class Layer:
    """Random keys and values of some rows, and where they are: the arguments of native code's function."""

    pool: Tensor  # [rows · pages, 2, PAGE, kv_heads, width], in the memory that a server's are in
    table: Tensor  # int32 [rows, pages]: pages in random order
    offsets: Tensor
    starts: Tensor

    def paged(self, query: Tensor) -> Tensor:
        """Compute native code's attention of each row's last token. query: [rows, heads, width]."""
        keys, values = self.pool[:, 0], self.pool[:, 1]
        return native.paged_attention(
            query, keys, values, self.table, self.offsets, self.starts, query.shape[-1] ** -0.5
        )

    def contiguous(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [rows, kv_heads, tokens, width] and contiguous."""
        tokens = int(self.starts[0]) + 1
        keys, values = self.pool[self.table.long()].transpose(1, 2).flatten(2, 3)[:, :, :tokens].unbind(1)
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()


def layer_of(shape: Shape, rows: int, tokens: int) -> Layer:
    """Return a layer whose rows have `tokens` tokens each."""
    pages = -(-tokens // PAGE)
    pool = empty(rows * pages, 2, PAGE, shape.kv_heads, shape.width, dtype=torch.bfloat16).normal_()
    table = torch.randperm(rows * pages).view(rows, pages).int()
    return Layer(pool, table, torch.arange(rows + 1), torch.full((rows,), tokens - 1))


def by_torch(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute torch's attention of each row's last token. keys, values: as Layer.contiguous returns them."""
    return F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def compare(shape: Shape, rows: int, tokens: int, libraries: tuple[Library, Library] | None, rounds: int) -> None:
    """Measure both sides in turns, and print a line."""
    nbytes = 4 * rows * tokens * shape.kv_heads * shape.width
    count = min(max(2, POOL_BYTES // nbytes), MOST_LAYERS)
    query = torch.randn(rows, shape.heads, shape.width).bfloat16()
    layers = [layer_of(shape, rows, tokens) for _ in range(count)]
    ours, note = in_turn([layer.paged for layer in layers]), ""
    pairs: Sequence[tuple[float, ...]]
    if libraries is None:
        numbers = [layer.contiguous() for layer in layers]
        theirs = in_turn([partial(by_torch, keys=keys, values=values) for keys, values in numbers])
        pairs = alternate(partial(ours, query), partial(theirs, query), rounds * count)
    else:
        calls = Calls(ours, query, count)
        note = "" if agree(calls, *libraries) else "  the results differ"
        pairs = in_turns(calls, libraries, rounds)
    own, other = (1e-9 * nbytes / statistics.median(side) for side in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([second / first for first, second in pairs], n=4)
    name = f"{rows:>5} rows of {tokens:<6}"
    print(f"{name}{own:>7.1f}{other:>7.1f}{middle:>7.2f}  {low:.2f} to {high:.2f}{note}", flush=True)

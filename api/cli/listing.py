"""`baton list`: the models in the hub's cache, and what keeps each from being served here."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from huggingface_hub import CachedRevisionInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from baton.api.config import Config
from baton.api.hub.gguf_names import grouped, label_of
from baton.api.inspection import examine, noting
from baton.api.machine.memory import bytes_of
from baton.api.terminal.console import escaped
from baton.models.loading.checkpoint import FAMILIES
from baton.models.loading.source import read_source_config

SHORT_COMMIT = 12
HEADINGS = ("MODEL", "REVISION", "SIZE", "FAMILY", "SERVED")


class CachedModel(msgspec.Struct, kw_only=True):
    """A model in the cache, at one commit."""

    name: str
    commit: str
    revisions: list[str]  # branches and tags that had this commit when it was fetched
    size: int  # bytes
    family: str | None = None
    refused: list[str] = []  # every reason why it would not be served here; empty if it would be


def list_models(as_json: bool) -> int:
    """Print the models in the cache. Return the exit code."""
    models = sorted(cached_models(), key=lambda model: (model.name, model.commit))
    if as_json:
        print(msgspec.json.encode(models).decode())
        return 0
    rows = [HEADINGS, *(tuple(map(escaped, row(model))) for model in models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    return 0


def cached_models() -> Iterator[CachedModel]:
    """Yield every model in the cache, at each of its commits."""
    with suppress(CacheNotFound):
        for repository in scan_cache_dir(constants.HF_HUB_CACHE).repos:
            if repository.repo_type == "model":
                for revision in repository.revisions:
                    yield from models_of(repository.repo_id, revision)


def models_of(name: str, revision: CachedRevisionInfo) -> Iterator[CachedModel]:
    """Yield the models of a repository at one commit: its GGUF files, and its folder if that has other files."""
    folder, sizes = Path(revision.snapshot_path), dict[str, int]()
    for file in revision.files:
        sizes[file.file_path.relative_to(folder).as_posix()] = file.size_on_disk
    files = grouped(sizes)
    for stem, parts in files.items():
        size = sum(sizes.pop(part) for part in parts)
        yield judge(f"{name}:{label_of(stem)}", folder / parts[0], revision, size)
    if sizes or not files:
        yield judge(name, folder, revision, sum(sizes.values()))


def judge(name: str, path: Path, revision: CachedRevisionInfo, size: int) -> CachedModel:
    """Return a model with its family, or with the reasons why it would not be served. path: a folder or GGUF file"""
    model = CachedModel(name=name, commit=revision.commit_hash, revisions=sorted(revision.refs), size=size)
    with noting(model.refused):
        family = str(read_source_config(path).values.get("model_type"))
        if family not in FAMILIES:
            # Do not examine it: most of a cache may be other models, with large tokenizers.
            model.refused = [f"model_type {family!r} is not supported"]
            return model
        model.family = family
        inspection = examine(Config(model=str(path)))
        missing = [f"{part} not fetched" for part in inspection.missing]
        model.refused = missing or [reason.replace(str(path), name) for reason in inspection.refused]
    return model


def row(model: CachedModel) -> tuple[str, ...]:
    """Return the cells of a model's line."""
    revision = ", ".join(model.revisions) or model.commit[:SHORT_COMMIT]
    served = "; ".join(model.refused) if model.refused else "yes"
    return model.name, revision, bytes_of(model.size), model.family or "-", served

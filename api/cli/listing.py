"""`baton list`: the models in the hub's cache, and what keeps each from being served here."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from huggingface_hub import CachedRevisionInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from baton.api.config import Config
from baton.api.inspection import examine, noting
from baton.api.machine.memory import bytes_of
from baton.models.config import read_config
from baton.models.loading.checkpoint import FAMILIES

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
    rows = [HEADINGS, *map(row, models)]
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
                    yield judge(repository.repo_id, revision)


def judge(name: str, revision: CachedRevisionInfo) -> CachedModel:
    """Return a model with its family, or with the reasons why it would not be served."""
    model = CachedModel(
        name=name, commit=revision.commit_hash, revisions=sorted(revision.refs), size=revision.size_on_disk
    )
    folder = Path(revision.snapshot_path)
    with noting(model.refused):
        family = str(read_config(folder).values.get("model_type"))
        if family not in FAMILIES:
            # Do not examine it: most of a cache may be other models, with large tokenizers.
            model.refused = [f"model_type {family!r} is not supported"]
            return model
        model.family = family
        inspection = examine(Config(model=str(folder)))
        missing = [f"{part} not fetched" for part in inspection.missing]
        model.refused = missing or [reason.replace(str(folder), name) for reason in inspection.refused]
    return model


def row(model: CachedModel) -> tuple[str, ...]:
    """Return the cells of a model's line."""
    revision = ", ".join(model.revisions) or model.commit[:SHORT_COMMIT]
    served = "; ".join(model.refused) if model.refused else "yes"
    return model.name, revision, bytes_of(model.size), model.family or "-", served

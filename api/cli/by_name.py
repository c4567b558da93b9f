"""`baton serve` and `baton inspect` of a name on the hub."""

from pathlib import Path

import msgspec

from baton.api.cli.pulling import fetch
from baton.api.config import Config
from baton.api.hub.checkpoint import HubCheckpoint, find
from baton.api.hub.connection import Hub
from baton.api.hub.errors import HubError
from baton.api.hub.gguf_files import HubGguf
from baton.api.hub.names import HubName
from baton.api.inspection import Inspection, examine, noting, show
from baton.api.serve import LoadedModel, Progress, StartError
from baton.api.terminal.console import complain
from baton.api.wiring import load


def load_by_name(name: HubName, config: Config, on_progress: Progress) -> LoadedModel:
    """Fetch a model into the hub's cache and load it from there.

    Raises StartError, before any weights are fetched, if the model could not be served.
    """

    def check(outline: Path) -> None:
        if reasons := examine_outline(name, config, outline).refused:
            raise StartError(f"{name} is not fetched, because it cannot be served: {'; '.join(reasons)}")

    try:
        folder = fetch(name, check)
    except (HubError, OSError) as error:
        raise StartError(str(error)) from error
    return load(in_folder(config, folder), on_progress)


def inspect_by_name(config: Config, name: HubName, as_json: bool) -> int:
    """Print what a model on the hub contains and needs. Return the exit code."""
    try:
        found = find(Hub(), name)
        if isinstance(found, Path):
            return show(examine(in_folder(config, found)), as_json)
        return show(examine_remote(found, config), as_json)
    except HubError as error:
        complain(error)
        return 1


def examine_remote(checkpoint: HubCheckpoint | HubGguf, config: Config) -> Inspection:
    """Examine a checkpoint of which only the settings and the headers of the weights are fetched."""
    with checkpoint.outlined(with_tokenizer=False) as outline:
        elsewhere = [file.name for file in checkpoint.tokenizers]
        inspection = examine_outline(checkpoint.repository.name, config, outline, elsewhere)
    inspection.download = checkpoint.missing_bytes
    with noting(inspection.refused):
        checkpoint.check_room()
    return inspection


def examine_outline(name: HubName, config: Config, outline: Path, elsewhere: list[str] | None = None) -> Inspection:
    """Examine the outline of a checkpoint, and name the model where the outline's folder would be named."""
    inspection = examine(in_folder(config, outline), elsewhere or [])
    inspection.folder = str(name)
    inspection.refused = [reason.replace(str(outline), str(name)) for reason in inspection.refused]
    return inspection


def in_folder(config: Config, folder: Path) -> Config:
    """Return the options with a folder instead of the name."""
    return msgspec.structs.replace(config, model=str(folder))

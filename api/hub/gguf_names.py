"""The GGUF files of a repository, and the choice of the file that a name on the hub means."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

from baton.api.hub.errors import HubError
from baton.api.hub.names import HubName

SUFFIX = ".gguf"
PART = re.compile(r"-\d{5}-of-(\d{5})$")
NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # matches names of GGUF files that hold no model
LABEL = re.compile(r"[-._]((?:UD-)?(?:I?Q|TQ|BF|F|MXFP)\d\w*)$", re.IGNORECASE)
MOST_LISTED = 12


def grouped(names: Collection[str]) -> dict[str, list[str]]:
    """Return the names of each GGUF file's parts, by its stem: the name without suffix and number of the part."""
    found = defaultdict[str, list[str]](list)
    for name in sorted(names):
        if name.endswith(SUFFIX) and not NO_MODEL.search(PurePosixPath(name).name):
            found[PART.sub("", name.removesuffix(SUFFIX))].append(name)
    return dict(found)


def label_of(stem: str) -> str:
    """Return the label with which users ask for a file: the quantization in its name, or else the whole name."""
    name = PurePosixPath(stem).name
    return match[1] if (match := LABEL.search(name)) is not None else name


def chosen(groups: Mapping[str, list[str]], name: HubName) -> list[str]:
    """Return the parts of the GGUF file that a name means. Raises HubError unless exactly one file matches."""
    found = [stem for stem in groups if name.quantization is None or answers_to(stem, name.quantization)]
    if len(found) > 1 and name.quantization is not None:
        exact = [stem for stem in found if label_of(stem).lower() == name.quantization.lower()]
        found = exact or found
    if len(found) == 1:
        return complete(groups[found[0]], name)
    labels = [f"{name.repository}:{label_of(stem)}" for stem in found or groups]
    listed = ", ".join(labels[:MOST_LISTED]) + (", …" if len(labels) > MOST_LISTED else "")
    if not groups:
        raise HubError(f"{name.repository} has no GGUF files")
    raise HubError(f"{name} stands for {len(found) or 'none'} of the GGUF files of {name.repository}: {listed}")


def complete(parts: list[str], name: HubName) -> list[str]:
    """Return `parts`, which are all parts of a file. Raises HubError if some are missing."""
    split = PART.search(parts[0].removesuffix(SUFFIX))
    if split is not None and len(parts) != int(split[1]):
        raise HubError(f"{name} has {len(parts)} of {int(split[1])} parts: {', '.join(parts[:MOST_LISTED])}")
    return parts


def answers_to(stem: str, quantization: str) -> bool:
    """Return whether a hub name's `quantization` means this file: it is the file's label, name or folder."""
    path, label = PurePosixPath(stem.lower()), label_of(stem).lower()
    return quantization.lower() in (label, label.removeprefix("ud-"), path.name, path.parent.name)

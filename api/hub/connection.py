"""The connection to the hub: what is in a repository, and the bytes of its files."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import httpx2
from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from baton.api.hub.cache import RepositoryCache
from baton.api.hub.errors import HubError, explaining
from baton.api.hub.names import HubName
from baton.api.hub.repository import RemoteFile, Repository
from baton.api.version import VERSION

PARTIAL_CONTENT = 206
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

logging.getLogger("httpx2").setLevel(logging.WARNING)  # It logs every request.


class Hub:
    """The hub that HF_ENDPOINT names, with the token and the cache of huggingface_hub's variables."""

    def __init__(self) -> None:
        self.endpoint = constants.ENDPOINT.rstrip("/")
        self._cache = Path(constants.HF_HUB_CACHE)
        self._api = HfApi(endpoint=self.endpoint, library_name="baton", library_version=VERSION)
        self._headers = build_hf_headers(library_name="baton", library_version=VERSION)
        # Compressed content would match neither the sizes nor the ranges that the hub states.
        self._headers["Accept-Encoding"] = "identity"

    def cache_of(self, name: HubName) -> RepositoryCache:
        """Return the cache of a repository. Raises HubError if the hub has no such names."""
        with explaining(name, self.endpoint):
            return RepositoryCache(self._cache, name)

    def look_up(self, name: HubName) -> Repository:
        """Ask the hub for a repository's commit and files. Raises HubError."""
        try:
            with explaining(name, self.endpoint):
                info = self._api.model_info(
                    name.repository,
                    revision=name.revision,
                    files_metadata=True,
                    timeout=constants.HF_HUB_ETAG_TIMEOUT,
                )
        except (ValueError, KeyError, TypeError) as error:
            raise HubError(f"{self.endpoint} does not answer as a hub does for {name}: {error!r}") from error
        if info.sha is None or not DIGEST.fullmatch(info.sha):
            raise HubError(f"the hub at {self.endpoint} states no commit of {name}")
        files = [remote_file(name, entry) for entry in info.siblings or [] if is_inside(entry.rfilename)]
        return Repository(name, info.sha, {file.name: file for file in files})

    @contextmanager
    def open(
        self, repository: Repository, file: RemoteFile, start: int = 0, stop: int | None = None
    ) -> Iterator[httpx2.Response]:
        """Request the bytes from `start` to `stop`, or to the end. The server may answer with the whole file."""
        url = hf_hub_url(repository.name.repository, file.name, revision=repository.commit, endpoint=self.endpoint)
        headers = dict(self._headers)
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{stop - 1 if stop is not None else ''}"
        with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            yield response

    def read(self, repository: Repository, file: RemoteFile, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, fewer at the file's end. Raises HubError."""
        content = bytearray()
        with explaining(repository.name, self.endpoint), self.open(repository, file, start, stop) as response:
            skip = 0 if response.status_code == PARTIAL_CONTENT else start
            for chunk in response.iter_raw():
                content += chunk
                if len(content) >= skip + stop - start:
                    break
        return bytes(content[skip : skip + stop - start])


def is_inside(name: str) -> bool:
    """Return whether a file's name stays inside its folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def remote_file(name: HubName, entry: RepoSibling) -> RemoteFile:
    """Return a file as the hub states it. Raises HubError without a size and a digest, which prove what arrives."""
    digest = entry.lfs.sha256 if entry.lfs is not None else entry.blob_id
    size = entry.lfs.size if entry.lfs is not None else entry.size
    if size is None or digest is None or not DIGEST.fullmatch(digest):
        raise HubError(f"the hub states no size or no checksum for {entry.rfilename} of {name}")
    return RemoteFile(entry.rfilename, size, digest, entry.lfs is not None)

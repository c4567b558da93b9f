"""Errors of the hub in words for the user."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from baton.api.hub.names import HubName

UNAUTHORIZED, FORBIDDEN = 401, 403


class HubError(Exception):
    """A reason why a model cannot be fetched from the hub; the message is for the user."""


@contextmanager
def explaining(name: HubName, endpoint: str) -> Iterator[None]:
    """Turn exceptions of the transport and of the file system into HubError."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise HubError(f"{name} is not in the cache, and HF_HUB_OFFLINE forbids fetching it") from None
    except HFValidationError as error:
        raise HubError(f"{name} is not a name on the hub: {error}") from error
    except HfHubHTTPError as error:
        raise HubError(explain_answer(name, endpoint, error)) from error
    except httpx2.TransportError as error:
        raise HubError(f"cannot reach the hub at {endpoint} for {name}: {error or type(error).__name__}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HubError(f"the disk is full: {name} does not fit; HF_HOME moves the cache to another disk") from error
        raise HubError(f"{name} cannot be written to the cache: {error}") from error


def explain_answer(name: HubName, endpoint: str, error: HfHubHTTPError) -> str:
    """Return the meaning of the hub's answer, and what the user can do."""
    place, status = f"{endpoint}/{name.repository}", error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"{name} is gated: accept its licence at {place} and set HF_TOKEN to a token of that account"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no folder {name}, and no model {name.repository} at {endpoint}, or it is private; "
            "check the name, and set HF_TOKEN if the model is private"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision!r}; {place}/tree/main lists its branches and tags"
    if isinstance(error, RemoteEntryNotFoundError):
        return f"the hub lists a file of {name} but does not have it: {error.response.url}"
    if status == UNAUTHORIZED:
        return f"the hub at {endpoint} does not accept the token; check HF_TOKEN, or unset it for public models"
    if status == FORBIDDEN:
        return f"the token has no access to {name}: ask for it at {place}, or set HF_TOKEN to another token"
    return f"the hub at {endpoint} answers {status} for {name}: {error.server_message or error.response.reason_phrase}"

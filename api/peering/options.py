"""Checks of the options for peers."""

import ipaddress

from baton.actors.peers.channel import parsed
from baton.api.config import Config, ConfigError
from baton.api.security import read_small

LEAST_KEY = 16  # bytes


def read_key(config: Config) -> bytes:
    """Return the key of --peer-key-file; without one, b"".

    Raises ConfigError if the file is unreadable or its key is too short, if an address is invalid, or if an address
    other than loopback is used without a key.
    """
    for option, address in (("--peer-listen", config.peer_listen), *(("--peer", peer) for peer in config.peer)):
        try:
            where = parsed(address)[1] if address is not None else ""
        except ValueError as error:
            raise ConfigError(f"{option}: {error}") from None
        if config.peer_key_file is None and not isinstance(where, str) and not is_loopback(where[0]):
            raise ConfigError(f"{option}: {address} is not a loopback address, which needs --peer-key-file")
    if config.peer_key_file is None:
        return b""
    try:
        key = read_small(config.peer_key_file).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--peer-key-file: {error}") from None
    if len(key) < LEAST_KEY:
        raise ConfigError(f"--peer-key-file: {config.peer_key_file} holds fewer than {LEAST_KEY} bytes")
    return key


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""A process that copies bytes between clients and one server: the least that a router can cost.

python -m scripts.benchmarks.requests.bare_relay --to PORT --port PORT
"""

import argparse
import asyncio

import uvloop


class Upstream(asyncio.Protocol):
    """The connection to the server, for one client."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._early = b""  # what the client has sent before this connection was open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.send(b"")

    def send(self, data: bytes) -> None:
        if self._transport is None:
            self._early += data
        elif data := self._early + data:
            self._early = b""
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.close()


class Downstream(asyncio.Protocol):
    """A client's connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._upstream = Upstream(transport)  # type: ignore[arg-type]
        connecting = asyncio.get_running_loop().create_connection(lambda: self._upstream, "127.0.0.1", self._port)
        self._connecting = asyncio.ensure_future(connecting)

    def data_received(self, data: bytes) -> None:
        self._upstream.send(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._upstream.close()


async def relay(port: int, to: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Downstream(to), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", type=int, required=True)
    options = parser.parse_args()
    uvloop.run(relay(options.port, options.to))

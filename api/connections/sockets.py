"""Websockets of clients."""

from aiohttp import WSMsgType, web

# Only these types of messages arrive from the client; aiohttp itself makes the others.
RECEIVED = (WSMsgType.TEXT, WSMsgType.BINARY, WSMsgType.PING, WSMsgType.PONG)


class Socket(web.WebSocketResponse):
    """A websocket whose received bytes are known as they arrive, and can be dropped at once."""

    def __init__(self, protocol: str, most: int, heartbeat: float | None = None) -> None:
        """protocol: the subprotocol that the server speaks. most: maximum bytes of a message. heartbeat: ping interval.

        There is no compression: bytes of messages would be known late, and a compressor would take memory.
        """
        super().__init__(
            autoping=False,
            compress=False,
            max_msg_size=most,
            protocols=(protocol,),
            timeout=1.0,
            heartbeat=heartbeat,
        )

    def forget(self) -> None:
        """Drop all messages, complete or not, that wait in aiohttp's reader. Nothing can be received after this."""
        self._parser = None
        if self._reader is not None:
            self._reader._buffer.clear()

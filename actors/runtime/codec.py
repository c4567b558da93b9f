"""The encoding of messages between processes. It checks that messages contain nothing but data and leases."""

import msgspec

from baton.actors.lease import Lease, Ledger
from baton.actors.messages import Message


class Codec:
    """The encoding of messages as msgpack, fit for use between processes. A lease is encoded as (slot, generation)."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._surrender)
        self._decoder = msgspec.msgpack.Decoder(Message, dec_hook=self._revive)

    def round_trip(self, message: Message) -> Message:
        """Encode and decode a message that has departed. Its leases become new handles, still in transit."""
        decoded: Message = self._decoder.decode(self._encoder.encode(message))
        return decoded

    def _surrender(self, value: object) -> tuple[int, int]:
        if not isinstance(value, Lease):
            raise TypeError(f"{type(value).__name__} cannot travel in a message")
        return value.surrender("encoded")

    def _revive(self, type_: type, value: list[int]) -> Lease:
        slot, generation = value
        return Lease(slot, generation, self._ledger)

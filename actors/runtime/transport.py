"""How leases travel inside messages: the sender's handle dies at `depart`, the receiver's comes alive at `arrive`."""

from collections.abc import Iterator

import msgspec

from actors.lease import Lease, Ledger
from actors.messages import (
    Admit,
    Donate,
    Export,
    Exported,
    Free,
    Granted,
    Message,
    Retired,
    Return,
    SaveFromReq,
    Spare,
    Step,
    Stepped,
)


def depart(message: Message, sender: str, receiver: str, ledger: Ledger) -> None:
    """Replace each lease in `message` by one in transit. All are checked first: a refused send moves nothing."""
    for lease in leases_in(message):
        lease.check()
    name = type(message).__name__

    def move(lease: Lease) -> Lease:
        return ledger.depart(lease, sender, receiver, name)

    match message:
        case Granted() | Return() | Admit() | Retired() | Donate() | SaveFromReq() | Export() | Exported():
            message.state = move(message.state)
        case Spare() | Free():
            message.slots = [move(lease) for lease in message.slots]
        case Step() | Stepped():
            for checkpoint in message.checkpoints:
                checkpoint.slot = move(checkpoint.slot)
        case _:
            pass


def arrive(message: Message, receiver: str, ledger: Ledger) -> None:
    for lease in leases_in(message):
        ledger.arrive(lease, receiver)


def leases_in(message: Message) -> Iterator[Lease]:
    match message:
        case Granted() | Return() | Admit() | Retired() | Donate() | SaveFromReq() | Export() | Exported():
            yield message.state
        case Spare() | Free():
            yield from message.slots
        case Step() | Stepped():
            yield from (checkpoint.slot for checkpoint in message.checkpoints)
        case _:
            pass


class Codec:
    """Every message as msgpack bytes: what a send between processes does. A lease travels as (slot, generation)."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._surrender)
        self._decoder = msgspec.msgpack.Decoder(Message, dec_hook=self._revive)

    def round_trip(self, message: Message) -> Message:
        """Encode and decode a departed message; its leases come out as fresh handles, still in transit."""
        decoded: Message = self._decoder.decode(self._encoder.encode(message))
        return decoded

    def _surrender(self, value: object) -> tuple[int, int]:
        if not isinstance(value, Lease):
            raise TypeError(f"{type(value).__name__} cannot travel in a message")
        return value.surrender("encoded")

    def _revive(self, type_: type, value: list[int]) -> Lease:
        slot, generation = value
        return Lease(slot, generation, self._ledger)

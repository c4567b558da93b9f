"""Planted bugs in the synchronization of the copy stream (copies to and from host memory) with the steps."""

from typing import Any

from msgspec.structs import replace as replaced

from baton.actors.cache.below.state_copy import Presence, StateCopy
from baton.actors.forward.actor import Forward
from baton.actors.messages import Admit, Copied, Export, Filled, Granted, Retire, Transferred
from baton.actors.scheduler.actor import Scheduler
from tests.simulation.copy_stream import CopyStream, EnqueuedCopy
from tests.simulation.hash_device import HashDevice
from tests.simulation.planting import Patch


def export_reported_when_enqueued(patch: Patch) -> None:
    """Planted bug: a state's slot and pages are given back when its copy is enqueued, before the copy has read them."""
    export, exported = Forward._export, Forward._exported

    def export_at_once(self: Forward, message: Export) -> None:
        export(self, message)
        exported(self, message.key)

    patch(Forward, "_export", export_at_once)
    patch(Forward, "_exported", lambda self, key: None)


def copied_sent_when_the_fill_is_enqueued(patch: Patch) -> None:
    """Planted bug: the loan of a copy ends when the fill is enqueued, so the copy may be dropped during the fill."""
    _send_at_once(patch, Copied)


def filled_sent_when_the_fill_is_enqueued(patch: Patch) -> None:
    """Planted bug: `Filled` is sent when the fill is enqueued, so a step may run before the state has arrived."""
    _send_at_once(patch, Filled)


def _send_at_once(patch: Patch, kind: type) -> None:
    """Send the message of this kind (`Copied` or `Filled`) at admission instead of after the fill."""
    admit, filled = Forward._admit, Forward._filled

    def admit_and_send(self: Forward, message: Admit) -> None:
        admit(self, message)
        if message.fill is not None:
            self.send("cache" if kind is Copied else "scheduler", kind(message.grant))

    def send_the_rest(self: Forward, grant: int) -> None:
        send = self.send
        self.send = lambda to, message: None if isinstance(message, kind) else send(to, message)
        filled(self, grant)
        self.send = send

    patch(Forward, "_admit", admit_and_send)
    patch(Forward, "_filled", send_the_rest)


def retired_during_its_fill(patch: Patch) -> None:
    """Planted bug: a row that is given up during its fill retires at once, so the copy lands in another row's slot."""
    retire = Forward._retire

    def retire_at_once(self: Forward, message: Retire) -> None:
        filling = self._filling
        self._filling = {}
        retire(self, message)
        self._filling = filling

    patch(Forward, "_retire", retire_at_once)


def copies_do_not_wait_for_steps(patch: Patch) -> None:
    """Planted bug: a copy is made before the device calls ahead of it in forward's mailbox have been executed."""
    original = HashDevice._transfer

    def transfer(self: HashDevice, copy: EnqueuedCopy) -> None:
        original(self, copy)
        if self.copies is not None:
            self.copies.release(copy)

    patch(HashDevice, "_transfer", transfer)


def filling_row_planned(patch: Patch) -> None:
    """Planted bug: the plan includes a row whose state has not arrived from host memory."""
    original = Scheduler._granted

    def granted(self: Scheduler, message: Granted) -> None:
        original(self, message)
        if message.grant in self.state.rows:
            self.state.rows[message.grant].filling = False

    patch(Scheduler, "_granted", granted)


def lent_copy_dropped(patch: Patch) -> None:
    """Planted bug: a copy may be dropped while a request is being filled from it."""
    patch(StateCopy, "busy", property(lambda self: Presence.COMING in (self.host, self.disk)))


def unfinished_copy_used(patch: Patch) -> None:
    """Planted bug: a copy may be resumed from, or dropped, as soon as it is requested and before it is made."""
    patch(StateCopy, "in_host", property(lambda self: self.host is not Presence.ABSENT))
    patch(StateCopy, "busy", property(lambda self: self.loans > 0 or self.disk is Presence.COMING))


def failed_export_believed(patch: Patch) -> None:
    """Planted bug: a copy that could not be made counts as made."""
    _drop_error(patch, lambda message: message.grant is None)


def failed_fill_believed(patch: Patch) -> None:
    """Planted bug: a row whose fill failed runs on whatever its slot holds."""
    _drop_error(patch, lambda message: message.grant is not None)


def _drop_error(patch: Patch, when: Any) -> None:
    """Make forward ignore the error of every `Transferred` for which `when` is true."""
    original = Forward._transferred

    def transferred(self: Forward, message: Transferred) -> None:
        original(self, replaced(message, error="") if when(message) else message)

    patch(Forward, "_transferred", transferred)


def restart_does_not_drain_copies(patch: Patch) -> None:
    """Planted bug: a restart drains the stream of the steps but not the copy stream."""
    patch(CopyStream, "drain", lambda self: None)

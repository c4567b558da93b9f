"""Known bugs in what keeps apart a second stream's copies, to and from host memory, and what goes on beside them."""

from typing import Any

from msgspec.structs import replace as replaced

from baton.actors.cache.below.state_copy import Presence, StateCopy
from baton.actors.forward.actor import Forward
from baton.actors.messages import Admit, Copied, Export, Filled, Granted, Retire, Transferred
from baton.actors.scheduler.actor import Scheduler
from tests.simulation.copy_stream import CopyStream, EnqueuedCopy
from tests.simulation.hash_device import HashDevice
from tests.simulation.planting import Patch


def exported_when_it_is_enqueued(patch: Patch) -> None:
    """The slot and the pages of a state are given back while its copy reads them."""
    export, exported = Forward._export, Forward._exported

    def export_at_once(self: Forward, message: Export) -> None:
        export(self, message)
        exported(self, message.key)

    patch(Forward, "_export", export_at_once)
    patch(Forward, "_exported", lambda self, key: None)


def copied_when_the_fill_is_enqueued(patch: Patch) -> None:
    """A copy may go while a slot is still filled from it."""
    _told_at_once(patch, Copied)


def filled_when_it_is_enqueued(patch: Patch) -> None:
    """A row is in the next step, whether its state has come or not."""
    _told_at_once(patch, Filled)


def _told_at_once(patch: Patch, kind: type) -> None:
    """Of what is said when a row is filled, this is said before."""
    admit, filled = Forward._admit, Forward._filled

    def admit_and_tell(self: Forward, message: Admit) -> None:
        admit(self, message)
        if message.fill is not None:
            self.send("cache" if kind is Copied else "scheduler", kind(message.grant))

    def tell_the_rest(self: Forward, grant: int) -> None:
        send = self.send
        self.send = lambda to, message: None if isinstance(message, kind) else send(to, message)
        filled(self, grant)
        self.send = send

    patch(Forward, "_admit", admit_and_tell)
    patch(Forward, "_filled", tell_the_rest)


def retired_while_it_is_filled(patch: Patch) -> None:
    """The slot of a row that was given up goes to its next owner, and then the copy lands in it."""
    retire = Forward._retire

    def retire_at_once(self: Forward, message: Retire) -> None:
        filling = self._filling
        self._filling = {}
        retire(self, message)
        self._filling = filling

    patch(Forward, "_retire", retire_at_once)


def copies_wait_for_nobody(patch: Patch) -> None:
    """A copy is made before what is ahead of it in the mailbox has been done."""
    original = HashDevice._transfer

    def transfer(self: HashDevice, copy: EnqueuedCopy) -> None:
        original(self, copy)
        if self.copies is not None:
            self.copies.release(copy)

    patch(HashDevice, "_transfer", transfer)


def step_planned_over_a_row_that_is_filled(patch: Patch) -> None:
    """The plan does not look whether a row's state has come."""
    original = Scheduler._granted

    def granted(self: Scheduler, message: Granted) -> None:
        original(self, message)
        if message.grant in self.state.rows:
            self.state.rows[message.grant].filling = False

    patch(Scheduler, "_granted", granted)


def copy_dropped_while_it_is_read(patch: Patch) -> None:
    """A copy that is lent may go."""
    patch(StateCopy, "busy", property(lambda self: Presence.COMING in (self.host, self.disk)))


def copy_used_while_it_is_made(patch: Patch) -> None:
    """A copy is gone on from, or dropped, as soon as it has been asked for."""
    patch(StateCopy, "in_host", property(lambda self: self.host is not Presence.ABSENT))
    patch(StateCopy, "busy", property(lambda self: self.loans > 0 or self.disk is Presence.COMING))


def failure_of_an_export_not_told(patch: Patch) -> None:
    """A copy that could not be made after all counts as made."""
    _error_forgotten(patch, lambda message: message.grant is None)


def failure_of_a_fill_not_told(patch: Patch) -> None:
    """A row whose state did not come runs on what is in its slot."""
    _error_forgotten(patch, lambda message: message.grant is not None)


def _error_forgotten(patch: Patch, when: Any) -> None:
    original = Forward._transferred

    def transferred(self: Forward, message: Transferred) -> None:
        original(self, replaced(message, error="") if when(message) else message)

    patch(Forward, "_transferred", transferred)


def restart_leaves_the_copies(patch: Patch) -> None:
    """Where the actors are made anew only one of the streams is drained."""
    patch(CopyStream, "drain", lambda self: None)

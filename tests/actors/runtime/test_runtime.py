import asyncio

import pytest

from baton.actors.actor import Send
from baton.actors.lease import Lease, Ledger, Place
from baton.actors.messages import Abort, Free, Message
from baton.actors.runtime.codec import Codec
from baton.actors.runtime.mailboxes import Envelope, Mailbox, Runtime, as_is


class Recorder:
    def __init__(self) -> None:
        self.got: list[Message] = []
        self.acts = 0
        self.fail = False

    def receive(self, message: Message) -> None:
        if self.fail:
            raise RuntimeError("broken")
        self.got.append(message)

    def act(self) -> None:
        self.acts += 1

    def leases(self) -> list[Lease]:
        return []


def test_a_cancelled_waiter_loses_nothing() -> None:
    async def scenario() -> None:
        mailbox, envelope = Mailbox(), Envelope(Abort("a"), "api", 1, "", 0.0)
        waiter = asyncio.create_task(mailbox.wait())
        await asyncio.sleep(0)
        mailbox.put(envelope)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await asyncio.wait_for(mailbox.wait(), 1)
        assert list(mailbox.envelopes) == [envelope]

    asyncio.run(scenario())


@pytest.mark.parametrize("codec_check", [False, True])
def test_messages_arrive_in_order_with_their_leases(codec_check: bool) -> None:
    async def scenario() -> None:
        ledger = Ledger(2)
        runtime, cache = Runtime(ledger, Codec(ledger).round_trip if codec_check else as_is), Recorder()
        runtime.add("cache", cache)
        send: Send = runtime.sender("scheduler")
        lease = ledger.take("scheduler")
        assert lease
        send("cache", Abort("first"))
        send("cache", Free([lease]))
        running = asyncio.create_task(runtime.run())
        await asyncio.sleep(0.01)
        assert cache.got[0] == Abort("first") and cache.acts == 1
        freed = cache.got[1]
        assert isinstance(freed, Free) and not lease.live
        assert ledger.entries[0].holder == "cache"
        ledger.free(freed.leases[0])
        assert ledger.counts[Place.FREE] == 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_an_actor_that_raises_ends_the_run() -> None:
    async def scenario() -> None:
        runtime, cache = Runtime(Ledger(1)), Recorder()
        cache.fail = True
        runtime.add("cache", cache)
        runtime.sender("api")("cache", Abort("x"))
        with pytest.raises(ExceptionGroup, match="unhandled"):
            await runtime.run()

    asyncio.run(scenario())


def test_a_message_is_not_copied_unless_the_codec_is_checked() -> None:
    message = Abort("r")
    for runtime, same in ((Runtime(Ledger(1)), True), (Runtime(Ledger(1), Codec(Ledger(1)).round_trip), False)):
        runtime.add("cache", Recorder())
        runtime.send("api", "cache", message)
        [envelope] = runtime.mailboxes["cache"].envelopes
        assert envelope.message == message and (envelope.message is message) is same

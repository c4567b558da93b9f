"""Hashes of histories in trace files: they show equal beginnings, but tokens cannot be looked up from a hash."""

from msgspec.structs import replace

from baton.actors.requests import Request, Sampling, Stops
from baton.actors.runtime.events import HistoryEvent
from baton.actors.tokens import pack
from baton.api.telemetry.histories import BLOCK, Histories, History

TOKENS = list(range(100, 150))
REQUEST = Request("r", pack(TOKENS), 50, Sampling(), Stops(4), message_ends=(20, 50))


def told(histories: Histories, prompt: list[int], answer: list[int], salt: str = "") -> HistoryEvent:
    request = replace(REQUEST, tokens=pack(prompt), prompt_len=len(prompt), salt=salt)
    return histories.event(History(1.5, request, pack(answer)))


def test_an_answer_and_the_turn_that_continues_it_have_equal_hashes() -> None:
    histories = Histories()
    event = told(histories, TOKENS, [7] * 20)
    assert (event.at, event.request, event.prompt, event.answer, event.ends) == (1.5, "r", 50, 20, (20, 50))
    assert len(event.blocks) == 70 // BLOCK == len(set(event.blocks))
    following = told(histories, TOKENS + [7] * 20 + [8] * 30, [9])
    assert following.blocks[:4] == event.blocks and len(following.blocks) == 101 // BLOCK


def test_a_number_is_of_all_before_it() -> None:
    histories = Histories()
    event, other = told(histories, TOKENS, []), told(histories, [1, *TOKENS[1:]], [])
    assert set(event.blocks).isdisjoint(other.blocks)
    parted = told(histories, [*TOKENS[:20], 1, *TOKENS[21:]], [])
    assert parted.blocks[0] == event.blocks[0] and set(parted.blocks[1:]).isdisjoint(event.blocks)
    assert told(histories, TOKENS[: BLOCK - 1], []).blocks == ()


def test_salts_and_keys_have_nothing_in_common() -> None:
    histories = Histories()
    events = [told(histories, TOKENS, [], salt) for salt in ("", "a", "b")] + [told(Histories(), TOKENS, [])]
    numbers = {number for event in events for number in event.blocks}
    assert len(numbers) == 4 * 3 and all(0 < number < 2**48 for number in numbers)
    assert events[0].salt == 0 and len({event.salt for event in events}) == 3
    assert told(histories, TOKENS, [], "a") == events[1]

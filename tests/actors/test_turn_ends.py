"""The position of a session's state after a turn, for each way a turn can end. The next turn resumes there."""

import asyncio

import pytest

from baton.actors.requests import Stops
from tests.actors.ring import Answer, Ring, running
from tests.actors.test_ring import greedy, prompts, small

SESSION = "s"
PROMPT = prompts(4, 1)[0]


async def ended(ring: Ring, prompt: list[int], stops: Stops, abort_after: int | None = None) -> Answer:
    """Run a turn, and wait until its state is saved. abort_after: abort the turn after this many tokens."""
    answer = ring.submit(prompt, stops=stops, session=SESSION)
    if abort_after is not None:
        await ring.until(lambda: len(answer.tokens) >= abort_after)
        ring.abort(answer.request.id)
    await asyncio.wait_for(answer.done.wait(), 60)
    await ring.until(lambda: ring.kept.get(SESSION, ("tokens", 0))[1] > 0)
    return answer


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", ["length", "stop", "stop at the limit", "abort", "nothing but fed"])
def test_where_a_turn_leaves_its_state(way: str, depth: int) -> None:
    model = small("mamba2")
    tokens = greedy(model, PROMPT, 4)
    last = tokens.index(tokens[3])
    ways = {
        "length": Stops(4),
        "stop": Stops(50, token_ids=(tokens[3],)),
        "stop at the limit": Stops(last + 1, token_ids=(tokens[3],)),
        "abort": Stops(2000),
        "nothing but fed": Stops(1),
    }

    async def scenario() -> None:
        async with running(model, depth=depth, max_running=2) as ring:
            ring.name(SESSION, [])
            answer = await ended(ring, PROMPT, ways[way], 3 if way == "abort" else None)
            assert answer.end == {"abort": "abort", "length": "length", "nothing but fed": "length"}.get(way, "stop")
            position = ring.kept[SESSION][1]
            if way == "nothing but fed":
                assert position == len(PROMPT)  # the one drawn token was never fed: the state ends with the prompt
                history = list(PROMPT)
            else:
                history = PROMPT + answer.tokens
                fed = way == "stop" and depth == 2  # with two steps in flight, the second one feeds the stop token
                assert position in {len(history) - 1, len(history) - (not fed)}
            following = await ring.turn(SESSION, [*history, 1, 2], 4)
            assert following.cached == position
            assert following.tokens == greedy(model, [*history, 1, 2], 4)

    asyncio.run(scenario())

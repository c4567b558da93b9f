"""Hidden states that a head for multi-token prediction reads and stores, in torch and in C++."""

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st

from baton.kernels.drafts import Drafts
from baton.kernels.prediction import exchange_hidden, join, native
from baton.kernels.runtime import cpp
from tests.kernels.installed import installed

SIZE, MOST = 5, 4


@pytest.fixture(params=["torch", "native"], scope="module")
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    cpp.uninstall()
    if request.param == "torch":
        yield
    else:
        with installed():
            yield


@pytest.mark.usefixtures("form")
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), rows=st.integers(1, 4), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_each_token_gets_the_hidden_state_before_it(seed: int, rows: int, dtype: torch.dtype) -> None:
    """Each row feeds a token and drafts, of which some are accepted; in the end the last one's state is in its slot."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ring = torch.zeros(rows, MOST, SIZE, dtype=dtype)
    states = torch.randn(rows + 1, SIZE, generator=generator).to(dtype)
    slots, rings = torch.randperm(rows + 1, generator=generator)[:rows], chance.sample(range(rows), rows)
    last, replays, untouched = list(states[slots].clone()), [0] * rows, states.clone()
    for _ in range(4):
        fed = [1 + chance.randint(0, MOST) for _ in range(rows)]
        hidden = torch.randn(sum(fed), SIZE, generator=generator).to(dtype)
        drafts = Drafts.of(replays, fed, rings) if max(fed) > 1 or any(replays) else None
        before = exchange_hidden(hidden, states, slots, drafts, ring).split(fed)
        for row, (found, own) in enumerate(zip(before, hidden.split(fed), strict=True)):
            assert torch.equal(found, torch.stack([last[row], *own[:-1]]))
            replays[row] = chance.randrange(fed[row])
            last[row] = own[replays[row]]
    committed = [row for row in range(rows) if replays[row]]
    if committed:
        drafts = Drafts.of([replays[r] for r in committed], [0] * len(committed), [rings[r] for r in committed])
        exchange_hidden(states[:0], states, slots[committed], drafts, ring)
    assert torch.equal(states[slots], torch.stack(last))
    other = [slot for slot in range(rows + 1) if slot not in slots.tolist()]
    assert torch.equal(states[other], untouched[other])


@pytest.mark.usefixtures("form")
def test_rows_are_put_side_by_side() -> None:
    left, right = torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.arange(6, 12, dtype=torch.bfloat16).view(2, 3)
    assert join(left, right).tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    with installed():
        hidden, slots = torch.zeros(2, 3), torch.tensor([0, 1])
        for states in (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.bfloat16)):
            with pytest.raises(ValueError, match="states"):
                native.exchange_hidden(hidden, states, slots)
        with pytest.raises(ValueError, match="beside"):
            native.join(hidden, torch.zeros(2, 4))

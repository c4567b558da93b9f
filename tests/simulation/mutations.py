"""All planted bugs by name, and how to plant one."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from tests.simulation import (
    mutations_of_copies,
    mutations_of_drafts,
    mutations_of_grammars,
    mutations_of_hints,
    mutations_of_pauses,
    mutations_of_pooling,
    mutations_of_requests,
    mutations_of_sessions,
    mutations_of_state,
    mutations_of_turns,
    mutations_of_worth,
)
from tests.simulation.planting import Patch
from tests.simulation.scenario import Scenario, draw
from tests.simulation.shrink import failure

MUTATIONS: dict[str, Callable[[Patch], None]] = {
    name: value
    for module in (
        mutations_of_state,
        mutations_of_requests,
        mutations_of_sessions,
        mutations_of_copies,
        mutations_of_pauses,
        mutations_of_turns,
        mutations_of_worth,
        mutations_of_grammars,
        mutations_of_hints,
        mutations_of_drafts,
        mutations_of_pooling,
    )
    for name, value in vars(module).items()
    if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant the bug of this name while the block runs."""
    with ExitStack() as patches:
        MUTATIONS[name](
            lambda owner, attribute, value: patches.enter_context(mock.patch.object(owner, attribute, value))
        )
        yield


def scenario_for(name: str, seed: int) -> Scenario:
    """Draw the seed's scenario for a bug.

    Pauses, flows, a copy stream, grammars, hints, drafts and pooling are left out unless the bug concerns them: the
    seeds of other bugs were found before these features existed.
    """
    module = MUTATIONS[name].__module__
    of_copies = module == mutations_of_copies.__name__
    scenario = draw(
        seed,
        may_pause=module == mutations_of_pauses.__name__,
        has_flows=module in (mutations_of_turns.__name__, mutations_of_worth.__name__),
        copies_aside=of_copies,
        has_grammars=module in (mutations_of_grammars.__name__, mutations_of_drafts.__name__),
        may_hint=module == mutations_of_hints.__name__,
        may_draft=module == mutations_of_drafts.__name__,
        may_predict=False,
        may_pool=module == mutations_of_pooling.__name__,
    )
    return replace(scenario, copy_time=12.0) if of_copies and scenario.copy_time is None else scenario


def first_seed(name: str, seeds: Iterable[int]) -> int | None:
    """Return the first seed that fails with this bug and passes without it, or None."""
    for seed in seeds:
        with planted(name):
            failed = failure(scenario_for(name, seed)) is not None
        if failed and failure(scenario_for(name, seed)) is None:
            return seed
    return None

"""All planted bugs by name, and how to plant one."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

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
from tests.simulation.planting import Patch, planting
from tests.simulation.scenario import Scenario, draw
from tests.simulation.shrink import Failure, failure

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


# Errors that a planted bug causes if names or signatures have changed since it was written.
STALE = {"TypeError", "AttributeError", "NameError", "UnboundLocalError"}


def planted(name: str) -> AbstractContextManager[None]:
    """Plant the bug of this name while the block runs."""
    return planting(MUTATIONS[name])


def is_out_of_date(found: Failure) -> bool:
    """Return whether a failure shows that the planted bug no longer fits the code, and not the fault that it plants."""
    return found.kind in STALE or found.where.startswith("mutations_of_")


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
    """Return the first seed that fails with this bug and passes without it, or None. See also `is_out_of_date`."""
    for seed in seeds:
        with planted(name):
            found = failure(scenario_for(name, seed))
        if found is not None and not is_out_of_date(found) and failure(scenario_for(name, seed)) is None:
            return seed
    return None

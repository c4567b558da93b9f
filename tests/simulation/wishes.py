"""Optional features of a scenario's requests: grammars for their outputs, hints about their states, pooling, drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from baton.actors.requests import Keep
from tests.simulation.toy_grammar import ToyGrammar

if TYPE_CHECKING:
    from tests.simulation.scenario import Ask, Scenario

WITH_GRAMMARS = WITH_POOLING = 0.3


def with_grammars(rng: random.Random, scenario: Scenario) -> Scenario:
    """Give grammars to half or nine tenths of the requests and turns, in three of ten scenarios."""
    if rng.random() >= WITH_GRAMMARS:
        return scenario
    share = rng.choice([0.5, 0.9])
    asks = tuple(_constrained(rng, ask, share) for ask in scenario.asks)
    talks = [
        replace(talk, turns=tuple(replace(turn, ask=_constrained(rng, turn.ask, share)) for turn in talk.turns))
        for talk in scenario.talks
    ]
    return replace(scenario, asks=asks, talks=tuple(talks))


def _constrained(rng: random.Random, ask: Ask, share: float) -> Ask:
    if rng.random() >= share:
        return ask
    longest, trouble = rng.choice([0, 1, 3, 9, 30, 30]), rng.choice([None] * 9 + [rng.randrange(6)])
    grammar = ToyGrammar(rng.randrange(1, 1000), longest, rng.choice([1, 2, 5, 20]), trouble)
    return replace(ask, grammar=grammar, min_tokens=rng.choice([0, 0, min(3, ask.max_tokens)]))


def with_hints(rng: random.Random, scenario: Scenario) -> Scenario:
    """Give hints to about half of the requests and turns, in half of the scenarios."""
    if rng.random() < 0.5:
        return scenario
    asks = tuple(_hinting(rng, ask) for ask in scenario.asks)
    talks = tuple(
        replace(talk, turns=tuple(replace(turn, ask=_hinting(rng, turn.ask)) for turn in talk.turns))
        for talk in scenario.talks
    )
    return replace(scenario, asks=asks, talks=talks)


def _hinting(rng: random.Random, ask: Ask) -> Ask:
    checkpoints = tuple(rng.random() for _ in range(rng.choice([0, 1, 1, 2, 4])))
    keeps: list[Keep] = ["", "soon", "never"]
    return replace(ask, checkpoints=checkpoints, keep=rng.choice(keeps)) if rng.random() < 0.5 else ask


def with_pooling(rng: random.Random, scenario: Scenario) -> Scenario:
    """Let about half of the requests pool hidden states of their prompt, in three of ten scenarios."""
    if rng.random() >= WITH_POOLING:
        return scenario
    return replace(scenario, asks=tuple(_pooling(rng, ask) for ask in scenario.asks))


def _pooling(rng: random.Random, ask: Ask) -> Ask:
    begin, end = sorted((rng.choice([0.0, rng.random(), 1.0]), rng.choice([0.0, rng.random(), 1.0, 1.0])))
    return replace(ask, pooled=(begin, end)) if rng.random() < 0.5 else ask


def with_drafts(rng: random.Random, scenario: Scenario) -> Scenario:
    """Let the rows feed drafts in half of the scenarios, in some of them at a cost."""
    if rng.random() < 0.5:
        return scenario
    limits = replace(scenario.limits, drafts=rng.choice([1, 2, 4, 8]))
    speeds = structs.replace(scenario.speeds, decode=scenario.speeds.decode or 1.0, draft=1e-6)
    if rng.random() < 0.3:
        speeds.decode, speeds.draft, speeds.turn = 1.0, rng.choice([0.01, 0.1, 0.4]), rng.choice([0.0, 0.1])
    return replace(scenario, limits=limits, speeds=speeds, drafter=rng.choice([0.0, 0.5, 0.9, 1.0]))


def with_predictions(rng: random.Random, scenario: Scenario) -> Scenario:
    """Let the device predict tokens in half of the scenarios with pages, in some of them at a cost."""
    if rng.random() < 0.5 or not scenario.limits.page_size:
        return scenario
    limits = replace(scenario.limits, predictions=rng.choice([1, 2, 4]))
    speeds = structs.replace(scenario.speeds)
    speeds.prediction = rng.choice([1e-6, 0.01, 0.3])
    return replace(scenario, limits=limits, speeds=speeds, predictor=rng.choice([0.0, 0.5, 0.9, 1.0]))

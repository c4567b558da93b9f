"""Scenarios: the pools, the clients' requests and the faults of one seed, all drawn before the run begins."""

import random
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args
from zlib import crc32

from msgspec import structs

from baton.actors.actor import Address
from baton.actors.cache.below.limits import NO_TIERS, TierLimits
from baton.actors.cache.worth.order import Policy
from baton.actors.control import Speeds
from baton.actors.requests import Keep, PauseMode
from baton.actors.scheduler.plan import Limits
from baton.actors.scheduler.strategy import Strategy
from tests.simulation.hash_oracle import VOCABULARY
from tests.simulation.talks import Talk, draw_talks, draw_tiers
from tests.simulation.toy_grammar import ToyGrammar
from tests.simulation.wishes import with_drafts, with_grammars, with_hints, with_pooling, with_predictions

UNIT: tuple[Address, ...] = ("cache", "scheduler", "forward", "results")
Call: TypeAlias = Literal["clear", "copy", "copy_page", "fill", "open_row", "extend_row", "export"]
UNKNOWN = Speeds()
WITH_SESSIONS = 0.4
WITH_BAD_CALLS = 0.15


@dataclass(frozen=True)
class Leave:
    """When and how a client gives up its request."""

    how: Literal["aborted", "timeout", "gone"]  # by an abort, by a timeout, or by closing the connection
    after: float  # how long after the submission, if `tokens` is None
    tokens: int | None  # after receiving this many tokens, if not None


@dataclass(frozen=True)
class Ask:
    """A request that a client will make. Times count turns of an actor; shares are fractions of the prompt's length."""

    id: str
    at: float  # time of submission
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    stop_piece: tuple[int, int] | None = None  # (start, length) in the right output's text: its stop string
    keep_stop: bool = False
    ends: tuple[float, ...] = ()  # positions of message ends, as shares
    priority: int = 0
    salt: str = ""
    seed: int | None = None
    continues: float | None = None  # share of the answered requests: selects the one to continue
    reuses: bool = False  # take the id of the last answered request
    leave: Leave | None = None
    logprobs: bool = False
    prompt_logprobs_from: float | None = None  # first position, as a share
    pooled: tuple[float, float] | None = None  # where pooling begins and ends, as shares
    grammar: ToyGrammar | None = None
    min_tokens: int = 0
    checkpoints: tuple[float, ...] = ()  # positions of checkpoints that the client requests, as shares
    keep: Keep = ""  # the client's hint about the state at the end


@dataclass(frozen=True)
class Crash:
    """A fault: the actor raises at its n-th send, or before or after its n-th delivery."""

    actor: Address
    at: int
    where: Literal["send", "before", "after"]


@dataclass(frozen=True)
class BadStep:
    """A fault: the n-th step that the device runs raises."""

    run: int


@dataclass(frozen=True)
class Poison:
    """A fault: each step in which this request consumes the token at this position raises."""

    request: str
    position: int


@dataclass(frozen=True)
class BadCall:
    """A fault: the n-th call of this kind on the device raises."""

    how: Call
    at: int


@dataclass(frozen=True)
class NoRoom:
    """A fault: for a while the cache grants nothing, and gives a page only to a row that is alone."""

    at: float
    until: float


@dataclass(frozen=True)
class NoCheckpoints:
    """A fault: the cache never gives out a checkpoint slot."""


@dataclass(frozen=True)
class RefusedSends:
    """A fault: before every n-th message with leases, a send of these leases and a dead one is tried, and refused."""

    every: int


@dataclass(frozen=True)
class FlushAt:
    """A flush of the cache at this time."""

    at: float


@dataclass(frozen=True)
class DrainAt:
    """A shutdown at this time, while requests run and arrive."""

    at: float


@dataclass(frozen=True)
class PausedFrom:
    """A pause of generation. The modes are requested one right after another; the last one stays."""

    at: float
    until: float
    modes: tuple[PauseMode, ...]


@dataclass(frozen=True)
class BadWrite:
    """A fault: the n-th write of a file fails, and so do the next `more` writes."""

    at: int
    more: int = 0


@dataclass(frozen=True)
class DamagedFile:
    """A fault: the n-th file is damaged as soon as it is written, and so are the next `more` files."""

    at: int
    more: int = 0


Fault = (
    Crash | BadStep | BadCall | Poison | NoRoom | NoCheckpoints | RefusedSends | FlushAt | DrainAt | PausedFrom
    | BadWrite | DamagedFile
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed draws before the run. Times count turns of an actor."""

    slots: int  # slots of the state pool
    pages: int  # pages of the page pool; 0 without attention
    limits: Limits
    max_tree_tokens: int  # the limit of tokens in the cache's tree
    codec: bool  # whether every message is encoded and decoded on its way
    step_time: float  # the mean duration of a step on the device
    lazy: Address | None  # an actor that rarely gets a turn
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    schedule: int  # the seed of everything drawn during the run
    talks: tuple[Talk, ...] = ()
    tiers: TierLimits = NO_TIERS
    disk_time: float = 0.0  # the mean duration of a call on the disk
    hand_over: bool = False  # whether every session is suspended before the shutdown
    flows: int = 1  # the number of flows; 0: each request is a flow of its own
    policy: Policy = "worth"  # the cache's eviction policy
    worth_waiting: int = 64  # no Acquire waits for a state this shallow
    worth_asking: int = 64  # no peer is asked for a state that saves this few tokens
    speeds: Speeds = UNKNOWN  # the speeds that the device reports
    file_byte: float = 0.0  # seconds that the disk reports for reading one byte
    drafter: float = 0.0  # how likely each token is right that results proposes, where rows feed drafts
    predictor: float = 0.0  # how likely each token is right that the device predicts
    copy_time: float | None = None
    """The mean duration of a copy on the copy stream; None: copies are made on the stream of the steps."""

    def flow_of(self, name: str) -> str:
        return str(crc32(name.encode()) % self.flows) if self.flows else name

    @property
    def room(self) -> int | None:
        """Return how many positions the pages can hold; None without attention."""
        return self.pages * self.limits.page_size if self.limits.page_size else None

    def without(self, *, ask: Ask | None = None, fault: Fault | None = None) -> "Scenario":
        """Return the scenario without one request or one fault."""
        asks = tuple(other for other in self.asks if other is not ask)
        return replace(self, asks=asks, faults=tuple(other for other in self.faults if other is not fault))

    def with_faults(self, *faults: Fault) -> "Scenario":
        """Return the scenario with these faults and no others."""
        return replace(self, faults=faults)


def draw(
    seed: int,
    strategy: Strategy | None = None,
    overlap: bool | None = None,
    may_be_narrow: bool = True,
    may_pause: bool = True,
    bad_calls: bool = True,
    has_flows: bool = True,
    copies_aside: bool = True,
    has_grammars: bool = True,
    may_hint: bool = True,
    may_draft: bool = True,
    may_predict: bool = True,
    may_pool: bool = True,
) -> Scenario:
    """Draw a seed's scenario.

    False leaves a feature out, for seeds that were found before the feature existed.

    strategy, overlap: drawn if None
    may_be_narrow: steps may have fewer tokens than there are rows
    may_pause: generation may be paused
    bad_calls: calls on the device may raise
    has_flows: requests may be in several flows
    copies_aside: copies to and from host memory may have a stream of their own
    has_grammars: requests may have grammars
    may_hint: clients may give hints about states
    may_draft: rows may feed drafts
    may_predict: with drafts, the device may predict tokens
    may_pool: requests may pool hidden states
    """
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3, 4, 7])
    paged = rng.random() < 0.7
    longest = rng.choice([20, 30, 60, 60])
    pages = -(-longest // page_size) + rng.choice([0, 0, 1, 5, 20, 100]) if paged else 0
    max_running = rng.randint(1, 6)
    strategies = list(Strategy)
    drawn_strategy, drawn_depth = rng.choice(strategies), rng.choice([1, 2, 2])
    limits = Limits(
        max_running=max_running,
        max_queue=rng.choice([3, 100, 100, 100]),
        step_tokens=rng.choice([max_running + 1, 8, 16, 64]),
        page_size=page_size if paged else 0,
        min_saving=rng.choice([1, 4, 16]),
        track_interval=rng.choice([0, 3, 4, 8]),
        depth=drawn_depth if overlap is None else 1 + overlap,
        strategy=strategy or drawn_strategy,
    )
    gap = rng.choice([5, 20, 60, 150])
    hasty = rng.choice([0, 0, 0.1, 0.4])
    asks, at = [], 0.0
    for index in range(rng.randint(4, 22)):
        at += rng.expovariate(1 / gap)
        asks.append(_draw_ask(rng, f"r{index}", at, hasty))
    if paged and rng.random() < 0.25:
        # Make the pool just large enough for one prompt, with or without a spare page to copy from.
        pages = -(-(len(rng.choice(asks).prompt) + 1) // page_size) + rng.choice([0, 1, 1])
    scenario = Scenario(
        slots=rng.choice([1, 1, 2, max_running + 2, 4 * max_running, 8 * max_running]),
        pages=pages,
        limits=limits,
        max_tree_tokens=rng.choice([50, 1 << 22, 1 << 22]),
        codec=rng.random() < 0.1,
        step_time=rng.choice([0.0, 3.0, 12.0, 40.0]),
        lazy=rng.choice([None, None, *UNIT, "api"]),
        asks=tuple(asks),
        faults=tuple(_draw_faults(rng, asks, at + 100)),
        schedule=rng.randrange(1 << 32),
    )
    narrow = random.Random(f"narrow steps of {seed}")
    if may_be_narrow and narrow.random() < 0.15:
        scenario = replace(scenario, limits=replace(limits, step_tokens=narrow.choice([2, 3, 4])))
    rng = random.Random(f"sessions of {seed}")
    scenario = _with_sessions(rng, scenario, hasty) if rng.random() < WITH_SESSIONS else scenario
    scenario = _with_pauses(random.Random(f"pauses of {seed}"), scenario, at) if may_pause else scenario
    scenario = _with_bad_calls(random.Random(f"bad calls of {seed}"), scenario) if bad_calls else scenario
    if has_flows:
        scenario = replace(scenario, flows=random.Random(f"flows of {seed}").choice([0, 1, 2, 3]))
    rng = random.Random(f"policy of {seed}")
    policies: list[Policy] = ["worth", "worth", "lru"]
    scenario = replace(scenario, policy=rng.choice(policies), worth_waiting=rng.choice([0, 1, 4, 64]))
    scenario = _with_speeds(random.Random(f"speeds of {seed}"), scenario)
    scenario = _with_step_time(random.Random(f"step time of {seed}"), scenario)
    scenario = _with_copy_stream(random.Random(f"copy stream of {seed}"), scenario) if copies_aside else scenario
    scenario = with_grammars(random.Random(f"grammars of {seed}"), scenario) if has_grammars else scenario
    scenario = with_hints(random.Random(f"hints of {seed}"), scenario) if may_hint else scenario
    scenario = with_drafts(random.Random(f"drafts of {seed}"), scenario) if may_draft else scenario
    may_predict = may_predict and scenario.limits.drafts > 0
    scenario = with_pooling(random.Random(f"pooling of {seed}"), scenario) if may_pool else scenario
    return with_predictions(random.Random(f"predictions of {seed}"), scenario) if may_predict else scenario


def _with_copy_stream(rng: random.Random, scenario: Scenario) -> Scenario:
    """Give copies their own stream in two of three scenarios with host memory."""
    if not scenario.tiers.host_bytes or rng.random() < 1 / 3:
        return scenario
    return replace(scenario, copy_time=rng.choice([0.0, 3.0, 40.0, 300.0]))


def _with_step_time(rng: random.Random, scenario: Scenario) -> Scenario:
    """Limit the time of steps in a third of the scenarios, so that prompts get fewer tokens than fit into a step."""
    if rng.random() < 2 / 3:
        return scenario
    speeds = structs.replace(scenario.speeds, decode=1.0, prompt=rng.choice([0.01, 0.1, 1.0]))
    limits = replace(scenario.limits, step_time=rng.choice([0.0, 1.5, 4.0]))
    speeds.mixed = rng.choice([0.0, 0.5, 8.0])
    return replace(scenario, speeds=speeds, limits=limits)


def _with_speeds(rng: random.Random, scenario: Scenario) -> Scenario:
    """Draw speeds at which copying unnamed states may pay. Add tiers to some scenarios without sessions."""
    if not scenario.talks and rng.random() < 0.4:
        tiers = draw_tiers(rng, scenario.pages > 0)
        scenario = replace(scenario, tiers=tiers, disk_time=rng.choice([0.0, 5.0, 50.0]))
    if not scenario.tiers.host_bytes or rng.random() < 0.2:
        return scenario
    speeds = Speeds(1.0, rng.choice([1e-7, 1e-5, 1e-3, 1e-2]))
    return replace(scenario, speeds=speeds, file_byte=rng.choice([1e-7, 1e-7, 1e-3, 1.0]))


def _with_bad_calls(rng: random.Random, scenario: Scenario) -> Scenario:
    """Make some calls on the device raise, in a few scenarios."""
    if rng.random() >= WITH_BAD_CALLS:
        return scenario
    bad = [BadCall(how, rng.randint(1, 12)) for how in rng.choices(get_args(Call), k=rng.choice([1, 2, 6]))]
    return replace(scenario, faults=(*scenario.faults, *bad))


def _with_pauses(rng: random.Random, scenario: Scenario, end: float) -> Scenario:
    """Add one or two pauses of generation to one in five scenarios."""
    if rng.random() >= 0.2:
        return scenario
    pauses, at = [], 0.0
    for _ in range(rng.choice([1, 1, 2])):
        at += rng.uniform(0, end)
        until = at + rng.choice([0, 5, 50, 300])
        pauses.append(PausedFrom(at, until, tuple(rng.choices(["in_place", "retract"], k=rng.choice([1, 1, 2])))))
        at = until
    return replace(scenario, faults=(*scenario.faults, *pauses))


def _with_sessions(rng: random.Random, scenario: Scenario, hasty: float) -> Scenario:
    """Add sessions and disk faults, and keep only a few of the requests without a session."""
    talks = draw_talks(rng, lambda name, at: _draw_ask(rng, name, at, hasty / 2))
    faults = list(scenario.faults)
    if rng.random() < 0.15:
        faults.append(Crash(rng.choice(UNIT), rng.randint(40, 400), rng.choice(["send", "before", "after"])))
    if rng.random() < 0.25:
        faults.append(BadWrite(rng.randint(1, 6), rng.choice([0, 0, 1000])))
    if rng.random() < 0.25:
        faults.append(DamagedFile(rng.randint(1, 4), rng.choice([0, 1000])))
    if rng.random() < 0.15:
        turn = rng.choice(rng.choice(talks).turns)
        faults.append(Poison(turn.ask.id, rng.randrange(60)))
    return replace(
        scenario,
        asks=scenario.asks[: rng.choice([0, 2, 8])],
        faults=tuple(faults),
        talks=talks,
        tiers=draw_tiers(rng, scenario.pages > 0),
        disk_time=rng.choice([0.0, 5.0, 50.0, 300.0]),
        hand_over=rng.random() < 0.3,
    )


def _draw_ask(rng: random.Random, name: str, at: float, hasty: float) -> Ask:
    """Draw a request, whose prompt begins with a part of one of two shared prefixes.

    hasty: the probability that its client gives it up
    """
    family = random.Random(rng.randrange(2))
    shared = [family.randrange(VOCABULARY) for _ in range(40)]
    own = [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 1, 5, 12]))]
    prompt = shared[: rng.choice([rng.randint(1, 30), 12, 25])] + own
    leave = None
    if rng.random() < hasty:
        tokens = rng.choice([None, rng.randint(0, 12)])
        leave = Leave(rng.choice(["aborted", "timeout", "gone"]), rng.choice([0, 5, 30, 100]) * rng.random(), tokens)
    return Ask(
        id=name,
        at=at,
        prompt=tuple(prompt),
        max_tokens=rng.randint(1, 17),
        stop_ids=tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 3, 12]))),
        stop_piece=(rng.randrange(17), rng.randint(1, 3)) if rng.random() < 0.3 else None,
        keep_stop=rng.random() < 0.3,
        ends=tuple(rng.random() for _ in range(rng.choice([0, 0, 1, 2]))),
        priority=rng.choice([0, 0, 0, 1, -1]),
        salt=rng.choice(["", "", "", "tenant"]),
        seed=rng.choice([None, rng.randrange(1000)]),
        continues=rng.random() if rng.random() < 0.5 else None,
        reuses=rng.random() < 0.1,
        leave=leave,
        logprobs=rng.random() < 0.3,
        prompt_logprobs_from=rng.choice([None, None, None, None, None, 0.0, rng.random()]),
    )


def _draw_faults(rng: random.Random, asks: list[Ask], end: float) -> list[Fault]:
    """Draw faults, on average of about two kinds, with one or a few of each kind."""
    faults: list[Fault] = []
    if rng.random() < 0.25:
        for _ in range(rng.choice([1, 1, 2])):
            at = int(rng.choice([20, 60, 120]) * rng.random()) + 1
            faults.append(Crash(rng.choice(UNIT), at, rng.choice(["send", "send", "before", "after"])))
    if rng.random() < 0.25:
        faults += [BadStep(rng.randint(1, 60)) for _ in range(rng.choice([1, 2, 4]))]
    if rng.random() < 0.2:
        faults += [Poison(rng.choice(asks).id, rng.randrange(40)) for _ in range(rng.choice([1, 1, 2]))]
    if rng.random() < 0.2:
        begin = rng.uniform(0, end)
        faults.append(NoRoom(begin, begin + rng.choice([10, 100, 300])))
    if rng.random() < 0.1:
        faults.append(NoCheckpoints())
    if rng.random() < 0.2:
        faults.append(RefusedSends(rng.choice([1, 3, 10])))
    if rng.random() < 0.25:
        faults += [FlushAt(rng.uniform(0, end)) for _ in range(rng.choice([1, 1, 3]))]
    if rng.random() < 0.15:
        faults.append(DrainAt(rng.uniform(0, end)))
    return faults

"""Checkpoints that clients request, and requests whose client will not resume them (keep="never")."""

from baton.actors.kinds import Kind
from baton.actors.messages import Acquire, Granted, Mark, Settled, Step, Submit, Want
from baton.actors.requests import Hit, Keep, Request, Sampling, Stops
from baton.actors.scheduler.plan import checkpoint_positions
from baton.actors.tokens import pack
from tests.actors.scheduler.test_scheduler import Bench


def request(checkpoints: tuple[int, ...] = (), keep: Keep = "", ends: tuple[int, ...] = (6, 12)) -> Request:
    stops = Stops(10)
    tokens = pack(range(20))
    return Request("r", tokens, 20, Sampling(), stops, message_ends=ends, checkpoints=checkpoints, keep=keep)


def running(submission: Request, match: int = 0, branch: int | None = None, **limits: int) -> Bench:
    """Return a bench with one row for this request: grant 1, which resumes from `match` tokens."""
    bench = Bench(**limits)
    bench.receive(Submit(submission))
    state = bench.ledger.take("scheduler")
    assert state is not None
    bench.receive(Granted(1, state, Hit(match, match), False, None, [], None, branch))
    return bench


def targets_of(bench: Bench) -> dict[int, Kind]:
    return {position: kind for want in bench.of(Want) if isinstance(want, Want) for position, kind in want.checkpoints}


def test_checkpoints_that_the_client_asks_for_rank_first() -> None:
    positions = checkpoint_positions(request((6, 9)), branch=9)
    assert positions == {6: Kind.ASKED, 9: Kind.ASKED, 12: Kind.LAST_END, 19: Kind.PROMPT_END}
    assert min(Kind) is Kind.ASKED


def test_with_keep_never_only_branches_and_requested_checkpoints_are_saved() -> None:
    assert checkpoint_positions(request(keep="never"), branch=None) == {}
    assert checkpoint_positions(request((3,), "never"), branch=9) == {3: Kind.ASKED, 9: Kind.BRANCH}
    assert checkpoint_positions(request(keep="soon"), None) == checkpoint_positions(request(), None) != {}


def test_a_checkpoint_that_the_client_asks_for_is_saved_however_few_tokens_it_saves() -> None:
    bench = running(request((1, 10, 11), ends=()), match=10, min_saving=16)
    assert targets_of(bench) == {11: Kind.ASKED}, (
        "the state at 10 is there, and none is worth having at the prompt's end"
    )
    bench.ledger.close()


def test_an_acquire_carries_the_client_s_hints() -> None:
    bench = running(request((3, 7), "soon"))
    [acquire] = bench.of(Acquire)
    assert isinstance(acquire, Acquire) and (acquire.checkpoints, acquire.keep) == ((3, 7), "soon")
    bench.ledger.close()


def test_a_mark_does_not_change_the_kind_of_a_requested_checkpoint() -> None:
    bench = running(request((15,)), step_tokens=4)
    bench.receive(Mark(1, 15))
    bench.receive(Mark(1, 14))
    row = bench.scheduler.state.rows[1]
    assert (row.targets[15], row.targets[14]) == (Kind.ASKED, Kind.BRANCH) and row.marks == {14, 15}
    bench.ledger.close()


def test_with_keep_never_an_output_is_not_checkpointed() -> None:
    """With another `keep`, the output gets a checkpoint at each multiple of the track interval."""
    for keep, expected in (("", {24: Kind.CHECKPOINT}), ("never", {})):
        bench = running(request(keep=keep, ends=()), track_interval=4, min_saving=100, depth=1)  # type: ignore[arg-type]
        assert bench.of(Step)
        bench.receive(Settled(1, []))
        assert targets_of(bench) == expected
        bench.ledger.close()

"""Each planted bug is found: by the recorded seed and, in the soak, also by fresh seeds."""

from dataclasses import replace
from typing import Any

import pytest

from baton.actors.cache.actor import Cache
from baton.actors.cache.below.copies import CopyStore
from baton.actors.scheduler.plan import Limits
from baton.actors.scheduler.rows import RunningRows
from baton.actors.scheduler.strategy import Strategy
from tests.simulation.mutations import MUTATIONS, first_seed as find, is_out_of_date, planted, scenario_for
from tests.simulation.planting import OutOfDate, Patch, check_call, planting
from tests.simulation.scenario import UNKNOWN, Ask, Leave, Scenario, draw
from tests.simulation.shrink import Failure, failure, shrink

# The first seed that finds each bug. After a change to what seeds draw, update these from scripts/simulate --mutations.
FOUND_BY = {
    "no_clear_on_reuse": 0,
    "state_copied_ahead_of_the_stream": 32,
    "page_copied_ahead_of_the_stream": 37,
    "donated_at_the_next_position": 0,
    "account_closed_in_flight": 3,
    "loan_not_returned": 0,
    "loan_ended_twice": 0,
    "eviction_under_a_loan": 32,
    "generation_not_bumped": 0,
    "checkpoint_of_another_row": 0,
    "checkpoint_at_the_end_of_the_chunk": 0,
    "state_of_an_overrun_reported_too_early": 0,
    "shared_page_not_copied": 4,
    "moved_state_appends_to_a_shared_page": 16,
    "page_of_a_node_freed": 1,
    "refused_send_moves_leases": 4,
    "resumed_past_the_state": 0,
    "match_past_the_limit": 26,
    "epoch_ignored": 10,
    "page_dropped_at_a_split": 3,
    "pages_evicted_without_a_slot": 4,
    "blocked_acquire_blocks_all": 9,
    "row_runs_without_its_set_up": 71,
    "retired_before_its_event": 0,
    "retracted_progress_freed": 29,
    "salts_ignored": 0,
    "grant_id_reused": 2,
    "failed_state_donated": 2,
    "step_after_a_failed_one_believed": 2,
    "replay_resampled": 6,
    "replay_forgets_its_output": 6,
    "restart_forgets_the_output": 0,
    "restart_repeats_the_text": 0,
    "innocent_rows_fail": 6,
    "suspect_row_not_alone": 6,
    "failed_row_not_listed": 2,
    "overrun_sample_delivered": 0,
    "spares_kept_at_the_end": 0,
    "late_spares_kept": 29,
    "denied_checkpoint_still_wanted": 0,
    "retired_twice": 2,
    "aborted_row_keeps_running": 2,
    "pages_of_an_aborted_row_sent": 2,
    "lone_request_ends_early": 13,
    "donated_twice": 0,
    "stop_string_not_held_back": 0,
    "max_tokens_reset_by_a_retraction": 7,
    "row_without_a_page_forgotten": 36,
    "id_reused_while_its_row_retires": 426,
    "requests_accepted_after_the_drain": 2,
    "resubmission_refused": 61,
    "prompts_without_a_share": 292,
    "same_rows_decode_every_step": 292,
    "filled_slot_aliases_the_copy": 2,
    "copy_lacks_the_last_entry": 2,
    "slot_freed_after_the_state_left": 3,
    "last_token_fed_twice_after_a_retraction": 60,
    "export_after_the_next_use_of_its_slot": 2,
    "pages_of_an_export_released": 3,
    "filled_before_the_file_is_read": 7,
    "name_not_moved_after_a_turn": 4,
    "busy_copy_dropped": 3,
    "file_written_before_its_copy_is_made": 37,
    "damaged_file_used": 237,
    "disk_limit_ignored": 3,
    "failed_write_believed": 9,
    "suspension_answered_before_the_write": 164,
    "fork_removes_other_names": 21,
    "name_not_answered": 20,
    "name_overtakes_the_save": 364,
    "copy_matched_past_the_limit": 26,
    "copy_of_a_closed_session_stays": 3,
    "loan_of_a_copy_never_ends": 2,
    "filled_one_page_too_late": 14,
    "row_called_stuck_during_an_export": 94,
    "end_of_a_turn_wakes_no_command": 22,
    "end_of_a_write_wakes_no_command": 3,
    "returned_copy_never_evicted": 2,
    "evicted_state_granted": 250,
    "flush_keeps_the_copies": 2,
    "unmade_copy_kept": 35,
    "export_reported_when_enqueued": 2,
    "copied_sent_when_the_fill_is_enqueued": 36,
    "filled_sent_when_the_fill_is_enqueued": 2,
    "retired_during_its_fill": 152,
    "copies_do_not_wait_for_steps": 19,
    "filling_row_planned": 2,
    "lent_copy_dropped": 36,
    "unfinished_copy_used": 22,
    "failed_export_believed": 35,
    "failed_fill_believed": 19,
    "restart_does_not_drain_copies": 158,
    "paused_rows_keep_stepping": 68,
    "retracting_pause_keeps_the_slots": 10,
    "retracting_pause_answered_too_early": 42,
    "parked_acquires_stay_in_a_pause": 25,
    "continue_turns_into_a_pause_in_place": 0,
    "first_come_first_served": 9,
    "running_rows_not_counted": 9,
    "first_prompt_takes_all": 29,
    "step_time_ignored": 6,
    "prompts_left_out_while_rows_decode": 6,
    "no_row_retracted_for_a_flow": 114,
    "kind_changed_without_requeueing": 0,
    "worth_below_a_new_state_not_updated": 0,
    "named_state_dropped_for_a_checkpoint": 121,
    "state_dropped_instead_of_copied": 3,
    "session_copy_evicted_for_an_unnamed_one": 37,
    "copy_not_requeued": 3,
    "evicted_state_stays_queued": 0,
    "waits_for_an_ended_leader": 16,
    "late_mark_not_answered": 6,
    "saved_state_reported_as_passed": 28,
    "missed_mark_not_reported": 774,
    "passed_ignored": 6,
    "stale_mask_used": 5,
    "mask_of_another_row": 6,
    "grammar_reset_by_a_restart": 130,
    "grammar_reset_by_a_retraction": 9,
    "no_mask_for_the_next_grant": 9,
    "matcher_not_advanced": 5,
    "stop_tokens_always_allowed": 5,
    "complete_row_keeps_running": 5,
    "late_masks_sent_when_the_first_has_come": 28,
    "late_mask_of_an_ended_row_awaited": 6,
    "late_mask_of_a_retired_row_lost": 5,
    "next_step_does_not_wait_for_late_masks": 5,
    "late_mask_applied_to_the_next_row": 6,
    "unneeded_end_donated": 1,
    "retracted_state_freed": 80,
    "requested_checkpoint_one_late": 1,
    "checkpoint_of_an_unneeded_end": 1,
    "denial_not_recorded": 1,
    "denial_stays_in_the_lower_node": 10,
    "denial_outlives_the_state": 305,
    "ring_read_after_a_rejection": 5,
    "one_draft_too_many_accepted": 5,
    "accepted_drafts_replayed_again": 0,
    "commit_of_drafts_after_the_stop": 0,
    "commit_left_out": 0,
    "failed_commit_believed": 658,
    "slot_cleared_again_by_a_step_with_drafts": 0,
    "drafts_beyond_the_pages": 13,
    "drafts_beyond_a_checkpoint": 0,
    "tokens_after_a_stop": 0,
    "accepted_count_ignored": 0,
    "step_before_drafts_are_settled": 0,
    "ring_of_the_row_before": 0,
    "mask_of_another_draft": 28,
    "drafts_of_another_row": 75,
    "pooled_tokens_taken_from_the_cache": 29,
    "pooled_again_after_a_restart": 23,
    "pooled_result_dropped_before_the_first_token": 3,
}
# The common prefix of the prompts in the scenarios of rare bugs.
START = (8, 36, 54, 51, 48, 4, 16, 7, 31, 48, 28)
# Features that did not exist when these seeds were found.
OLDER = dict.fromkeys(
    ("may_pause", "bad_calls", "has_flows", "copies_aside", "has_grammars", "may_hint", "may_pool"), False
)
FAILED_TURN = draw(7969, may_be_narrow=False, **OLDER)
# Scenarios written for bugs that only about one seed in 3,000 finds.
RARE = {
    # The second of two requests resumes inside a page and fills the pool.
    "pool_with_a_copy_in_flight_counts_as_full": Scenario(
        slots=1,
        pages=11,
        limits=Limits(max_running=1, step_tokens=8, page_size=2, strategy=Strategy.NO_BUFFER),
        max_tree_tokens=1 << 22,
        codec=False,
        step_time=0.0,
        lazy="forward",
        asks=(Ask("r0", 0.0, START, 1), Ask("r1", 200.0, (*START, 41, 1, 2, 3, 4, 5, 6, 7), 3)),
        faults=(),
        schedule=0,
    ),
    # A turn that took its session's state along has a failing step, and a file of an older state remains.
    "failed_turn_not_reported": replace(
        FAILED_TURN, policy="lru", speeds=UNKNOWN, limits=replace(FAILED_TURN.limits, min_saving=1), schedule=5002
    ),
    # A request with a moved state is aborted while another request's step still delays its first step.
    "moved_state_freed": Scenario(
        slots=2,
        pages=0,
        limits=Limits(max_running=2, step_tokens=8, depth=1, strategy=Strategy.NO_BUFFER),
        max_tree_tokens=1 << 22,
        codec=False,
        step_time=200.0,
        lazy=None,
        asks=(
            Ask("r0", 0.0, START[:5], 1),
            Ask("r1", 600.0, (1, 2, 3), 17),
            Ask("r2", 900.0, (*START[:5], 41, 1, 2), 3, leave=Leave("aborted", 20.0, None)),
        ),
        faults=(),
        schedule=0,
    ),
    # A session is closed while messages of its turn are still on their way round the ring.
    "turn_of_a_closed_session_named": draw(5828, **OLDER),
    # Several sessions wait for host memory while nothing else moves, so no other event wakes them.
    "room_wakes_one_command_only": draw(1626, **OLDER),
}


def scenario_of(name: str) -> Scenario:
    return RARE[name] if name in RARE else scenario_for(name, FOUND_BY[name])


def test_every_mutation_has_its_seed() -> None:
    assert FOUND_BY.keys() | RARE.keys() == MUTATIONS.keys() and len(MUTATIONS) >= 16
    assert all(mutation.__doc__ for mutation in MUTATIONS.values())


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_found(name: str) -> None:
    with planted(name):
        found = failure(scenario_of(name))
    assert found is not None, "nothing failed: scripts/simulate --mutations"
    assert not is_out_of_date(found), f"the mutation is out of date: {found}"
    assert failure(scenario_of(name)) is None


@pytest.mark.parametrize("replacement", [lambda self, message: None, lambda self, message, *, ends: None])
def test_a_replacement_with_another_signature_is_refused(replacement: Any) -> None:
    with (
        pytest.raises(OutOfDate, match=r"Cache\._donate"),
        planting(lambda patch: patch(Cache, "_donate", replacement)),
    ):
        pass


def test_a_replacement_must_take_the_arguments_without_defaults_alone() -> None:
    with pytest.raises(OutOfDate, match="pages"):
        check_call(CopyStore.match, lambda self, salt, tokens, limit, pages: None, "match")
    check_call(CopyStore.match, lambda self, *rest: None, "match")


def renamed_field(patch: Patch) -> None:
    patch(RunningRows, "retire", lambda self, *_: self.no_such_field)


def unpacked_wrongly(patch: Patch) -> None:
    patch(RunningRows, "retire", lambda self, *_: dict([1]))


@pytest.mark.parametrize("bug", [renamed_field, unpacked_wrongly])
def test_an_error_of_the_patch_itself_does_not_count(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MUTATIONS, "stale", bug)
    assert find("stale", range(3)) is None


def test_only_the_error_of_a_check_counts() -> None:
    assert is_out_of_date(Failure("KeyError", "mutations_of_state.py:receive", "7", 5))
    assert not is_out_of_date(Failure("KeyError", "actor.py:_retire", "7", 5))


@pytest.mark.soak
@pytest.mark.parametrize("name", FOUND_BY)
def test_fresh_seeds_find_it(name: str, first_seed: int) -> None:
    assert find(name, range(first_seed, first_seed + 2000)) is not None


def test_a_failing_seed_is_shrunk() -> None:
    """The shrunk scenario fails in the same way after far fewer deliveries, and passes without the bug."""
    name = "shared_page_not_copied"
    scenario = scenario_of(name)
    with planted(name):
        found = failure(scenario)
        small, how = shrink(scenario)
        assert found is not None and how.like(found)
        assert len(small.asks) <= 3 and not small.faults and how.deliveries * 4 < found.deliveries
        again = failure(small)
    assert again == how and failure(small) is None

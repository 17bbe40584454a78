"""Every moment of a run's wall time belongs to one part, whatever happened in it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.goodput import PARTS, Breakdown, Goodput, breakdown
from ftrain.records import Commit, Event, read_records
from tests.written import T0, Written, config, good_run

SECONDS = st.floats(0.0, 30.0)
WORKER = st.integers(0, 3)
KINDS: dict[str, dict[str, Any]] = {
    "run_started": {"config": st.just(config(cluster={"workers": 4, "min_workers": 2}))},
    "worker_ready": {"worker": WORKER, "compile_s": SECONDS},
    "worker_exited": {
        "worker": WORKER,
        "reason": st.sampled_from(["SIGKILL", "the end of the run"]),
    },
    "coordinator_exited": {},
    "hang_detected": {"worker": WORKER, "seconds": SECONDS},
    "step_aborted": {"seconds": SECONDS},
    "view_changed": {
        "workers": st.lists(WORKER, unique=True, min_size=1),
        "seconds": SECONDS,
        "sync_s": SECONDS,
    },
    "evaluated": {"seconds": SECONDS, "metrics": st.just({}), "step": st.integers(1, 9)},
    "time_spent": {
        "seconds": st.dictionaries(st.sampled_from(["data", "hook", "copy", "barrier"]), SECONDS)
    },
    "checkpoint_saved": {"step": st.integers(1, 9), "tier": st.just("disk")},
    "head_taken_over": {},
    "run_finished": {"exit_code": st.just(0)},
    "worker_fenced": {"worker": WORKER},  # one that is nothing to it
    "commit": {"step": st.integers(1, 9), "step_time_s": SECONDS},
}


def facts() -> st.SearchStrategy[list[tuple[str, float, dict[str, Any]]]]:
    """Names, seconds since the fact before, and fields; in any order, likely or not."""
    one = st.one_of(
        *(
            st.tuples(st.just(name), SECONDS, st.fixed_dictionaries(fields))
            for name, fields in KINDS.items()
        )
    )
    return st.lists(one, max_size=40)


def commit(t: float, step: int, step_time_s: float) -> Commit:
    return Commit(t, step, 0.5, step * 12, (0, 1), step_time_s, "", False, {})


@settings(max_examples=300, deadline=None)
@given(facts(), SECONDS)
def test_the_parts_add_up_to_the_wall_time_whatever_happens(told, later):
    """For any facts in any order; none is negative, and looking changes nothing."""
    account, t, began, running = Goodput(), T0, None, False
    for name, after, fields in told:
        if began is not None and not running and name != "run_started":
            continue  # the end is the last line that a supervisor writes
        t += after
        if began is None and name == "run_started":
            began = t
        if name == "commit":
            account.commit(commit(t, **fields))
        else:
            account.event(Event(t, name, fields))
        if began is not None:
            check(account.at(), t - began)
            running = name != "run_finished"
            check(account.at(t + later), t - began + later * running)
            check(account.at(), t - began)


def check(found: Breakdown, wall_s: float) -> None:
    assert set(found.parts) == set(PARTS)
    assert all(seconds >= -1e-6 for seconds in found.parts.values()), found.parts
    # Unix times are good to a quarter of a microsecond.
    assert math.fsum(found.parts.values()) == pytest.approx(wall_s, abs=1e-4)
    assert found.wall_s == pytest.approx(wall_s, abs=1e-4)


def parts_of(run: Written, tmp_path) -> dict[str, float]:
    found = breakdown(read_records(run.write(tmp_path / "run")))
    return {part: pytest.approx(s, abs=1e-3) for part, s in found.parts.items() if s > 1e-6}


def test_a_calm_run_is_its_start_its_steps_and_its_end(tmp_path):
    """A step's own seconds count; what is between two steps is nobody's."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(4)
    run.wait(0.5)
    run.save()
    run.finish()
    assert parts_of(run, tmp_path) == {
        "start": 2.5,  # three seconds to ready, one of them compiling, and half a one to meet
        "compile": 1.0,
        "train": 3.6,
        "other": 0.4,
        "checkpoint": 0.5,
        "stop": 1.0,
    }


def test_a_death_costs_the_attempt_the_detection_the_meeting_and_the_return(tmp_path):
    """Half a step is thrown away, a tenth goes by until the abort, then the views change."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(3)
    before = parts_of(run, tmp_path)
    run.die_and_return(1)
    after = parts_of(run, tmp_path)
    cost = {p: s.expected - before[p].expected if p in before else s for p, s in after.items()}
    assert cost == {
        "start": 0.0,
        "compile": 0.0,
        "train": pytest.approx(1.8),
        "other": pytest.approx(0.2),
        "abort": pytest.approx(0.5),
        "detection": pytest.approx(0.1),
        "settle": pytest.approx(0.25),
        "sync": pytest.approx(0.25),
        "rejoin": pytest.approx(0.5),
    }


def test_a_hang_is_detected_from_when_it_began(tmp_path):
    """Not from when it was found."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(3)
    run.die_and_return(1, stuck_s=20.0)
    assert parts_of(run, tmp_path)["detection"] == pytest.approx(20.1)


def test_what_a_rewind_gives_up_is_lost(tmp_path):
    """Three steps of 0.9 seconds are committed again."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(5)
    run.save()
    run.steps(8)
    run.lose_all(restored=5)
    run.steps(8)
    found = parts_of(run, tmp_path)
    assert (found["train"], found["lost"]) == (pytest.approx(7.2), pytest.approx(2.7))


def test_too_few_workers_wait(tmp_path):
    """Until the view has `min_workers` again; the return itself is a rejoin."""
    run = Written(cluster={"workers": 2, "min_workers": 2})
    run.start()
    run.view(0, 1)
    run.steps(2)
    run.exit(1)
    run.event("step_aborted", step=3, failed=[1], seconds=0.0)
    run.view(0)
    run.wait(30.0)
    run.view(0, 1)
    run.steps(3)
    found = parts_of(run, tmp_path)
    assert (found["waiting"], found["rejoin"]) == (pytest.approx(30.0), pytest.approx(0.5))


def test_time_between_two_runs_is_counted_apart(tmp_path):
    """A supervisor that died ends with its last line."""
    found = breakdown(read_records(good_run().write(tmp_path / "run")))
    assert found.parts["between"] == pytest.approx(100.0)
    assert found.goodput < found.goodput_running
    assert found.goodput_running == pytest.approx(
        found.parts["train"] / (found.wall_s - found.parts["between"])
    )


def test_what_the_lowest_worker_spent_inside_its_steps_is_taken_from_them(tmp_path):
    """Waiting for samples is no compute."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(4)
    seconds = {"data": 0.5, "hook": 0.25, "copy": 0.125, "gradient": 2.0, "sync": 1.0}
    run.event("time_spent", step=4, steps=4, seconds=seconds)
    found = parts_of(run, tmp_path)
    assert {p: found[p] for p in ("train", "data", "hook", "checkpoint")} == {
        "train": 3.6 - 0.875,
        "data": 0.5,
        "hook": 0.25,
        "checkpoint": 0.125,
    }


def test_a_live_run_counts_the_step_under_way_and_then_the_fault(tmp_path):
    """`now` moves on while no record comes."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(4)
    records = read_records(run.write(tmp_path / "a"))
    calm = [breakdown(records, run.t + s).parts for s in (0.0, 0.5)]
    assert calm[1]["train"] - calm[0]["train"] == pytest.approx(0.5)
    run.exit(1)
    records = read_records(run.write(tmp_path / "b"))
    late = [breakdown(records, run.t + s).parts for s in (0.0, 0.5)]
    assert late[1]["detection"] - late[0]["detection"] == pytest.approx(0.5)


def test_every_part_can_be_had(tmp_path):
    """No name without a way to it."""
    had: set[str] = set()
    for number, fact in enumerate(itertools.chain([good_run(), evaluated()])):
        found = breakdown(read_records(fact.write(tmp_path / str(number))))
        had |= {part for part, s in found.parts.items() if s > 0}
    assert had == set(PARTS)


def evaluated() -> Written:
    run = Written(cluster={"workers": 2, "min_workers": 2})
    run.start()
    run.view(0, 1)
    run.steps(4)
    run.wait(2.0)
    run.event("evaluated", step=4, metrics={}, seconds=1.5)
    run.event("time_spent", step=4, steps=4, seconds={"data": 0.1, "hook": 0.1, "copy": 0.1})
    run.exit(1)
    run.event("step_aborted", step=5, failed=[1], seconds=0.0)
    run.view(0)
    run.wait(1.0)
    run.view(0, 1)
    return run

"""Which worker the others wait for: one at a time, and never one that rightly waits."""

from __future__ import annotations

import os

import pytest

from ftrain.beat import PHASES, UNHURRIED, UNTIMED, WAITING, Beat, Reading
from ftrain.watchdog import CUT_OFF_S, Hang, find_cut_off, find_hang

NOW, TIMEOUT_S = 1000.0, 60.0
LONG, SHORT = 61.0, 59.0
AT_WORK = sorted(set(PHASES) - WAITING - UNTIMED - UNHURRIED)


def worker(phase: str, seconds: float = LONG, *, round: int = 9, step: int = 5) -> Reading:
    """A worker that has been in `phase` for so many seconds."""
    return Reading(round, step, phase, NOW - seconds)


def culprit(*readings: Reading) -> int | None:
    """The worker to end; ids are places in the list."""
    hang = find_hang(dict(enumerate(readings)), NOW, TIMEOUT_S)
    return None if hang is None else hang.worker


def test_nobody_is_watched_when_nobody_takes_part():
    """Before the start, or when all are dead."""
    assert find_hang({}, NOW, TIMEOUT_S) is None


def test_the_verdict_names_worker_phase_and_seconds():
    """For the record, and for the user."""
    readings = {4: worker("barrier"), 7: worker("data", 70.0)}
    assert find_hang(readings, NOW, TIMEOUT_S) == Hang(7, "data", 70.0)


@pytest.mark.parametrize("phase", AT_WORK)
@pytest.mark.parametrize("waiting", sorted(WAITING))
def test_who_is_at_work_for_too_long_is_the_culprit(phase, waiting):
    """Whatever the others wait in."""
    assert culprit(worker(waiting), worker(phase), worker(waiting)) == 1


@pytest.mark.parametrize("phase", [*AT_WORK, "reduce", "sync"])
def test_nobody_is_ended_before_the_time_is_up(phase):
    """A slow worker is no hung one; those who wait for it even less."""
    assert culprit(worker("reduce"), worker(phase, SHORT)) is None


@pytest.mark.parametrize("phase", sorted(UNTIMED))
def test_phases_without_a_limit_are_never_ended(phase):
    """They take as long as they take, alone or with others waiting."""
    assert culprit(worker(phase)) is None
    assert culprit(worker(phase), worker("sync"), worker("barrier")) is None


@pytest.mark.parametrize("phase", sorted(UNHURRIED))
def test_what_may_take_long_is_stuck_after_ten_times_the_time(phase):
    """A checkpoint that is read from a share that has gone: bounded, and named."""
    assert culprit(worker(phase, 9.9 * TIMEOUT_S), worker("sync"), worker("sync")) is None
    assert culprit(worker(phase, 10.1 * TIMEOUT_S), worker("sync"), worker("sync")) == 0


def test_who_waits_in_the_barrier_is_never_the_culprit():
    """It is in order, however long and whoever is missing."""
    assert culprit(worker("barrier"), worker("barrier")) is None


def test_who_was_stopped_in_a_barrier_that_has_opened_is_behind_and_ended():
    """The others have committed a block more: its barrier is not theirs."""
    assert culprit(worker("reduce", SHORT, round=10), worker("barrier", round=9)) == 1


def test_who_is_behind_comes_before_who_is_at_work():
    """Worker 1 was stopped earlier; worker 0 may only be slow because of it."""
    assert culprit(worker("data", 80.0, round=10), worker("settle", round=9)) == 1


def test_a_newcomer_that_has_committed_nothing_is_not_behind():
    """Its count begins when it first takes part."""
    assert culprit(worker("barrier", round=10), worker("barrier", round=-1, step=-1)) is None


def test_of_two_at_work_the_one_for_longer_is_ended():
    """One at a time: the other may have waited for it."""
    assert culprit(worker("update", 70.0), worker("gradient", 90.0), worker("hook", 80.0)) == 1


def test_when_all_hang_in_a_collective_those_without_state_go_first():
    """Their death costs nothing."""
    assert culprit(worker("reduce"), worker("sync", step=-1), worker("reduce")) == 1


def test_when_all_hang_in_a_collective_the_highest_goes():
    """The lowest may be the donor, the saver and the reporter."""
    assert culprit(worker("reduce"), worker("reduce"), worker("reduce")) == 2


def test_a_collective_in_which_one_has_just_come_is_left_alone():
    """Its time has not come, and it may be who was waited for."""
    assert culprit(worker("reduce"), worker("reduce", SHORT)) is None


def test_of_all_that_wait_the_one_in_the_barrier_is_spared():
    """A hung device on one worker, a barrier on the other."""
    assert culprit(worker("barrier"), worker("reduce")) == 1


def test_a_lone_worker_in_a_hung_update_is_ended():
    """Nobody waits for it, and the run does."""
    assert culprit(worker("update")) == 0


def test_a_beat_is_read_as_it_was_written():
    """Through shared memory: what the supervisor sees is what the worker last wrote."""
    fd = Beat.create("test-beat")
    writer, reader = Beat(fd), Beat(fd)
    os.close(fd)
    assert reader.read().phase == "start"
    writer.round, writer.step = 3, 2
    for phase in PHASES * 20:  # over the wrap of the counter
        writer.phase(phase)
        got = reader.read()
        assert (got.round, got.step, got.phase) == (3, 2, phase)


def test_a_stopped_process_is_the_culprit_among_equals():
    """All four wait in one collective for so long; the one that SIGSTOP holds is ended."""
    readings = dict(enumerate([worker("reduce")] * 4))
    hang = find_hang(readings, NOW, TIMEOUT_S, stopped=[1])
    assert hang is not None and hang.worker == 1
    assert find_hang({1: worker("reduce", SHORT)}, NOW, TIMEOUT_S, stopped=[1]) is None


def cut_off(pairs: set[tuple[int, int]], *readings: Reading, timeout_s: float = TIMEOUT_S):
    """The verdict on workers of which those pairs cannot reach one another."""
    return find_cut_off(dict(enumerate(readings)), NOW, timeout_s, lambda: pairs)


@pytest.mark.parametrize("phase", ["reduce", "sync", "evaluate"])
def test_of_a_pair_that_is_cut_the_higher_is_ended_and_named_with_the_other(phase):
    """And not worker 3, who waits in the same collective."""
    waiting = [worker(phase, CUT_OFF_S + 1)] * 4
    assert cut_off({(1, 2)}, *waiting) == Hang(2, phase, CUT_OFF_S + 1, (1,))


def test_of_a_pair_that_is_cut_the_one_without_state_is_ended():
    """Worker 0 has just come; its death costs nothing."""
    readings = [worker("sync", step=-1), worker("sync")]
    assert cut_off({(0, 1)}, *readings).worker == 0


def test_who_misses_most_is_ended():
    """Worker 0 reaches nobody: the others reach one another."""
    hang = cut_off({(0, 1), (0, 2), (0, 3)}, *[worker("reduce")] * 4)
    assert (hang.worker, hang.unreachable) == (0, (1, 2, 3))


def test_a_cut_pair_gets_its_time():
    """`CUT_OFF_S`, or a shorter hang_timeout_s."""
    readings = [worker("reduce", CUT_OFF_S - 1)] * 2
    assert cut_off({(0, 1)}, *readings) is None
    assert cut_off({(0, 1)}, *readings, timeout_s=5.0).worker == 1


@pytest.mark.parametrize("phase", ["barrier", "data", "gradient", "hook"])
def test_a_connection_that_nobody_waits_in_ends_nobody(phase):
    """Worker 0 is elsewhere: what it has not acknowledged yet is not what it waits for."""
    assert cut_off({(0, 1)}, worker(phase), worker("reduce"), worker("reduce")) is None


def test_connections_are_not_looked_at_while_nobody_waits_long():
    """Reading /proc costs milliseconds, and the supervisor looks ten times a second."""

    def look():
        raise AssertionError("looked")

    readings = {0: worker("reduce", 1.0), 1: worker("reduce", 1.0), 2: worker("data")}
    assert find_cut_off(readings, NOW, TIMEOUT_S, look) is None

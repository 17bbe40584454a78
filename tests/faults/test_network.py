"""A broken network: cuts, splits, resets, loss and delay, made with real packets between processes.

Each run has four workers. Whatever is broken: one history, every step once, replicas alike, exit 0,
the cause named, nothing left running.
"""

from __future__ import annotations

import pytest

from ftrain.chaos import network
from ftrain.recoveries import END_OF_RUN
from tests.checks import (
    check_each_step_once,
    check_nothing_left,
    check_nothing_lost,
    check_replicas_agree,
)
from tests.network import delay_coordinator, delay_data, network_run, seconds_since
from tests.runs import ENDLESS, Run

CONFIG = "tests/networked.yaml"  # heartbeat_timeout_s 2, hang_timeout_s 3


def check_one_history(run: Run, last: int, dead: list[int]) -> None:
    """It has ended with that step, and just those workers have been ended, in any order."""
    check_nothing_lost(run, last)
    assert not any(m.get("rewound") for m in run.metrics())
    # By a signal or, where it hears first that it is counted as dead, by itself.
    ended = [e["worker"] for e in run.events("worker_exited") if e["reason"] != END_OF_RUN]
    assert sorted(ended) == sorted(dead)


def wait_for_commit_without(run: Run, worker: int, t: float) -> None:
    run.wait_until(
        f"a commit of the others than {worker}",
        lambda: any(m["t"] > t and worker not in m["workers"] for m in run.metrics()),
    )


def told(run: Run, worker: int) -> str:
    """What the screen says about a worker's death."""
    return next(x for x in run.output.splitlines() if x.startswith(f"worker {worker} (pid "))


def causes(run: Run, worker: int) -> list[str]:
    """What the records say that its processes died of."""
    rows = [e for e in run.events("worker_exited") if e["worker"] == worker]
    return [e["reason"] for e in rows if "signal" in e]


@pytest.mark.parametrize(
    "fault",
    [
        network.cut_all,
        pytest.param(network.cut_coordinator, marks=pytest.mark.slow),
        pytest.param(network.reset_coordinator, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_loses_the_coordinator_is_replaced(tmp_path, fault):
    """With its peers or without them, or by a reset, which JAX's client takes for a death.

    It ends, is fenced, and its replacement, elsewhere, takes part; the others go on.
    """
    with network_run(CONFIG, tmp_path / "run", ENDLESS) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        t = fault(run, 2)
        wait_for_commit_without(run, 2, t)
        run.wait_back(2, seen)
        check_one_history(run, run.stop(), dead=[2])
        assert "the coordinator" in told(run, 2)


def test_of_two_workers_that_cannot_reach_one_another_one_is_ended(tmp_path):
    """Nobody else is: all wait in one collective, and only these two miss an answer."""
    with network_run(CONFIG, tmp_path / "run", ENDLESS) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        network.cut_peer(run, 1, 2)
        hang = run.wait_for_event("hang_detected", after=seen)
        assert (hang["worker"], hang["unreachable"]) == (2, [1])
        run.wait_back(2, seen)
        check_one_history(run, run.stop(), dead=[2])
        assert "not reaching worker 1" in told(run, 2)


@pytest.mark.slow
def test_two_workers_that_can_never_reach_one_another_cost_one_of_them(tmp_path):
    """It is tried again later and later, always the same one, and the other three train on."""
    with network_run(CONFIG, tmp_path / "run", "steps=300") as run:
        run.wait_for_step(20)
        network.cut_peer(run, 1, 2, lasting=True)
        assert run.finish() == 0
        check_each_step_once(run, 300)
        check_replicas_agree(run)
        check_nothing_left(run)
        ended = [e for e in run.events("worker_exited") if "signal" in e]
        assert len(ended) > 1 and {e["worker"] for e in ended} == {2}
        assert all("not reaching worker 1" in cause for cause in causes(run, 2))
        assert [m["workers"] for m in run.metrics()[30:]] == [[0, 1, 3]] * 270


@pytest.mark.slow
@pytest.mark.parametrize("fault", [network.cut_all, network.cut_coordinator])
def test_a_cut_that_heals_when_the_worker_was_given_up_changes_nothing(tmp_path, fault):
    """Before its process has ended: it is counted as dead, and commits and writes nothing more."""
    with network_run(CONFIG, tmp_path / "run", ENDLESS) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        fault(run, 2)
        run.wait_for_event("step_aborted", after=seen)
        network.heal(run)
        run.wait_back(2, seen)
        check_one_history(run, run.stop(), dead=[2])


@pytest.mark.slow
def test_a_cut_that_heals_when_the_worker_was_replaced_changes_nothing(tmp_path):
    """What the old process had sent and nobody has received may arrive now."""
    with network_run(CONFIG, tmp_path / "run", ENDLESS) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        network.cut_all(run, 2)
        run.wait_for_event("worker_started", after=seen, worker=2)
        network.heal(run)
        run.wait_back(2, seen)
        check_one_history(run, run.stop(), dead=[2])


@pytest.mark.slow
def test_a_split_in_two_halves_leaves_one_history(tmp_path):
    """{0, 1} and {2, 3} reach the coordinator and not one another: one half restarts."""
    with network_run(
        CONFIG, tmp_path / "run", ENDLESS, "checkpoint.every_steps=10", "checkpoint.keep=100"
    ) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        network.split(run, [0, 1], [2, 3])
        for worker in (2, 3):
            run.wait_back(worker, seen)
        check_one_history(run, run.stop(), dead=[2, 3])
        saved = [e["step"] for e in run.events("checkpoint_saved")]
        assert saved == sorted(set(saved))
        assert "not reaching worker" in told(run, 2) and "not reaching worker" in told(run, 3)


@pytest.mark.slow
def test_a_cut_shorter_than_the_timeouts_costs_its_time_alone(tmp_path):
    """Three seconds without the coordinator: nobody is ended."""
    with network_run(
        CONFIG,
        tmp_path / "run",
        "steps=150",
        "cluster.heartbeat_timeout_s=10",
        "cluster.hang_timeout_s=20",
    ) as run:
        run.wait_for_step(20)
        t = network.cut_coordinator(run, 2)
        # Not a wait for an event: the fault has a length.
        run.wait_until("three seconds of it", lambda: seconds_since(t) > 3)
        network.heal(run)
        assert run.finish() == 0
        check_one_history(run, 150, dead=[])


@pytest.mark.slow
def test_lost_packets_cost_time_alone(tmp_path):
    """Five of a hundred, everywhere: TCP sends them again."""
    with network_run(
        CONFIG,
        tmp_path / "run",
        "steps=60",
        "cluster.heartbeat_timeout_s=10",
        "cluster.hang_timeout_s=20",
    ) as run:
        run.wait_for_step(20)
        network.lose_packets(run, 5)
        assert run.finish() == 0
        check_one_history(run, 60, dead=[])
        assert run.network.matched() > [100]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [delay_coordinator, delay_data])
def test_delays_and_stalls_cost_time_alone(tmp_path, fault):
    """200 ms each way, and one second more for every twentieth piece of data."""
    with network_run(
        CONFIG,
        tmp_path / "run",
        "steps=26",
        "cluster.heartbeat_timeout_s=10",
        "cluster.hang_timeout_s=30",
        slow=True,
    ) as run:
        run.wait_for_step(20)
        fault(run, 0.2, stall_share=0.05, stall_s=1.0)
        assert run.finish() == 0
        check_one_history(run, 26, dead=[])
        assert run.metrics()[-1]["t"] - run.metrics()[19]["t"] > 6 * 0.2

"""A run over several hosts: one of them killed, cut off, stopped, brought back, signalled.

Whatever happens to a host that is not the head: one history, every sample exactly once an epoch,
replicas alike, nothing left running, and one exit code on all hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket

import pytest

from tests.checks import (
    check_each_step_once,
    check_history,
    check_replicas_agree,
    check_rules,
)
from tests.runs import ENDLESS, Run, is_alive
from tests.several_hosts import HostsRun, hosts_run
from tests.test_ledger import check_ledger

CONFIG = "tests/hosts.yaml"


def check_stopped(hosts: HostsRun) -> None:
    """All hosts stop together, in one exact history."""
    hosts.stop()
    check_ledger(hosts.head)
    check_rules(hosts.head)
    assert any("digest" in row for row in hosts.head.metrics())
    assert hosts.head.processes() == []
    assert hosts.head.events("checkpoint_restored") == []
    if hosts.net is not None:
        assert [hosts.net.processes(rank) for rank in range(hosts.count)] == [[]] * hosts.count


def workers_at(hosts: HostsRun, rank: int) -> set[int]:
    joined = [e for e in hosts.head.events("host_joined") if e["host"] == rank]
    return set(joined[-1]["workers"])


def test_two_hosts_train_together_and_exit_alike(tmp_path):
    """Two workers, one on each; the second's records are the run's, and it learns the verdict."""
    sets = ["steps=30", "batch_size=24", "cluster.workers=2", "digest_every_steps=10"]
    with hosts_run("tests/paced.yaml", tmp_path / "run", *sets, loopback=True) as hosts:
        assert hosts.finish() == [0, 0]
        check_each_step_once(hosts.head, 30)
        check_replicas_agree(hosts.head)
        assert {e["worker"]: e["host"] for e in hosts.head.events("worker_started")} == {0: 0, 1: 1}
        assert all(m["workers"] == [0, 1] for m in hosts.head.metrics())
        assert "exit 0: step 30 is reached and saved" in hosts.runs[1].output
        assert hosts.head.processes() == []
        assert (tmp_path / "run/token").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("count", "lost"), [(2, 1), (4, 2)])
def test_a_host_that_is_killed_and_comes_back_costs_what_its_workers_cost(tmp_path, count, lost):
    """All its processes at once; later a new supervisor of that rank, as on another machine."""
    with hosts_run(CONFIG, tmp_path / "run", ENDLESS, hosts=count) as hosts:
        hosts.wait_all()
        seen, workers = len(hosts.head.events()), workers_at(hosts, lost)
        t = hosts.kill(lost)
        seconds = hosts.wait_without(workers, t)
        print(f"{count} hosts: next commit {seconds:.2f} s after the loss of one")
        assert hosts.head.events("host_lost")[-1]["workers"] == sorted(workers)
        assert not any(e["event"] == "worker_started" for e in hosts.head.events()[seen:])
        hosts.start(lost)
        for worker in workers:
            hosts.head.wait_back(worker, seen)
        hosts.wait_all()
        check_stopped(hosts)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_that_is_cut_off_ends_its_workers_and_comes_back_by_itself(tmp_path):
    """Both sides find out by themselves; when the cable is in again its agent calls again."""
    with hosts_run(CONFIG, tmp_path / "run", ENDLESS) as hosts:
        hosts.wait_all()
        seen, workers = len(hosts.head.events()), workers_at(hosts, 1)
        pids = [hosts.head.pid(w) for w in workers]
        hosts.net.unplug(1)
        hosts.head.wait_for_event("host_lost", after=seen, host=1)
        hosts.head.wait_until("their ends", lambda: not any(map(is_alive, pids)))
        hosts.head.wait_until(
            "a commit without them", lambda: not workers & {*hosts.head.metrics()[-1]["workers"]}
        )
        assert hosts.runs[1].process.poll() is None
        hosts.net.plug(1)
        for worker in workers:
            hosts.head.wait_back(worker, seen)
        check_stopped(hosts)
        assert "lost the head" in hosts.runs[1].output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_that_is_stopped_for_too_long_ends_its_workers_as_it_goes_on(tmp_path):
    """They outlive their fencing meanwhile, and none of them acts for its id (rule R9)."""
    with hosts_run(CONFIG, tmp_path / "run", ENDLESS) as hosts:
        hosts.wait_all()
        seen, workers = len(hosts.head.events()), workers_at(hosts, 1)
        os.kill(hosts.runs[1].process.pid, signal.SIGSTOP)
        hosts.head.wait_for_event("host_lost", after=seen, host=1)
        hosts.head.wait_until(
            "a commit without them", lambda: not workers & {*hosts.head.metrics()[-1]["workers"]}
        )
        hosts.head.wait_for_steps(5)
        os.kill(hosts.runs[1].process.pid, signal.SIGCONT)
        for worker in workers:
            hosts.head.wait_back(worker, seen)
        check_stopped(hosts)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stop_signal_on_any_host_stops_all_after_one_step(tmp_path):
    """The state is saved once, all exit 75, and the same commands continue to the exact end."""
    with hosts_run(CONFIG, tmp_path / "run") as hosts:
        hosts.wait_all()
        hosts.runs[1].process.send_signal(signal.SIGTERM)
        hosts.head.process.send_signal(signal.SIGTERM)  # as a scheduler does, to every host
        assert hosts.finish() == [75, 75]
        assert "state saved" in hosts.head.output
        assert len(hosts.head.events("stop_requested")) == 1
        for rank in (0, 1):
            hosts.start(rank)
        assert hosts.finish() == [0, 0]
        check_ledger(hosts.head, epochs=20)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hosts_may_have_addresses_of_ipv6_alone(tmp_path):
    """With a death, whose place is taken by another process of that host."""
    with hosts_run(CONFIG, tmp_path / "run", ENDLESS, coordinator="[fd77::1]:17017") as hosts:
        hosts.wait_all()
        seen = len(hosts.head.events())
        hosts.head.kill(3)
        hosts.head.wait_back(3, seen)
        check_stopped(hosts)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_head_that_is_started_again_finds_its_hosts(tmp_path):
    """The agent calls until it is there, and the newest checkpoint continues; one lineage."""
    sets = ["checkpoint.every_steps=20", "epochs=12"]
    with hosts_run(CONFIG, tmp_path / "run", *sets) as hosts:
        hosts.wait_all()
        hosts.head.wait_for_event("checkpoint_saved")
        pids = [hosts.head.pid(w) for w in workers_at(hosts, 1)]
        hosts.kill(0)
        hosts.start(0)
        hosts.head.wait_until("their ends", lambda: not any(map(is_alive, pids)))
        assert hosts.finish() == [0, 0]
        check_history(hosts.head)
        check_replicas_agree(hosts.head)
        assert len(hosts.head.events("checkpoint_restored")) == 1
        assert hosts.net.processes(1) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_that_dies_takes_all_that_its_workers_forked_with_it(tmp_path):
    """And another one of its rank, on the same host at once, begins when nothing is left."""
    sets = ["trainer=tests/trainers.py:Forks", ENDLESS, "trainer_args.pause_s=0.01"]
    with hosts_run("tests/paced.yaml", tmp_path / "run", *sets, loopback=True) as hosts:
        hosts.wait_all()
        seen, workers = len(hosts.head.events()), workers_at(hosts, 1)
        logs = [(tmp_path / f"run/logs/worker-{w}.log").read_text() for w in workers]
        forked = [int(re.findall(r"forked (\d+)", log)[-1]) for log in logs]
        assert len(forked) == len(workers) and all(map(is_alive, forked))
        hosts.runs[1].process.kill()
        hosts.runs[1].process.wait()
        hosts.start(1)
        hosts.head.wait_for_event("host_joined", after=seen, host=1)
        assert not any(map(is_alive, forked))
        for worker in workers:
            hosts.head.wait_back(worker, seen)
        check_each_step_once(hosts.head, hosts.stop())
        check_replicas_agree(hosts.head)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_outsiders_at_the_port_and_another_token_change_nothing(tmp_path):
    """A host with another token is told so and exits 2; the run is that of two hosts."""
    sets = [ENDLESS, "cluster.workers=2"]
    with hosts_run("tests/paced.yaml", tmp_path / "run", *sets, loopback=True) as hosts:
        hosts.wait_all()
        host, port = hosts.coordinator.split(":")
        outsiders = [socket.create_connection((host, int(port))) for _ in range(100)]
        for i, outsider in enumerate(outsiders):
            with contextlib.suppress(ConnectionError):  # too many at once: the oldest go
                outsider.sendall(os.urandom(i))
        (tmp_path / "token").write_text("this is another token")
        stranger = Run(
            "tests/paced.yaml",
            tmp_path / "other",
            *sets,
            flags=[
                *("--nodes", "2", "--node-rank", "1", "--coordinator", hosts.coordinator),
                *("--token-file", str(tmp_path / "token")),
            ],
        )
        assert stranger.finish() == 2
        assert "give the same FTRAIN_TOKEN or --token-file on every host" in stranger.output
        hosts.head.process.send_signal(signal.SIGTERM)
        assert hosts.finish() == [75, 75]
        for outsider in outsiders:
            outsider.close()
        check_each_step_once(hosts.head, hosts.head.metrics()[-1]["step"])
        assert len(hosts.head.events("host_joined")) == 1
        assert hosts.head.events("worker_exited")[0]["reason"] == "the end of the run"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_with_another_config_is_refused_with_both_sides(tmp_path):
    """The head waits for the right one. Once the run has finished, all are told, and exit 0."""
    with hosts_run("tests/paced.yaml", tmp_path / "run", "steps=30", loopback=True, ranks=[0]) as h:
        h.sets = ["steps=31", "seed=1"]
        assert h.start(1).finish() == 2
        assert "steps is 30 on the head, 31 here; seed is 0 on the head, 1 here" in h.runs[1].output
        h.sets = ["steps=30"]
        h.start(1)
        assert h.finish() == [0, 0]
        for rank in (0, 1):
            h.start(rank)
        assert h.finish() == [0, 0]
        assert "the run has finished already" in h.runs[1].output

"""The head of a run over several hosts is lost, and another host goes on as the head.

Killed, stopped or started again: one history in the records, which `verify` finds good, and nothing
of the old head left running.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from ftrain.verify import verify
from tests.checks import check_history, check_replicas_agree
from tests.runs import ENDLESS, Run, is_alive
from tests.several_hosts import LOSS_S, HostsRun, hosts_run

CONFIG = "tests/hosts.yaml"
SETS = ["checkpoint.memory_every_s=0.5"]


def last(hosts: HostsRun) -> Run:
    """The host of the highest rank, which nothing happens to."""
    return hosts.runs[hosts.count - 1]


def wait_for_takeover(hosts: HostsRun, host: int = 1) -> dict:
    """Until the next head has committed a step."""
    event = last(hosts).wait_for_event("head_taken_over", host=host)
    last(hosts).wait_until(
        "a commit", lambda: last(hosts).metrics() and last(hosts).metrics()[-1]["t"] > event["t"]
    )
    return event


def check_one_history(hosts: HostsRun) -> None:
    """As a run of one head that went back to what was saved."""
    run = last(hosts)
    check_history(run)
    check_replicas_agree(run)
    verdict = verify(run.run_dir)
    assert verdict.ok, str(verdict)
    assert run.processes() == []
    began = [(e["history"], e["step"]) for e in run.events("history_began")]
    assert len(began) == len(set(began)) == len(run.events("run_started"))


@pytest.mark.timeout(120)
def test_a_head_that_is_killed_is_followed_by_another_host(tmp_path):
    """Its workers and its coordinator go; the other host continues from its own memory, alone."""
    sets = [
        *("steps=60", "batch_size=24", "cluster.workers=2", "digest_every_steps=10"),
        *("cluster.heartbeat_timeout_s=2", "checkpoint.memory_every_s=0.2"),
        *("checkpoint.every_steps=0", "trainer_args.pause_s=0.05"),
    ]
    with hosts_run("tests/paced.yaml", tmp_path / "run", *sets, loopback=True) as hosts:
        hosts.wait_all()
        hosts.head.wait_for_step(12)
        hosts.head.process.kill()
        hosts.head.process.wait()
        event = wait_for_takeover(hosts)
        assert event["was"] == 0 and event["generation"] == 2 and event["seconds"] >= 2
        assert hosts.runs[1].finish() == 0
        assert "this host is the head now; host 0" in hosts.runs[1].output
        check_one_history(hosts)
        restored = hosts.runs[1].events("checkpoint_restored")
        assert [e["tier"] for e in restored] == ["memory"] and restored[0]["step"] > 0
        assert hosts.runs[1].metrics()[-1]["step"] == 60
        assert hosts.runs[1].metrics()[-1]["workers"] == [1]
        told = str(verify(tmp_path / "run"))
        assert "its head, host 0, was lost, and host 1 took over" in told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_head_s_host_that_is_killed_is_followed_and_joins_when_it_is_back(tmp_path):
    """Of three hosts. The same command, --node-rank 0, finds the head that there is now."""
    sets = [*SETS, ENDLESS, "cluster.workers=6"]
    with hosts_run(CONFIG, tmp_path / "run", *sets, hosts=3) as hosts:
        hosts.wait_all()
        hosts.head.wait_for_steps(30)
        hosts.kill(0)
        wait_for_takeover(hosts)
        assert "the head is there now: host 1" in hosts.runs[2].output
        hosts.start(0)
        last(hosts).wait_for_event("host_joined", host=0)
        last(hosts).wait_until(
            "all six", lambda: last(hosts).metrics()[-1]["workers"] == [0, 1, 2, 3, 4, 5]
        )
        hosts.stop(2)
        assert "is the head of this run; joining" in hosts.runs[0].output
        check_one_history(hosts)
        assert [hosts.net.processes(rank) for rank in range(3)] == [[], [], []]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["supervisor", "host"])
def test_a_head_that_is_stopped_for_too_long_finds_another_and_joins_it(tmp_path, how):
    """Its own workers train on meanwhile, or stand too; nothing of that counts, and they end."""
    with hosts_run(CONFIG, tmp_path / "run", *SETS, ENDLESS) as hosts:
        hosts.wait_all()
        hosts.head.wait_for_steps(30)
        old = [hosts.head.pid(w) for w in (0, 1)]
        pids = [hosts.head.process.pid]
        if how == "host":
            pids = hosts.net.processes(0)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        event = wait_for_takeover(hosts)
        assert event["seconds"] >= LOSS_S
        last(hosts).wait_for_steps(20)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # whoever goes on first ends the others
                os.kill(pid, signal.SIGCONT)
        last(hosts).wait_until("their ends", lambda: not any(map(is_alive, old)))
        last(hosts).wait_for_event("host_joined", host=0)
        last(hosts).wait_until("all", lambda: last(hosts).metrics()[-1]["workers"] == [0, 1, 2, 3])
        hosts.stop(1)
        assert "another host has become the head" in hosts.runs[0].output
        check_one_history(hosts)
        assert last(hosts).events("checkpoint_restored")[-1]["tier"] == "memory"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_head_that_is_cut_off_is_followed_and_joins_when_it_is_back(tmp_path):
    """It reaches the run's folder and renews its lease there: then nobody follows it."""
    with hosts_run(CONFIG, tmp_path / "run", *SETS, ENDLESS) as hosts:
        hosts.wait_all()
        hosts.head.wait_for_steps(20)
        hosts.net.unplug(0)
        hosts.head.wait_for_event("host_lost", host=1)
        hosts.head.wait_for_steps(20)
        hosts.net.plug(0)
        hosts.wait_all()
        hosts.stop()
        assert hosts.head.events("head_taken_over") == []
        assert verify(hosts.head.run_dir).ok


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_heads_are_lost_one_after_the_other(tmp_path):
    """Each host of three is the head once; the last one ends the run alone."""
    sets = [*SETS, "epochs=40", "cluster.workers=3"]
    with hosts_run(CONFIG, tmp_path / "run", *sets, hosts=3) as hosts:
        hosts.wait_all()
        hosts.head.wait_for_steps(30)
        for rank in (0, 1):
            hosts.kill(rank)
            wait_for_takeover(hosts, rank + 1)
            last(hosts).wait_for_steps(30)
        assert last(hosts).finish() == 0
        assert last(hosts).metrics()[-1]["workers"] == [2]
        check_one_history(hosts)
        generations = [e["generation"] for e in last(hosts).events("run_started")]
        assert generations == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nobody_follows_a_head_that_was_told_to_stop(tmp_path):
    """It is killed before it has stopped; the other host exits 75, and both continue later."""
    with hosts_run(CONFIG, tmp_path / "run", *SETS, "epochs=12") as hosts:
        hosts.wait_all()
        hosts.head.wait_for_steps(20)
        hosts.head.process.send_signal(signal.SIGTERM)
        hosts.head.wait_for_event("stop_requested")
        hosts.head.process.kill()
        hosts.head.process.wait()
        assert hosts.runs[1].finish() == 75
        for rank in (0, 1):
            hosts.start(rank)
        assert hosts.finish() == [0, 0]
        assert hosts.head.events("head_taken_over") == []
        assert verify(hosts.head.run_dir).ok


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_a_shared_folder_nobody_follows(tmp_path):
    """Each host has its own: told once, and the loss of the head ends the attempt as ever."""
    sets = [ENDLESS, "cluster.workers=2", "cluster.start_timeout_s=15"]
    env = {"FTRAIN_TOKEN": "0123456789abcdef"}
    with hosts_run(
        "tests/paced.yaml", tmp_path / "run", *sets, loopback=True, env=env, ranks=[0]
    ) as hosts:
        agent = hosts.start(1, "--run-dir", str(tmp_path / "other"))
        hosts.wait_all()
        hosts.head.process.kill()
        hosts.head.process.wait()
        assert agent.finish() == 75
        assert "is not shared with the head" in agent.output

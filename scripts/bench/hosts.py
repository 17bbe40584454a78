"""Loses a host of a run and measures how long it takes to go on without it and to be whole again.

    python scripts/bench/hosts.py configs/digits.yaml --hosts 2 --losses 5 [--how kill|cut|stop]

Hosts are network namespaces with a switch between them (needs root). `kill` ends every process of a
host, and another supervisor takes its rank when the others have committed; `cut` takes its cable
out of the switch until then, and `stop` stops its supervisor. The last row loses the head's host:
how long until nothing is left on the others, and until the same commands, given again, commit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.several_hosts import HostsRun, hosts_run

HEAD_S = 45  # that agents call a head which is gone
COMPILE_S = 300.0  # at the first start, on each host by itself


def lose(hosts: HostsRun, rank: int, how: str) -> dict[str, float]:
    """One loss and return of a host that is not the head."""
    head, seen = hosts.head, len(hosts.head.events())
    workers = {*[e for e in head.events("host_joined") if e["host"] == rank][-1]["workers"]}
    agent = hosts.runs[rank].process.pid
    t = time.time()
    if how == "kill":
        hosts.kill(rank)
    elif how == "cut":
        hosts.net.unplug(rank)
    else:
        os.kill(agent, signal.SIGSTOP)
    lost = head.wait_for_event("host_lost", after=seen, host=rank)
    to_commit_s = hosts.wait_without(workers, t)
    again = time.time()
    if how == "kill":
        hosts.start(rank)
    elif how == "cut":
        hosts.net.plug(rank)
    else:
        os.kill(agent, signal.SIGCONT)
    joined = head.wait_for_event("host_joined", after=seen, host=rank)
    for worker in workers:
        head.wait_back(worker, seen)
    first = head.wait_until(
        "all train",
        lambda: next(
            (m for m in head.metrics() if m["t"] > joined["t"] and workers <= {*m["workers"]}), None
        ),
    )
    return {
        "loss_to_known_s": lost["t"] - t,
        "loss_to_commit_s": to_commit_s,
        "return_to_joined_s": joined["t"] - again,
        "return_to_training_s": first["t"] - again,
    }


def lose_head(hosts: HostsRun) -> dict[str, float]:
    """The loss of the head's host, and the run's continuation by the same commands."""
    others = range(1, hosts.count)
    hosts.head.wait_for_event("checkpoint_saved")
    t = hosts.kill(0)
    codes = []
    pids = [e["pid"] for e in hosts.head.events("worker_started")]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)
    gone = time.time()
    for rank in others:
        codes.append(hosts.runs[rank].finish())
    ended = time.time()
    print("exit codes of the other hosts:", codes)
    for rank in range(hosts.count):
        hosts.start(rank)
    commit = hosts.head.wait_until(
        "a commit", lambda: next((m for m in hosts.head.metrics() if m["t"] > ended), None)
    )
    return {
        "head_loss_to_workers_gone_s": gone - t,
        "head_loss_to_exit_s": ended - t,
        "rerun_to_commit_s": commit["t"] - ended,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--how", choices=("kill", "cut", "stop"), default="kill")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-hosts"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    arguments.run_dir.parent.mkdir(parents=True, exist_ok=True)
    sets = ["steps=1000000", f"cluster.start_timeout_s={HEAD_S}", *arguments.set]
    rows = []
    with hosts_run(arguments.config, arguments.run_dir, *sets, hosts=arguments.hosts) as hosts:
        for number in range(arguments.losses):
            hosts.wait_all(COMPILE_S)
            hosts.head.wait_for_steps(30)
            rows.append(lose(hosts, 1 + number % (arguments.hosts - 1), arguments.how))
            print(number, {k: round(v, 2) for k, v in rows[-1].items()}, flush=True)
        hosts.wait_all()
        rows.append(lose_head(hosts))
        print("head", {k: round(v, 2) for k, v in rows[-1].items()})
        hosts.head.process.send_signal(signal.SIGTERM)
        print("exit codes:", hosts.finish())
    for name in rows[0]:
        values = sorted(row[name] for row in rows[:-1])
        print(
            f"{name:22} median {statistics.median(values):.2f}  "
            f"min {values[0]:.2f}  max {values[-1]:.2f}"
        )
    (arguments.run_dir / "hosts.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

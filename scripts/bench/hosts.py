"""Loses a host of a run and measures how long it takes to go on without it and to be whole again.

    python scripts/bench/hosts.py configs/digits.yaml --hosts 2 --losses 5 [--how kill|cut|stop]

Hosts are network namespaces with a switch between them (needs root). `kill` ends every process of a
host, and another supervisor takes its rank when the others have committed; `cut` takes its cable
out of the switch until then, and `stop` stops its supervisor. The last rows lose the head's host:
how long until another host is the head, commits, and has the lost one back.
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


def lose_head(hosts: HostsRun, head: int) -> tuple[int, dict[str, float]]:
    """The loss of the head's host, and its return as another one; returns the next head too."""
    other = hosts.runs[(head + 1) % hosts.count]
    seen = len(other.events())
    before = other.metrics()[-1]["step"]
    t = hosts.kill(head)
    taken = other.wait_for_event("head_taken_over", after=seen)
    commit = other.wait_until(
        "a commit", lambda: next((m for m in other.metrics() if m["t"] > taken["t"]), None)
    )
    restored = other.events("checkpoint_restored")[-1]
    again = time.time()
    hosts.start(head)
    joined = other.wait_for_event("host_joined", after=seen, host=head)
    first = other.wait_until(
        "all train",
        lambda: next(
            (m for m in other.metrics() if m["t"] > joined["t"] and len(m["workers"]) == 4), None
        ),
    )
    return taken["host"], {
        "head_loss_to_taken_s": taken["t"] - t,
        "head_loss_to_commit_s": commit["t"] - t,
        "head_steps_again": before - restored["step"],
        "head_return_to_joined_s": joined["t"] - again,
        "head_return_to_training_s": first["t"] - again,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--head-losses", type=int, default=3)
    parser.add_argument("--how", choices=("kill", "cut", "stop"), default="kill")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-hosts"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    arguments.run_dir.parent.mkdir(parents=True, exist_ok=True)
    sets = ["steps=1000000", *arguments.set]
    rows = []
    with hosts_run(arguments.config, arguments.run_dir, *sets, hosts=arguments.hosts) as hosts:
        for number in range(arguments.losses):
            hosts.wait_all(COMPILE_S)
            hosts.head.wait_for_steps(30)
            rows.append(lose(hosts, 1 + number % (arguments.hosts - 1), arguments.how))
            print(number, {k: round(v, 2) for k, v in rows[-1].items()}, flush=True)
        head, heads = 0, []
        for number in range(arguments.head_losses):
            hosts.runs[head].wait_for_steps(100)
            head, row = lose_head(hosts, head)
            heads.append(row)
            print("head", number, {k: round(v, 2) for k, v in row.items()}, flush=True)
        hosts.runs[head].process.send_signal(signal.SIGTERM)
        print("exit codes:", hosts.finish())
    for found in (rows, heads):
        for name in found[0] if found else ():
            values = sorted(row[name] for row in found)
            print(
                f"{name:26} median {statistics.median(values):.2f}  "
                f"min {values[0]:.2f}  max {values[-1]:.2f}"
            )
    rows += heads
    (arguments.run_dir / "hosts.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

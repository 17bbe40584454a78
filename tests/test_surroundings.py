"""Runs on machines that are set up badly, in ways that a run on one host need not mind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ENDLESS, REPOSITORY, environment, running

HAS_NAMES = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-Ur", "--uts", "true"], capture_output=True).returncode == 0
)


# As /proc/net/tcp and tcp6 have them: 127.0.0.1, also as an IPv6 address.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def listening(pid: int) -> set[str]:
    """The addresses on which a process takes connections."""
    found = set()
    with contextlib.suppress(FileNotFoundError):  # it has just ended
        links = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                    found.add(fields[1].split(":")[0])
    return found


def policies(pid: int) -> set[int]:
    """By which the threads of a process are scheduled."""
    found = set()
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found.add(os.sched_getscheduler(int(path.name)))
    return found


@pytest.mark.skipif(not HAS_NAMES, reason="no user and host name namespaces here")
def test_a_run_minds_neither_an_unknown_host_name_nor_a_dead_proxy(tmp_path):
    """The machine's own name resolves to nothing, no web proxy answers; all is on loopback."""
    script = 'hostname no-such-host-xyz; exec "$@"'
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    with running(
        "configs/linear.yaml",
        tmp_path / "run",
        "steps=300",
        prefix=["unshare", "-Ur", "--uts", "sh", "-c", script, "sh"],
        env=proxies,
    ) as run:
        run.wait_for_step(1)
        assert {at for pid in run.processes() for at in listening(pid)} <= LOOPBACK
        assert run.finish() == 0
        assert len(run.metrics()) == 300


@pytest.mark.parametrize(
    ("chosen", "policy", "nice"),
    [([], os.SCHED_BATCH, 0), (["nice", "-n", "5"], os.SCHED_OTHER, 5)],
    ids=["nothing", "niceness"],
)
def test_all_processes_are_batch_work_where_nobody_chose_otherwise(tmp_path, chosen, policy, nice):
    """Every thread of every process; also of a worker that was started anew."""
    with running("configs/linear.yaml", tmp_path / "run", ENDLESS, prefix=chosen) as run:
        run.wait_for_step(1)
        seen = len(run.events())
        run.kill(1)
        run.wait_back(1, seen)
        for pid in [run.process.pid, *run.processes()]:
            assert policies(pid) == {policy}
            assert os.getpriority(os.PRIO_PROCESS, pid) == nice
        run.stop()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("pod", "code"), [(True, 75), (False, 2)])
def test_a_pod_whose_head_has_no_name_yet_is_to_be_started_again(tmp_path, rank, pod, code):
    """Exit 2 would end the JobSet for good; a name given by hand is more likely wrong."""
    as_pod = {
        "FTRAIN_NODES": "2",
        "JOB_COMPLETION_INDEX": f"{rank}",
        "HOSTNAME": f"job-worker-0-{rank}",
        "JOBSET_NAME": "no-such-service.invalid",
    }
    head = "job-worker-0-0.no-such-service.invalid"
    flags = ["--nodes", "2", "--node-rank", f"{rank}", "--coordinator", f"{head}:5000"]
    done = subprocess.run(
        [sys.executable, "-m", "ftrain.cli", "run", "configs/linear.yaml"]
        + ["--run-dir", str(tmp_path), "--set", "cluster.start_timeout_s=1"]
        + ([] if pod else flags),
        cwd=REPOSITORY,
        env={**environment(), **(as_pod if pod else {})},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert f"{head} does not resolve on " in done.stderr

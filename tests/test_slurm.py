"""scripts/slurm: the job script, with SLURM's commands played; and a job in a real SLURM."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checks import check_each_step_once
from tests.runs import REPOSITORY, Run, environment

SCRIPT = REPOSITORY / "scripts/slurm/ftrain.sbatch"
CLUSTER = REPOSITORY / "scripts/slurm/local_cluster"


def commands(folder: Path, *, srun: str, state: str = "RUNNING") -> dict[str, str]:
    """An environment whose srun is that script, and whose scontrol notes what it is asked."""
    scontrol = f"""
case "$*" in
  *show*) echo "JobId=7 JobName=x JobState={state} Reason=None" ;;
  *) echo "$@" >> {folder}/asked ;;
esac"""
    for name, body in (("srun", srun), ("scontrol", scontrol)):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return {**environment(), "PATH": path, "SLURM_JOB_ID": "7", "FTRAIN": "my-ftrain"}


def asked(folder: Path) -> str:
    """What scontrol was asked to do."""
    path = folder / "asked"
    return path.read_text().strip() if path.exists() else ""


@pytest.mark.parametrize(
    ("code", "state", "does"),
    [
        (75, "RUNNING", "requeue 7"),
        (75, "COMPLETING", ""),  # cancelled
        (0, "RUNNING", ""),
        (1, "RUNNING", ""),
        (2, "RUNNING", ""),
        (3, "RUNNING", ""),
        (137, "RUNNING", ""),
    ],
)
def test_only_a_job_that_a_rerun_continues_is_queued_again(tmp_path, code, state, does):
    """And no job that was cancelled. The job's code is ftrain's."""
    env = commands(tmp_path, srun=f'echo "$@"; exit {code}', state=state)
    done = subprocess.run(
        ["bash", SCRIPT, "a.yaml", "--set", "steps=3"], env=env, capture_output=True, timeout=60
    )
    assert done.returncode == code
    assert b"my-ftrain run a.yaml --set steps=3\n" in done.stdout
    assert asked(tmp_path) == does


def test_the_script_outlives_its_own_sigterm(tmp_path):
    """scancel and preemption signal it too, and ftrain is then still saving."""
    env = commands(
        tmp_path, srun="echo started; while [ ! -e $OVER ]; do sleep 0.05; done; exit 75"
    )
    env["OVER"] = str(tmp_path / "over")
    with subprocess.Popen(
        ["bash", SCRIPT, "a.yaml"], env=env, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout.readline() == "started\n"
        for _ in range(2):
            job.send_signal(signal.SIGTERM)
            assert "waiting for ftrain to save" in job.stdout.readline()
        Path(env["OVER"]).touch()
        assert job.wait(60) == 75
        assert asked(tmp_path) == "requeue 7"


# A real SLURM.


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[Callable[..., str]]:
    """A cluster; what it gives runs a command of SLURM and returns its output."""
    daemons = ("munged", "slurmctld", "slurmd")
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    if os.geteuid() != 0 or any(shutil.which(name, path=path) is None for name in daemons):
        pytest.skip("needs root and Debian's slurm-wlm and munge")
    with subprocess.Popen(
        [CLUSTER, "--nodes", str(nodes), "--", "sh", "-c", 'echo "$SLURM_CONF"; exec cat'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as local:
        conf = local.stdout.readline().strip()
        assert conf, "no cluster"

        def slurm(*argv: str, **more: str) -> str:
            env = {**environment(), "SLURM_CONF": conf, **more}
            done = subprocess.run(
                argv, cwd=REPOSITORY, env=env, text=True, capture_output=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        yield slurm
        local.stdin.close()
        assert local.wait(60) == 0
        assert not Path(conf).parent.exists()


class Job(Run):
    """The run of a job: watched by its records, though its supervisor is SLURM's child."""

    def __init__(self, slurm: Callable[..., str], folder: Path, *sets: str, nodes: int):
        self.run_dir, self.slurm = folder / "run", slurm
        self._read = {}
        self.output_file = folder / "job.log"
        ftrain = folder / "ftrain"
        ftrain.write_text(f'#!/bin/sh\nexec {sys.executable} -m ftrain.cli "$@"\n')
        ftrain.chmod(0o755)
        arguments = [x for item in sets for x in ("--set", item)]
        self.job = slurm(
            *("sbatch", "--parsable", f"--nodes={nodes}", f"--output={self.output_file}"),
            *(str(SCRIPT), "tests/paced.yaml", "--run-dir", str(self.run_dir), *arguments),
            *("--coordinator", f"127.0.0.1:{free_port()}"),  # the nodes are names alone
            FTRAIN=str(ftrain),
        )

    @property
    def process(self):  # for `wait_until`, which asks whether it has ended
        return self

    def poll(self) -> str | None:
        state = self.state()["JobState"]
        return state if state in ("COMPLETED", "FAILED", "CANCELLED") else None

    def state(self) -> dict[str, str]:
        """What SLURM says of the job."""
        return dict(re.findall(r"(\w+)=(\S+)", self.slurm("scontrol", "show", "job", self.job)))

    def wait_ended(self) -> str:
        """How it ended."""
        end = time.monotonic() + 240
        while self.poll() is None:
            assert time.monotonic() < end, self.output
            time.sleep(0.5)
        return self.poll()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_that_is_signalled_saves_is_queued_again_and_finishes(tmp_path, nodes):
    """SLURM sends the signal to every process of the step, on every node, workers and all."""
    with cluster(nodes) as slurm:
        job = Job(slurm, tmp_path, "steps=200", "cluster.workers=2", nodes=nodes)
        job.wait_for_step(40)
        slurm("scancel", "--signal=TERM", job.job)
        assert job.wait_ended() == "COMPLETED"
        assert job.state()["Restarts"] == "1"
        ends = [(e["exit_code"], e["step"]) for e in job.events("run_finished")]
        assert [code for code, _ in ends] == [75, 0]
        restored = job.events("checkpoint_restored")
        assert [e["step"] for e in restored] == [ends[0][1]]
        check_each_step_once(job, 200)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_step_over_two_nodes_says_where_each_stands(tmp_path):
    """As SLURM itself sets the environment, also where a step has fewer nodes than its job."""
    code = """
import argparse, os
from ftrain.placement import add_flags, find_placement
parser = argparse.ArgumentParser()
add_flags(parser)
p = find_placement(parser.parse_args([]), os.environ)
print(p and (p.nodes, p.node_rank, p.coordinator_host))
"""
    python = (sys.executable, "-c", code)
    with cluster(2) as slurm:
        both = slurm("srun", "-N2", "--ntasks-per-node=1", *python)
        assert sorted(both.splitlines()) == ["(2, 0, 'n1')", "(2, 1, 'n1')"]
        assert slurm("srun", "-N1", "-n1", *python) == "None"
        part = slurm("salloc", "-N2", "srun", "-N1", "-n1", *python)
        assert part.splitlines()[-1] == "None"
        with pytest.raises(AssertionError, match=r"4 tasks on 2 nodes.*--ntasks-per-node=1"):
            slurm("srun", "-N2", "-n4", *python)

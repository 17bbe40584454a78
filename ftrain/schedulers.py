"""What a launcher's environment says about the hosts of a run: SLURM, Open MPI, Kubernetes. No jax.

Each reader takes an environment and says where this process stands, or None where its launcher did
not start this process. It reads no file and asks no one. The innermost launcher
is believed: `mpirun` inside a SLURM job, `srun` inside a pod. docs/placement.md has the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ftrain import node_list
from ftrain.errors import ConfigError

ESCAPE = "or give --nodes 1 for a run on this host alone, or --nodes, --node-rank and --coordinator"
FIXED_PORT = 61439  # just below the derived ones: where every host of a run has its own address
PORTS = range(61440, 65500, 20)  # above what Linux gives to outgoing connections; the head's
# coordination service takes one of the sixteen after its own


class Found(NamedTuple):
    """What a launcher said: how many hosts, and which of them this is."""

    launcher: str
    nodes: int
    node_rank: int
    head: str | None  # the host name of rank 0; None: this launcher does not say
    port: int  # the same on every host


def read_launcher(environ: Mapping[str, str]) -> Found | None:
    """What the innermost launcher said; None if there is none that starts one process a host.

    Raises:
      ConfigError: its variables are incomplete or contradict one another.
    """
    for read in (read_open_mpi, read_slurm, read_kubernetes):
        found = read(environ)
        if found is not None:
            return found
    return None


def read_slurm(environ: Mapping[str, str]) -> Found | None:
    """A step of `srun` with one task a node. A batch script by itself is one host, the first.

    A step may have fewer nodes than its job, so its own variables come first.
    """
    if "SLURM_STEP_ID" not in environ:
        return None
    values = _Variables("SLURM", environ)
    nodes = values.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    tasks = values.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=nodes)
    if tasks != nodes:
        raise ConfigError(
            f"SLURM starts {tasks} tasks on {nodes} node{'s' * (nodes > 1)}, and ftrain is one "
            "task a node that starts the workers itself; use srun --ntasks-per-node=1 "
            f"--ntasks={nodes}"
        )
    if nodes == 1:
        return Found("SLURM", 1, 0, None, FIXED_PORT)
    rank = values.rank("SLURM_NODEID", nodes)
    name, listed = values.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    try:
        hosts = node_list.expand(listed)
    except ValueError as error:
        raise ConfigError(
            f"{name}={listed} is no node list: {error}; start ftrain with srun, {ESCAPE}"
        ) from None
    if len(hosts) != nodes:
        raise ConfigError(
            f"SLURM names {len(hosts)} hosts in {name}={listed} and says that there are {nodes} "
            f"nodes; start ftrain with srun, {ESCAPE}"
        )
    job = int(re.sub(r"\D", "", environ.get("SLURM_JOB_ID", "")) or 0)
    step = int(re.sub(r"\D", "", environ["SLURM_STEP_ID"]) or 0)
    return Found("SLURM", nodes, rank, hosts[0], derived_port(job, step))


def read_open_mpi(environ: Mapping[str, str]) -> Found | None:
    """A process of `mpirun` with one process a host. It does not say where rank 0 is."""
    if not any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
        return None
    values = _Variables("Open MPI", environ)
    nodes = values.number("OMPI_COMM_WORLD_SIZE")
    local = values.number("OMPI_COMM_WORLD_LOCAL_SIZE", default=1)
    if local > 1:
        raise ConfigError(
            f"Open MPI starts {local} processes on this host, and ftrain is one a host that starts "
            "the workers itself; use mpirun --map-by ppr:1:node"
        )
    rank = values.rank("OMPI_COMM_WORLD_RANK", nodes)
    job = re.search(
        r"\d+", environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", ""))
    )
    return Found("Open MPI", nodes, rank, None, derived_port(int(job[0]) if job else 0, 0))


def read_kubernetes(environ: Mapping[str, str]) -> Found | None:
    """A pod of an indexed Job behind a headless service, as scripts/k8s makes it.

    Pods of one Job are named alike but for the index at the end, so rank 0's name is this pod's
    with another number. `FTRAIN_NODES` is the manifest's: without it an index says only that
    somebody runs many pods, each perhaps a run of its own.
    """
    if "FTRAIN_NODES" not in environ:
        return None
    values = _Variables("Kubernetes", environ)
    nodes = values.number("FTRAIN_NODES")
    if nodes == 1:
        return Found("Kubernetes", 1, 0, None, FIXED_PORT)
    rank = values.rank("JOB_COMPLETION_INDEX", nodes)
    _, service = values.text("JOBSET_NAME")
    _, pod = values.text("HOSTNAME")
    stem, _, index = pod.rpartition("-")
    if index != str(rank) or not stem:
        raise ConfigError(
            f"Kubernetes names this pod HOSTNAME={pod} and gives it JOB_COMPLETION_INDEX={rank}, "
            "and the name of an indexed Job's pod ends with its index; shorten the Job's name (63 "
            f"letters with the index), {ESCAPE}"
        )
    return Found("Kubernetes", nodes, rank, f"{stem}-0.{service}", FIXED_PORT)


def derived_port(job: int, step: int) -> int:
    """A port that all hosts of a job's step find, and that its neighbours do not use."""
    return PORTS[(job + 7 * step) % len(PORTS)]


class _Variables:
    """One launcher's variables. What is missing or no number is refused by name."""

    def __init__(self, launcher: str, environ: Mapping[str, str]):
        self._launcher, self._environ = launcher, environ

    def text(self, *names: str) -> tuple[str, str]:
        """The first of these that is set: its name and its value."""
        for name in names:
            if self._environ.get(name):
                return name, self._environ[name]
        raise ConfigError(
            f"{self._launcher} started this, and {' or '.join(names)} is not set; pass the "
            f"launcher's environment on, {ESCAPE}"
        )

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these that is set, an integer >= 1."""
        if default is not None and not any(self._environ.get(name) for name in names):
            return default
        name, value = self.text(*names)
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"{name}={value} is not an integer >= 1; unset it, {ESCAPE}")
        return int(value)

    def rank(self, name: str, nodes: int) -> int:
        """A rank among `nodes`."""
        _, value = self.text(name)
        if not value.isdecimal() or int(value) >= nodes:
            raise ConfigError(
                f"{name}={value}, and {self._launcher} says that there are {nodes} nodes, of ranks "
                f"0 to {nodes - 1}; unset it, {ESCAPE}"
            )
        return int(value)

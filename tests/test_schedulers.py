"""What launchers' environments say: whole ones are read, others are refused or passed over."""

from __future__ import annotations

import itertools

import pytest

from ftrain.errors import ConfigError
from ftrain.node_list import expand
from ftrain.schedulers import FIXED_PORT, PORTS, Found, read_launcher

# As `srun -N2` sets it on its second node (SLURM 22.05), without what is not read.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
POD = {
    "FTRAIN_NODES": "4",
    "HOSTNAME": "digits-worker-0-2",
    "JOBSET_NAME": "digits",
    "JOB_COMPLETION_INDEX": "2",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# Node lists.


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu5", "gpu5"),
        ("node[1-3,7],gpu5", "node1 node2 node3 node7 gpu5"),
        ("n[08-10,7]", "n08 n09 n10 n7"),
        ("r[1-2]-n[1-2].lan", "r1-n1.lan r1-n2.lan r2-n1.lan r2-n2.lan"),
        ("a,b,c", "a b c"),
    ],
)
def test_a_node_list_is_written_out(text, names):
    """In order: the place of a name in it is that node's rank."""
    assert expand(text) == names.split()


@pytest.mark.parametrize("text", ["n[1-3", "n1-3]", "n[3-1]", "n[a-c]", "n[[1]]", "", ",", "n[]"])
def test_what_is_no_node_list_is_refused(text):
    """And not guessed at."""
    with pytest.raises(ValueError):
        expand(text)


# SLURM.


def test_a_step_over_several_nodes_is_read():
    """The step's own nodes and not its job's: gpu07 is not in it."""
    port = PORTS[4711 % len(PORTS)]
    assert read_launcher(SLURM) == Found("SLURM", 2, 1, "gpu08", port)


def test_an_older_step_says_it_by_its_job():
    """Variables of the step alone are newer than those of the job."""
    old = without(SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")
    found = read_launcher({**old, "SLURM_JOB_NODELIST": "gpu[08-09]"})
    assert (found.nodes, found.node_rank, found.head) == (2, 1, "gpu08")


@pytest.mark.parametrize("job", ["9", "10", "70000"])
def test_every_host_of_a_step_finds_the_same_port_and_neighbours_another(job):
    """A requeued job keeps its id, and so its port; ports are above those for outgoing ones."""

    def port(**other: str) -> int:
        return read_launcher({**SLURM, "SLURM_JOB_ID": job, **other}).port

    assert port() == port(SLURM_NODEID="0") and port() in PORTS
    ports = sorted([port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID=f"{int(job) + 1}")])
    # The head's service listens on one of the next sixteen.
    assert all(b - a > 16 for a, b in itertools.pairwise(ports))


def test_a_batch_script_by_itself_is_one_host():
    """sbatch -N 2 runs its script on the first node only, with the job's variables set."""
    assert read_launcher(without(SLURM, "SLURM_STEP_ID")) is None


def test_a_shell_that_salloc_opened_is_one_host():
    """Its step is of one node; SLURM_NNODES is kept from outside (srun --preserve-env)."""
    shell = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    assert read_launcher({**SLURM, **shell}).nodes == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "8 tasks on 2 nodes.*--ntasks-per-node=1"),
        (
            {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "4"},
            "4 tasks on 1 node,.*--ntasks-per-node=1",
        ),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2, and SLURM says.*2 nodes.*--nodes 1"),
        ({"SLURM_NODEID": ""}, "SLURM_NODEID is not set.*--nodes 1"),
        ({"SLURM_STEP_NODELIST": "gpu[1-3]"}, r"3 hosts in SLURM_STEP_NODELIST=gpu\[1-3\].*2 node"),
        ({"SLURM_STEP_NODELIST": "gpu[1-"}, "is no node list: a bracket is not closed"),
        ({"SLURM_STEP_NUM_NODES": "two"}, "SLURM_STEP_NUM_NODES=two is not an integer"),
    ],
)
def test_what_contradicts_itself_is_refused_with_both_sides(change, said):
    """In one line, with the way out."""
    with pytest.raises(ConfigError, match=said) as refused:
        read_launcher({**SLURM, **change})
    assert "\n" not in str(refused.value)


# Open MPI and Kubernetes.


def test_open_mpi_says_who_but_not_where():
    """The head's address is the command line's."""
    found = read_launcher(MPI)
    assert (found.launcher, found.nodes, found.node_rank, found.head) == ("Open MPI", 4, 2, None)


def test_mpirun_within_a_slurm_job_is_believed():
    """The innermost launcher made this process: the step around it is that of mpirun's daemon."""
    assert read_launcher({**SLURM, **MPI}).launcher == "Open MPI"
    one = {**SLURM, **MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    assert read_launcher(one).nodes == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "2 processes on this host.*--map-by ppr:1:node"),
        ({"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4, and Open MPI says.*4 nodes"),
        ({"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is not set"),
    ],
)
def test_a_broken_mpi_environment_is_refused(change, said):
    """In one line, with the way out."""
    with pytest.raises(ConfigError, match=said):
        read_launcher({**MPI, **change})


def test_a_pod_of_an_indexed_job_finds_the_head_by_its_own_name():
    """Through the headless service of the JobSet."""
    assert read_launcher(POD) == Found("Kubernetes", 4, 2, "digits-worker-0-0.digits", FIXED_PORT)


def test_an_index_alone_is_no_run_over_hosts():
    """Indexed Jobs of many single-host runs, a sweep, have the index too."""
    assert read_launcher(without(POD, "FTRAIN_NODES")) is None
    assert read_launcher({**POD, "FTRAIN_NODES": "1"}).nodes == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX=4, and Kubernetes says.*4 nodes"),
        ({"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX is not set"),
        ({"JOBSET_NAME": ""}, "JOBSET_NAME is not set"),
        ({"HOSTNAME": "digits-worker-0-20"}, "HOSTNAME=digits-worker-0-20.*INDEX=2.*63"),
        ({"FTRAIN_NODES": "0"}, "FTRAIN_NODES=0 is not an integer >= 1"),
    ],
)
def test_a_broken_pod_is_refused(change, said):
    """In one line, with the way out."""
    with pytest.raises(ConfigError, match=said):
        read_launcher({**POD, **change})


def test_no_launcher_is_one_host():
    """As on a laptop."""
    assert read_launcher({"PATH": "/bin", "HOSTNAME": "x-0"}) is None

"""Where a host stands: by flags, by a launcher's environment, or refused in one line."""

from __future__ import annotations

import argparse

import pytest

from ftrain.errors import ConfigError
from ftrain.placement import Placement, add_flags, find_placement
from ftrain.schedulers import FIXED_PORT, PORTS
from tests.test_schedulers import MPI, POD, SLURM, without

SLURM_PORT = PORTS[4711 % len(PORTS)]
HALF = without(SLURM, "SLURM_NODEID")


def place(line: str = "", environ: dict[str, str] | None = None) -> tuple | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    found = find_placement(parser.parse_args(line.split()), environ or {})
    if found is None:
        return None
    assert isinstance(found, Placement)
    return found.nodes, found.node_rank, found.coordinator_host, found.coordinator_port


@pytest.mark.parametrize("environ", [{}, SLURM, MPI, POD, HALF])
def test_all_flags_win_over_any_environment(environ):
    """Whole or half there."""
    line = "--nodes 3 --node-rank 2 --coordinator [fd00::1]:5000"
    assert place(line, environ) == (3, 2, "fd00::1", 5000)


@pytest.mark.parametrize("environ", [{}, SLURM, MPI, POD, HALF])
@pytest.mark.parametrize("more", ["", " --node-rank 0", " --coordinator [::1]:0"])
def test_one_node_is_this_host_whatever_is_set(environ, more):
    """The way out of every refusal; scripts may give the other flags all the same."""
    assert place(f"--nodes 1{more}", environ) is None


def test_without_flags_the_environment_tells():
    """All of it, the port too."""
    assert place("", SLURM) == (2, 1, "gpu08", SLURM_PORT)
    assert place("", POD) == (4, 2, "digits-worker-0-0.digits", FIXED_PORT)
    assert place("") is None


ONE = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}


def test_a_launcher_of_one_host_is_a_run_on_it():
    """Job scripts give the address of the head whatever the number of nodes."""
    assert place("", ONE) is None
    assert place("--coordinator head:5000 --node-rank 0", ONE) is None


def test_a_flag_may_add_what_the_environment_does_not_say():
    """Another network of the head's, or the address that Open MPI does not know."""
    assert place("--coordinator ib-gpu08:5000", SLURM) == (2, 1, "ib-gpu08", 5000)
    assert place("--coordinator head:5000", MPI) == (4, 2, "head", 5000)
    assert place("--nodes 2", SLURM) == (2, 1, "gpu08", SLURM_PORT)


@pytest.mark.parametrize(
    ("line", "environ", "said"),
    [
        ("--nodes 4", SLURM, "--nodes 4, and SLURM says 2; leave the flag out"),
        ("--nodes 2", ONE, "--nodes 2, and SLURM says 1; leave the flag out"),
        ("--node-rank 0", SLURM, "--node-rank 0, and SLURM says 1; leave the flag out"),
        ("", HALF, "SLURM_NODEID is not set.*--nodes 1"),
        ("", MPI, "4 hosts without --coordinator, and Open MPI does not say"),
        ("--nodes 2 --node-rank 0", SLURM, "2 hosts without --coordinator; give"),
        ("--nodes 2", {}, "--nodes 2 without --node-rank and --coordinator.*or --nodes 1"),
        ("--node-rank 1", {}, "--node-rank 1 without --nodes and --coordinator"),
        ("--coordinator a:1", {}, "--coordinator a:1 without --nodes and --node-rank"),
        ("--nodes 2 --node-rank 2 --coordinator a:1", {}, "--node-rank 2 with --nodes 2.*0 to 1"),
        ("--nodes 1 --node-rank 1", {}, "--node-rank 1 with --nodes 1"),
        ("--nodes 0", {}, "--nodes 0 is not an integer >= 1"),
        ("--nodes 2 --node-rank -1", {}, "--node-rank -1 is not an integer >= 0"),
        ("--nodes 2 --node-rank 1 --coordinator ::1", {}, r"without brackets.*write \[::1\]:PORT"),
        ("--nodes 2 --node-rank 1 --coordinator [::1]:0", {}, r"port 0 .*such as \[::1\]:61439"),
    ],
)
def test_what_is_not_whole_or_contradicts_is_refused(line, environ, said):
    """One line with both sides and what to give."""
    with pytest.raises(ConfigError, match=said) as refused:
        place(line, environ)
    assert "\n" not in str(refused.value)

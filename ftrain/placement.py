"""Where this supervisor stands among the hosts of a run, whoever said so. No jax."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping

from ftrain.addresses import RESOLVE_S
from ftrain.endpoint import parse_endpoint
from ftrain.errors import ConfigError
from ftrain.schedulers import FIXED_PORT, Found, read_launcher


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One host's place in a run over several. Host 0 is the head: it decides everything."""

    nodes: int  # hosts of the run
    node_rank: int  # 0 .. nodes - 1
    coordinator_host: str  # of the head, as every host may name it: a name, an IPv4, an IPv6
    coordinator_port: int  # where the head's supervisor listens
    head_comes_late: bool = False  # its name may resolve minutes from now: it is a pod's

    def patience_s(self, start_timeout_s: float) -> float:
        """How long a name that does not resolve is waited for."""
        return start_timeout_s if self.head_comes_late else RESOLVE_S


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `find_placement` reads."""
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="hosts of the run; 1: this one, whatever is set"
    )
    parser.add_argument(
        "--node-rank", type=int, metavar="I", help="which of them this is, 0 .. N-1"
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where the host of rank 0 listens, the same on every host; default: the scheduler's",
    )


def find_placement(flags: argparse.Namespace, environ: Mapping[str, str]) -> Placement | None:
    """The place of this host; None for a run on one host.

    `--nodes` together with `--node-rank` is all that is asked: then no launcher's environment is
    read, complete or not. Else the environment tells, and a flag that is given must agree with it;
    `--coordinator` may always name another address of the head.

    Raises:
      ConfigError: what is said is incomplete or contradicts itself; one line with both sides.
    """
    nodes, rank = flags.nodes, flags.node_rank
    _check_flags(nodes, rank)
    if nodes == 1:
        return None
    if nodes is not None and rank is not None:
        return _place(nodes, rank, flags.coordinator, None)
    found = read_launcher(environ)
    if found is None:
        if (nodes, rank, flags.coordinator) == (None, None, None):
            return None
        raise ConfigError(_incomplete(flags))
    for flag, given, told in (
        ("--nodes", nodes, found.nodes),
        ("--node-rank", rank, found.node_rank),
    ):
        if given not in (None, told):
            raise ConfigError(
                f"{flag} {given}, and {found.launcher} says {told}; leave the flag out, or give "
                "--nodes, --node-rank and --coordinator, and the environment is not read"
            )
    if found.nodes == 1:
        return None
    return _place(found.nodes, found.node_rank, flags.coordinator, found)


def _check_flags(nodes: int | None, rank: int | None) -> None:
    if nodes is not None and nodes < 1:
        raise ConfigError(f"--nodes {nodes} is not an integer >= 1; give the number of hosts")
    if rank is not None and rank < 0:
        raise ConfigError(f"--node-rank {rank} is not an integer >= 0; ranks begin at 0")
    if nodes is not None and rank is not None and rank >= nodes:
        raise ConfigError(
            f"--node-rank {rank} with --nodes {nodes}: ranks are 0 to {nodes - 1}; lower the rank, "
            "or raise the number of hosts"
        )


def _incomplete(flags: argparse.Namespace) -> str:
    given = {
        "--nodes": flags.nodes,
        "--node-rank": flags.node_rank,
        "--coordinator": flags.coordinator,
    }
    there = " and ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
    missing = " and ".join(flag for flag, value in given.items() if value is None)
    return (
        f"{there} without {missing}, and no launcher's environment says it (srun, mpirun or "
        f"FTRAIN_NODES in a pod); give {missing}, or --nodes 1"
    )


def _place(nodes: int, rank: int, coordinator: str | None, found: Found | None) -> Placement:
    if coordinator is not None:
        endpoint = parse_endpoint(coordinator, "--coordinator")
        if endpoint.port == 0:
            raise ConfigError(
                f"--coordinator {coordinator}: port 0 is any port, and the other hosts could not "
                f"know which; give one, such as {endpoint._replace(port=FIXED_PORT)}"
            )
        host, port = endpoint
    elif found is not None and found.head is not None:
        host, port = found.head, found.port
    else:
        port = FIXED_PORT if found is None else found.port
        who = f", and {found.launcher} does not say where rank 0 is" if found is not None else ""
        raise ConfigError(
            f"{nodes} hosts without --coordinator{who}; give --coordinator HOST:PORT of the host "
            f"of rank 0 on every host, such as --coordinator head:{port}"
        )
    return Placement(
        nodes=nodes,
        node_rank=rank,
        coordinator_host=host,
        coordinator_port=port,
        head_comes_late=found is not None and found.launcher == "Kubernetes",
    )

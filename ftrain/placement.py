"""Where this supervisor stands among the hosts of a run, whoever said so. No jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One host's place in a run over several. Host 0 is the head: it decides everything."""

    nodes: int  # hosts of the run
    node_rank: int  # 0 .. nodes - 1
    coordinator_host: str  # of the head, as every host may name it: a name, an IPv4, an IPv6
    coordinator_port: int  # where the head's supervisor listens

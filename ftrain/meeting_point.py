"""Where the head of a run over several hosts is to be found, and by what hosts know one another."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import MutableMapping

from ftrain.addresses import RESOLVE_S, head_address, listen
from ftrain.endpoint import Endpoint
from ftrain.errors import AddressError
from ftrain.interfaces import local_addresses
from ftrain.placement import Placement

SERVICE_PORTS = 16  # from the port after the hosts' own; for firewalls


@dataclasses.dataclass(frozen=True)
class MeetingPoint:
    """The head's side of it, open."""

    nodes: int
    endpoint: Endpoint  # a literal address of this host's, and the hosts' port
    listener: socket.socket
    token: bytes
    rank: int = 0  # of this host

    @property
    def address(self) -> str:
        """The one address of this host on which anything listens."""
        return self.endpoint.host

    def service_ports(self, number: int) -> list[int]:
        """Where the coordination service may listen, best first; 0 is any port.

        Another one each time: a worker that outlived the last service must not reach the next.
        """
        first = self.endpoint.port + 1
        ports = [first + (number + i) % SERVICE_PORTS for i in range(SERVICE_PORTS)]
        return [port for port in ports if port < 1 << 16] + [0]


def use_interface(address: str, environ: MutableMapping[str, str]) -> None:
    """Has NCCL use the interface that has `address`, unless the user has named one."""
    interface = local_addresses().get(address)
    if interface:
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def open_meeting_point(
    placement: Placement, token: bytes, patience_s: float = RESOLVE_S
) -> MeetingPoint:
    """Listens where the placement says that the head is.

    Args:
      placement: this host's, rank 0.
      token: the run's.
      patience_s: for the head's own name to resolve.

    Raises:
      AddressError: that is no address of this host's, or the port is taken.
    """
    given = Endpoint(placement.coordinator_host, placement.coordinator_port)
    at = head_address(given, patience_s=patience_s)
    listener = listen(at)
    return MeetingPoint(placement.nodes, at, listener, token)


def open_own_meeting_point(placement: Placement, token: bytes, address: str) -> MeetingPoint:
    """Listens on this host's own `address`, on the head's port if it is free, else on any.

    Raises:
      AddressError: that is no address of this host's.
    """
    at = Endpoint(address, placement.coordinator_port)
    try:
        listener = listen(at)
    except AddressError:
        listener = listen(at._replace(port=0))
        at = at._replace(port=listener.getsockname()[1])
    return MeetingPoint(placement.nodes, at, listener, token, placement.node_rank)

"""TCP sockets of a process, as the kernel lists them in /proc (Linux). No jax.

Read from there and not asked of the sockets: they are other libraries', or another process's.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

_STATES = {"01": "established", "02": "connecting", "0A": "listening"}
_MAPPED = "0000000000000000FFFF0000"  # ::ffff: before an IPv4 address


class TcpSocket(NamedTuple):
    """One socket, and how its connection fares."""

    local_port: int
    peer_port: int
    state: str  # "established", "connecting", "listening", "" for any other
    resent: int  # how often its oldest packet without an acknowledgement has been sent again
    local_address: str = ""  # as the kernel has it, in hexadecimal; of IPv4 also where it is mapped
    peer_address: str = ""

    @property
    def local(self) -> tuple[str, int]:
        """This end, as it is called on every host."""
        return self.local_address, self.local_port

    @property
    def peer(self) -> tuple[str, int]:
        """The other end."""
        return self.peer_address, self.peer_port

    @property
    def listens(self) -> bool:
        """Whether it takes connections in."""
        return self.state == "listening"


def tcp_sockets(pid: int | str = "self") -> dict[int, TcpSocket]:
    """The TCP sockets of a process by descriptor; none if the process is gone."""
    kernel = {}
    for table in ("tcp", "tcp6"):
        # Not there: no IPv6 here, or the process has ended, reaped or not.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}") as file:
            for line in list(file)[1:]:
                fields = line.split()
                (at, port), (peer_at, peer_port) = (f.rsplit(":", 1) for f in fields[1:3])
                kernel[fields[9]] = TcpSocket(
                    int(port, 16),
                    int(peer_port, 16),
                    _STATES.get(fields[3], ""),
                    int(fields[6], 16),
                    at.removeprefix(_MAPPED),
                    peer_at.removeprefix(_MAPPED),
                )
    sockets = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, or the listing's own descriptor
                link = os.readlink(f"/proc/{pid}/fd/{name}")
                found = kernel.get(link.removeprefix("socket:[").removesuffix("]"))
                if found is not None:
                    sockets[int(name)] = found
    return sockets

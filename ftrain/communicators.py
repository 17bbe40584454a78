"""The data plane's connections on CPU: found, and cut when an attempt has failed (rule R7).

gloo knows no cancellation: after a SIGKILL only the ring neighbours see a closed connection, the
others wait for their neighbours until a timeout of minutes. So whoever sees a failure sets a key of
the view; a listener thread in every worker waits on it and shuts the view's own sockets down, so
that a hung collective raises at once. On GPU, JAX cancels NCCL by incarnation and none of this is
needed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

TCP_LISTEN = "0A"  # a state in /proc/net/tcp


class Cutter:
    """Listens for the failure of one view and cuts its gloo connections.

    Args:
      wait: blocks until the view's failure key is set; raises `ConnectionError` when it cannot.
      peer_ports: the ports the members of the view listen on, asked for when there is a failure.
      own_ports: the ports that this worker listens on for the view.

    Attributes:
      failed: set when the view has failed.
    """

    def __init__(
        self, wait: Callable[[], None], peer_ports: Callable[[], set[int]], own_ports: set[int]
    ):
        self._wait, self._peer_ports, self._own_ports = wait, peer_ports, own_ports
        self.failed = threading.Event()
        self._over = False
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="ftrain-cutter", daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._wait()
            # The view may end while we look, and its ports be somebody else's then.
            with self._lock:
                if not self._over:
                    self.failed.set()
                    cut_connections(self._own_ports | self._peer_ports())

    def end(self) -> None:
        """The view is over: whatever is set from now on cuts nothing."""
        with self._lock:
            self._over = True


def listening_ports() -> set[int]:
    """The TCP ports that this process listens on."""
    return {row.local_port for row in _tcp_rows().values() if row.listens}


def cut_connections(ports: set[int]) -> int:
    """Shuts down this process's TCP connections to or from one of `ports`; returns how many.

    Only those: user code has connections too, and so have gRPC and the coordination service.
    """
    cut = 0
    for fd, row in _tcp_rows().items():
        if not row.listens and ports & {row.local_port, row.peer_port}:
            with contextlib.suppress(OSError):  # not connected any more, or closed meanwhile
                with socket.socket(fileno=os.dup(fd)) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


class _Row(NamedTuple):
    local_port: int
    peer_port: int
    listens: bool


def _tcp_rows() -> dict[int, _Row]:
    """This process's TCP sockets by descriptor, as the kernel lists them.

    Read from /proc and not asked of the sockets: making a Python socket of somebody's descriptor
    may change its mode.
    """
    kernel = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/net/{table}") as file:
            for line in list(file)[1:]:
                fields = line.split()
                local, peer = (int(f.rsplit(":", 1)[1], 16) for f in fields[1:3])
                kernel[fields[9]] = _Row(local, peer, fields[3] == TCP_LISTEN)
    rows = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or the listing's own descriptor
            link = os.readlink(f"/proc/self/fd/{name}")
            row = kernel.get(link.removeprefix("socket:[").removesuffix("]"))
            if row is not None:
                rows[int(name)] = row
    return rows

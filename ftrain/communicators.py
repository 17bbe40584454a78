"""The data plane's connections on CPU: found, and cut when an attempt has failed (rule R7).

gloo knows no cancellation: after a SIGKILL only the ring neighbours see a closed connection, the
others wait for their neighbours until a timeout of minutes. So whoever sees a failure sets a key of
the view; a listener thread in every worker waits on it and shuts the view's own sockets down, so
that a hung collective raises at once. On GPU, JAX cancels NCCL by incarnation and nothing is cut.

Both may fail to let a collective go: seen on CPU once in 2,000 deaths, with every socket of the
view shut down, and on GPU when an attempt fails while NCCL connects (jax 0.11.2). Then the process
ends, since the others wait for it in the barrier, and its replacement takes part seconds later.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

from ftrain.tcp_sockets import tcp_sockets

LEAVE_S = 5.0  # to come out of a cancelled collective: it takes milliseconds, or never ends
POLL_S = 0.05


class Cutter:
    """Listens for the failure of one view and cuts its gloo connections.

    Args:
      wait: blocks until the view's failure key is set; raises `ConnectionError` when it cannot.
      peer_ports: the ports the members of the view listen on, asked for when there is a failure.
      own_ports: the ports that this worker listens on for the view.
      stuck: called when this worker is still in a collective `LEAVE_S` after it was cancelled.

    Attributes:
      failed: set when the view has failed. No collective begins from then on.
      inside: whether this worker is in a collective that a cancellation ends; by who calls it.
    """

    def __init__(
        self,
        wait: Callable[[], None],
        peer_ports: Callable[[], set[int]],
        own_ports: set[int],
        stuck: Callable[[], None],
    ):
        self._wait, self._peer_ports, self._own_ports = wait, peer_ports, own_ports
        self._stuck = stuck
        self.failed = threading.Event()
        self.inside = False
        self._over = False
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="ftrain-cutter", daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._wait()
            # The view may end while we look, and its ports be somebody else's then.
            with self._lock:
                if self._over:
                    return
                self.failed.set()
                ports = self._own_ports | self._peer_ports()
                cut_connections(ports)
            self._see_it_left(ports)

    def _see_it_left(self, ports: set[int]) -> None:
        """Cuts again meanwhile: the kernel's list is no snapshot, and one may have been missed."""
        deadline = time.monotonic() + LEAVE_S
        while self.inside:
            if time.monotonic() > deadline:
                self._stuck()
                return
            time.sleep(POLL_S)
            with self._lock:
                if not self._over:
                    cut_connections(ports)

    def end(self) -> None:
        """The view is over: whatever is set from now on cuts nothing."""
        with self._lock:
            self._over = True


def listening_ports() -> set[int]:
    """The TCP ports that this process listens on."""
    return {tcp.local_port for tcp in tcp_sockets().values() if tcp.listens}


def cut_connections(ports: set[int]) -> int:
    """Shuts down this process's TCP connections to or from one of `ports`; returns how many.

    Only those: user code has connections too, and so have gRPC and the coordination service.
    """
    cut = 0
    for fd, tcp in tcp_sockets().items():
        if not tcp.listens and ports & {tcp.local_port, tcp.peer_port}:
            with contextlib.suppress(OSError):  # not connected any more, or closed meanwhile
                with socket.socket(fileno=os.dup(fd)) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


def address_of_nobody(address: bytes) -> bytes:
    """A member's address as gloo publishes it, changed to one that refuses connections at once.

    The length of the host's name, the name, the length of the rest, and a sockaddr of IPv4 or IPv6
    (jaxlib 0.10.2, 0.12.0.1), which becomes port 1 of loopback: a member's own host may be lost,
    and connecting to it would wait.
    """
    start = 16 + int.from_bytes(address[:8], "little")
    family = int.from_bytes(address[start : start + 2], "little")
    if family == socket.AF_INET:
        at, own = start + 4, socket.inet_pton(socket.AF_INET, "127.0.0.1")
    else:
        at, own = start + 8, socket.inet_pton(socket.AF_INET6, "::1")
    port = address[: start + 2] + (1).to_bytes(2, "big") + address[start + 4 : at]
    return port + own + address[at + len(own) :]

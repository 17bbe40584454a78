"""The data plane's connections on CPU: found, and cut when an attempt has failed (rule R7).

gloo knows no cancellation: after a SIGKILL only the ring neighbours see a closed connection, the
others wait for their neighbours until a timeout of minutes. So whoever sees a failure sets a key of
the view; a listener thread in every worker waits on it and shuts the view's own sockets down, so
that a hung collective raises at once; one that does not is left behind (`lane`). On GPU, JAX
cancels NCCL by incarnation and nothing is cut. What waits in NCCL while it connects is not let go
(jax 0.11.2), and keeps the device from all later work. Who waits for that may not go on: in the
next view the others would connect to it, and be stuck as well. So its process ends, before it
reaches the barrier, the others go on without it, and its replacement takes part seconds later.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ftrain.errors import AttemptFailedError
from ftrain.lane import Lane
from ftrain.tcp_sockets import tcp_sockets

LEAVE_S = 0.2  # to come out of a cancelled collective: it takes milliseconds, or never ends
STUCK_S = 5.0  # the same, if it holds the device: whatever else is on it must end first
POLL_S = 0.02

T = TypeVar("T")


class Cutter:
    """Runs one view's collectives, and ends them when the view has failed.

    Args:
      wait: blocks until the view's failure key is set; raises `ConnectionError` when it cannot.
      peer_ports: the ports the members of the view listen on, asked for when there is a failure.
      own_ports: the ports that this worker listens on for the view.
      stuck: called when a collective goes on although it was cancelled, and holds the device; None
        where it holds none, and whoever waits for it is let go.

    Attributes:
      failed: set when the view has failed. No collective begins from then on.
    """

    def __init__(
        self,
        wait: Callable[[], None],
        peer_ports: Callable[[], set[int]],
        own_ports: set[int],
        stuck: Callable[[], None] | None = None,
    ):
        self._wait, self._peer_ports, self._own_ports = wait, peer_ports, own_ports
        self._stuck = stuck
        self.failed = threading.Event()
        self._inside = self._over = False
        self._lane = Lane()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="ftrain-cutter", daemon=True).start()

    def run(self, collective: Callable[[], T]) -> T:
        """What `collective` returns or raises, in a thread of the view.

        Raises:
          AttemptFailedError: the view has failed already.
          LeftBehindError: it failed meanwhile, and that did not end the collective.
        """
        with self.cancellable():
            return self._lane.run(collective)

    @contextlib.contextmanager
    def cancellable(self) -> Iterator[None]:
        """Around a wait in this thread that the failure of the view ends, or the process does."""
        self._inside = True  # before the look at `failed`: one of the two sees the other
        try:
            if self.failed.is_set():
                raise AttemptFailedError("another member's attempt has failed")
            yield
        finally:
            self._inside = False

    def _listen(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._wait()
            # The view may end while we look, and its ports be somebody else's then.
            with self._lock:
                if self._over:
                    return
                self.failed.set()
                cut_connections(self._own_ports | self._peer_ports())
            if self._is_left_within(LEAVE_S if self._stuck is None else STUCK_S):
                return
            if self._stuck is None:
                self._lane.leave()
            else:
                self._stuck()

    def _is_left_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._inside or self._lane.busy:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def end(self) -> None:
        """The view is over: whatever is set from now on cuts nothing."""
        with self._lock:
            self._over = True
        self._lane.end()


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

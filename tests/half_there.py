"""Sums of two processes that are cut while bytes are half there, until one of them does not end.

    python -m tests.half_there PORT RANK

Rank 0 hosts the service, starts rank 1 and stops it (SIGSTOP) in the middle of sums, over sockets
that hold four kilobytes; then the view is said to have failed, as it is when a worker dies. It
prints, for each cut, what became of the collective.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
from jaxlib import _jax

from ftrain.communicators import Cutter, listening_ports
from ftrain.errors import AttemptFailedError
from ftrain.lane import LeftBehindError
from ftrain.mesh import DataPlane
from ftrain.runtime import GLOO_PREFIX, Runtime
from ftrain.tcp_sockets import tcp_sockets

CUTS = 100
NUMBERS = 1 << 20
WEEK_MS = 7 * 24 * 3600 * 1000


def meet(runtime: Runtime, name: str) -> None:
    runtime.store.wait_at_barrier(name, 60_000, [0, 1])


def open_plane(runtime: Runtime, me: int, number: int) -> DataPlane:
    """Connected; its cutter waits for the key `failed/<number>`."""
    meet(runtime, f"over/{number}")
    if me == 0:
        runtime.store.key_value_delete(GLOO_PREFIX)
    meet(runtime, f"cleaned/{number}")
    before = listening_ports()
    devices = runtime.new_view_devices()
    own = listening_ports() - before
    runtime.store.key_value_set(f"ports/{number}/{me}", ",".join(map(str, own)))
    theirs = runtime.store.blocking_key_value_get(f"ports/{number}/{1 - me}", 60_000)
    ports = own | {int(port) for port in theirs.split(",")}
    cutter = Cutter(
        lambda: runtime.store.blocking_key_value_get(f"failed/{number}", WEEK_MS),
        lambda: ports,
        own,
    )
    plane = DataPlane(devices, [0, 1], me, None, lambda lowered: lowered.compile(), cutter)
    plane.sum(numbers())
    for fd, tcp in tcp_sockets().items():
        if not tcp.listens and ports & {tcp.local_port, tcp.peer_port}:
            with socket.socket(fileno=os.dup(fd)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return plane


def numbers() -> list[jax.Array]:
    return [jax.device_put(np.ones((1, 1, NUMBERS), np.float32))]


def sums_until_cut(plane: DataPlane) -> str:
    """What became of the collective that was cut: whether it ended, or was left behind."""
    own = numbers()
    try:
        while True:
            plane.sum(own)
    except LeftBehindError:
        return "left behind"
    except AttemptFailedError:
        return "ended"


def main(port: str, me: int) -> None:
    address = f"127.0.0.1:{port}"
    if me == 0:
        service = _jax.get_distributed_runtime_service(  # noqa: F841  lives as long as it is held
            address, 2, heartbeat_timeout=100, shutdown_timeout=2, recoverable=True
        )
        peer = subprocess.Popen([sys.executable, "-m", "tests.half_there", port, "1"])
    runtime = Runtime(
        address=address,
        worker=me,
        workers=2,
        platform="cpu",
        heartbeat_timeout_s=100,
        host="127.0.0.1",
    )
    runtime.start_backend()
    for number in range(CUTS):
        plane = open_plane(runtime, me, number)

        def stop_and_cut(number: int = number) -> None:
            os.kill(peer.pid, signal.SIGSTOP)
            time.sleep(0.05)  # what is on its way arrives, and rank 0 waits for the rest
            runtime.store.key_value_set(f"failed/{number}", "")

        if me == 0:
            threading.Timer(random.uniform(0.05, 0.08), stop_and_cut).start()
        became = sums_until_cut(plane)
        if me == 0:
            os.kill(peer.pid, signal.SIGCONT)
            print(became, flush=True)
            if became == "left behind":
                # The next view works, while the last one's collective is still there.
                open_plane(runtime, me, number + 1)
                print("went on", flush=True)
                peer.kill()
                os._exit(0)
        plane._cutter.end()
    peer.kill()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""The coordinator: JAX's coordination service in a process of its own, outside every worker.

So worker 0 may die like any other. The supervisor launches it and speaks to it in lines:

    control fence <id>            the worker's process is dead and reaped: count its task as gone
            group <pgid> [-]      a process group to end should the supervisor die (-: forget it)
    stdout  ready <address>       once, when every task may come and go
            fenced <id>           the service has acknowledged

When the control pipe closes, the supervisor is gone: the coordinator ends the groups it was told
of, so that nothing that user code forked outlives the run, and then itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading

from jaxlib import _jax

TOPOLOGY = {"cpu": "cpu:global_topology/cpu", "gpu": "cuda:global_topology/cuda"}
TOPOLOGY_COPY = "ftrain/topology"


class Coordinator:
    """The service and the fences it executes."""

    def __init__(self, workers: int, platform: str, heartbeat_timeout_s: float):
        self._workers, self._platform = workers, platform
        self._heartbeat_timeout_s = max(1, int(heartbeat_timeout_s))
        self.address, self._service = self._serve()
        self._open()

    def _serve(self):
        """Starts the service on a free loopback port; another program may take it first."""
        for attempt in range(20):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
            try:
                return address, _jax.get_distributed_runtime_service(
                    address,
                    2 * self._workers,  # a member task and a store task each, see runtime
                    heartbeat_timeout=self._heartbeat_timeout_s,
                    shutdown_timeout=2,
                    recoverable=True,
                )
            except _jax.JaxRuntimeError:
                if attempt == 19:
                    raise
        raise AssertionError("unreachable")

    def _client(self, task: int):
        return _jax.get_distributed_runtime_client(
            self.address,
            task,
            init_timeout=10,
            shutdown_timeout=2,
            heartbeat_timeout=self._heartbeat_timeout_s,
            use_compression=False,
        )

    def _open(self) -> None:
        """Registers every task once and takes it back.

        The service lets nobody in until all its tasks have registered for the first time. With that
        behind us, workers come and go one by one from the first moment on.
        """
        clients = [self._client(task) for task in range(2 * self._workers)]
        threads = [threading.Thread(target=client.connect) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            client.shutdown()

    def fence(self, worker: int) -> None:
        """Counts the member task of `worker` as gone, at once. Its process must be reaped (R9).

        Connecting under its id makes a new incarnation, and shutting that down disconnects it:
        barriers stop waiting for the dead one without a heartbeat timeout, 2-6 ms.
        """
        client = self._client(worker)
        client.connect()
        if worker == 0:
            self._restore_topology(client)
        client.shutdown()

    def _restore_topology(self, client) -> None:
        """Process 0 may have died between taking the topology back and publishing it again.

        Others who make a client meanwhile would wait for it for ever.
        """
        with contextlib.suppress(_jax.JaxRuntimeError):  # not there: nobody has got so far
            copy = client.blocking_key_value_get_bytes(TOPOLOGY_COPY, 1)
            client.key_value_set_bytes(TOPOLOGY[self._platform], copy, allow_overwrite=True)


def _end_groups(groups: set[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def main(argv: list[str]) -> None:
    """`python -m ftrain.coordinator CONTROL_FD WORKERS PLATFORM HEARTBEAT_TIMEOUT_S`."""
    # Ctrl-C and a group's SIGTERM reach us too; the supervisor decides when we end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    coordinator = Coordinator(int(argv[1]), argv[2], float(argv[3]))
    sys.stdout.write(f"ready {coordinator.address}\n")
    sys.stdout.flush()
    groups: set[int] = set()
    for line in os.fdopen(int(argv[0]), encoding="utf-8"):
        match line.split():
            case ["fence", worker]:
                coordinator.fence(int(worker))
                sys.stdout.write(f"fenced {worker}\n")
                sys.stdout.flush()
            case ["group", pgid]:
                groups.add(int(pgid))
            case ["group", pgid, "-"]:
                groups.discard(int(pgid))
    _end_groups(groups)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

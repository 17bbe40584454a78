"""The coordinator: JAX's coordination service in a process of its own, outside every worker.

So worker 0 may die like any other. The supervisor launches it and speaks to it in lines:

    control fence <id>            the worker's process is dead and reaped: count its task as gone
            keep [PART, PATH]     write down what JAX knows of all workers' devices, by renaming
            group <pgid> [-]      a process group to end should the supervisor die (-: forget it)
    stdout  ready <address>       once, when every task may come and go
            fenced <id>           the service has acknowledged

When the control pipe closes, the supervisor is gone: the coordinator ends the groups it was told
of, so that nothing that user code forked outlives the run, and then itself.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

from jaxlib import _jax

from ftrain.undertaker import end_groups, ignore_signals, take_group

TOPOLOGY = {"cpu": "cpu:global_topology/cpu", "gpu": "cuda:global_topology/cuda"}
# What each worker says of its devices, and what worker 0 makes of it (jax 0.10.2 to 0.12.0.1).
DEVICE_KEYS = {
    "cpu": ("cpu:global_topology/", "cpu:local_topology/cpu/"),
    "gpu": ("cuda:global_topology/", "cuda:local_topology/cuda/"),
}
TOPOLOGY_COPY = "ftrain/topology"


class Coordinator:
    """The service and the fences it executes.

    Args:
      topology: a file that `keep_topology` wrote, "" without. Then a backend opens although other
        workers are away, which without it would wait until each has been there once.
    """

    def __init__(
        self,
        workers: int,
        platform: str,
        heartbeat_timeout_s: float,
        host: str = "127.0.0.1",
        ports: Sequence[int] = (0,),
        topology: str = "",
    ):
        self._workers, self._platform = workers, platform
        self._heartbeat_timeout_s = max(1, int(heartbeat_timeout_s))
        self.address, self._service = self._serve(host, ports)
        self._clerk = self._open()  # our own task: for the store, and for releasing waiters
        if topology:
            self._use_topology(topology)

    def _serve(self, host: str, ports: Sequence[int]):
        """Starts the service on the first of `ports` that is free there; 0 is any.

        Another program may take a free one first.
        """
        last = None
        for port in [p for given in ports for p in ([given] if given else [0] * 20)]:
            try:
                address = _free_address(host, port)
                return address, _jax.get_distributed_runtime_service(
                    address,
                    2 * self._workers
                    + 2,  # two tasks a worker, see runtime; ours; one that never comes
                    heartbeat_timeout=self._heartbeat_timeout_s,
                    shutdown_timeout=2,
                    recoverable=True,
                )
            except (_jax.JaxRuntimeError, OSError) as error:
                last = error
        raise last

    def _client(self, task: int):
        return _jax.get_distributed_runtime_client(
            self.address,
            task,
            init_timeout=10,
            shutdown_timeout=2,
            heartbeat_timeout=self._heartbeat_timeout_s,
            use_compression=False,
        )

    def _open(self):
        """Registers every task once and takes it back; returns our own client, connected.

        The service lets nobody in until all its tasks have registered for the first time. With that
        behind us, workers come and go one by one from the first moment on.
        """
        clients = [self._client(task) for task in range(2 * self._workers + 2)]
        threads = [threading.Thread(target=client.connect) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            client.shutdown()
        clerk = self._client(2 * self._workers)
        clerk.connect()
        return clerk

    def fence(self, worker: int) -> None:
        """Counts the tasks of `worker` as gone, at once. Its process must be reaped (R9).

        Connecting under its id makes a new incarnation, and shutting that down disconnects it:
        barriers stop waiting for the dead one without a heartbeat timeout, 2-6 ms.
        """
        self._clerk.key_value_delete(f"ftrain/identity/{worker}")
        with contextlib.suppress(_jax.JaxRuntimeError):  # it never joined: nobody waits for it
            dead = self._clerk.key_value_try_get(f"ftrain/incarnation/{worker}")
            threading.Thread(
                target=self._release, args=(str(worker), int(dead)), daemon=True
            ).start()
        tasks = [self._workers + worker]
        if self._platform == "gpu":
            tasks.append(worker)  # its store: whoever is in a collective with it is let go by this
        clients = [self._client(task) for task in tasks]
        for client in clients:
            client.connect()
        if worker == 0:
            self._restore_topology()
        for client in clients:
            client.shutdown()

    def keep_topology(self, part: str, path: str) -> None:
        """Writes down what all workers have said of their devices, for the next service."""
        listed = map(self._clerk.key_value_dir_get_bytes, DEVICE_KEYS[self._platform])
        known = {key: base64.b64encode(value).decode() for rows in listed for key, value in rows}
        with contextlib.suppress(OSError):  # as after a head's end: another is there
            with open(part, "w", encoding="ascii") as file:
                json.dump({"workers": self._workers, "platform": self._platform, **known}, file)
            os.rename(part, path)

    def _use_topology(self, path: str) -> None:
        with open(path, encoding="ascii") as file:
            known = json.load(file)
        if (known.pop("workers"), known.pop("platform")) == (self._workers, self._platform):
            known[TOPOLOGY_COPY] = known[TOPOLOGY[self._platform]]
            for key, value in known.items():
                self._clerk.key_value_set_bytes(key, base64.b64decode(value))

    def _release(self, worker: str, dead: int) -> None:
        """Lets go of those who wait for a dead incarnation where no liveness barrier tells them.

        They may be meeting it in a settle, whose barrier would run into its deadline of seconds, or
        be connecting to it, for which gloo takes 30 s whatever it is told. Repeated for a while: a
        view with the dead one may have been answered just before the fence, and a member that comes
        to a failed barrier late begins a new instance of it.
        """
        for pause_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5):
            time.sleep(pause_s)
            for _, value in self._clerk.key_value_dir_get("ftrain/settling/"):
                settling = json.loads(value)
                name = settling["name"]
                if settling["incarnations"].get(worker) == dead:
                    self._clerk.key_value_set(
                        f"ftrain/view/{name}/failed", "1", allow_overwrite=True
                    )
                    threading.Thread(target=self._fail_barrier, args=(name,), daemon=True).start()

    def _fail_barrier(self, name: str) -> None:
        """Fails the settle of that name for all who wait in it or are yet to come.

        Calls of one barrier with different participants fail at once, for everybody (jaxlib 0.10.2
        and 0.12.0.1). The second participant here is a task that never comes, so it cannot pass.
        """
        ours, nobody = 2 * self._workers, 2 * self._workers + 1
        with contextlib.suppress(_jax.JaxRuntimeError):
            self._clerk.wait_at_barrier(f"ftrain/settle/{name}", 2000, [ours, nobody])

    def _restore_topology(self) -> None:
        """Process 0 may have died between taking the topology back and publishing it again.

        Others who make a client meanwhile would wait for it for ever.
        """
        with contextlib.suppress(_jax.JaxRuntimeError):  # not there: nobody has got so far
            copy = self._clerk.key_value_try_get_bytes(TOPOLOGY_COPY)
            self._clerk.key_value_set_bytes(TOPOLOGY[self._platform], copy, allow_overwrite=True)


def _free_address(host: str, port: int) -> str:
    """HOST:PORT that nobody listens on; an IPv6 address in brackets."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        free = probe.getsockname()[1]
    return f"[{host}]:{free}" if ":" in host else f"{host}:{free}"


def main(argv: list[str]) -> None:
    """`-m ftrain.coordinator CONTROL_FD WORKERS PLATFORM HEARTBEAT_S TOPOLOGY HOST PORT...`."""
    ignore_signals()
    ports = [int(port) for port in argv[6:]]
    coordinator = Coordinator(int(argv[1]), argv[2], float(argv[3]), argv[5], ports, argv[4])
    sys.stdout.write(f"ready {coordinator.address}\n")
    sys.stdout.flush()
    groups: set[int] = set()
    for line in os.fdopen(int(argv[0]), encoding="utf-8"):
        match line.split():
            case ["fence", worker]:
                coordinator.fence(int(worker))
                sys.stdout.write(f"fenced {worker}\n")
                sys.stdout.flush()
            case ["keep", *_]:
                coordinator.keep_topology(*json.loads(line.removeprefix("keep ")))
            case words:
                take_group(words, groups)
    end_groups(groups)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

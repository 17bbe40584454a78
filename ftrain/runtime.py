"""JAX as ftrain starts it: clients of the coordination service, backends, compilation cache.

This file and `membership`, `worker`, `coordinator` are the only ones that name JAX's distributed
internals. Each private name was checked on jax 0.10.2 and 0.12.0.1 (CPU); `versions` refuses
others.

Every worker holds two tasks of the coordination service. Its *store* task (id `i`, the number its
backend knows it by) is connected while the worker warms up and carries the key-value store:
backends and gloo need it. Its *member* task (id `workers + i`) is what the liveness barrier counts,
and is connected last, when the worker could call the barrier at once (rule R9): the others never
wait for a process that is still importing. (A client may not touch the store before it has
connected: the service ends the process. Seen on both.)

On GPU a backend names NCCL communicators by the incarnations of the store tasks, as its own client
last heard them from `get_live_nodes`, and cancels those in which one has changed (jax 0.11.2). So
there the store tasks of a view meet too (`meet_stores`), a failed attempt renews the worker's own
(`renew_store`), and the coordinator fences both.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import cache_key, distributed, xla_bridge
from jax._src.lib import _jax

from ftrain.errors import DatasetError

TOPOLOGY_PREFIX = {"cpu": "cpu:global_topology/", "gpu": "cuda:global_topology/"}
TOPOLOGY_KEY = {"cpu": "cpu:global_topology/cpu", "gpu": "cuda:global_topology/cuda"}
LOCAL_PREFIX = {"cpu": "cpu:local_topology/cpu/", "gpu": "cuda:local_topology/cuda/"}
TOPOLOGY_COPY = "ftrain/topology"
GLOO_PREFIX = "cpu:gloo/"
DAY_S = 24 * 3600

Client = Any  # jaxlib's DistributedRuntimeClient; the class has no public name


def make_client(address: str, task: int, *, heartbeat_timeout_s: float, owned: bool) -> Client:
    """A client of the coordination service at `address` for the task `task`, not yet connected.

    Args:
      address: host:port of the coordinator.
      task: the task's id, 0 .. 2 * workers - 1, see above.
      heartbeat_timeout_s: the service counts the task as gone after so long without a heartbeat.
      owned: whether `shutdown()` may be called. Workers pass False: their end must send nothing,
        since by then the id may belong to their replacement (rule R9).
    """
    return _jax.get_distributed_runtime_client(
        address,
        task,
        init_timeout=60,
        shutdown_timeout=2,
        heartbeat_timeout=max(1, int(heartbeat_timeout_s)),
        use_compression=False,
        shutdown_on_destruction=owned,
    )


class MemberClient:
    """A client whose task is `offset + worker`, for callers who speak of workers.

    All else is the client's own: JAX and Orbax use what `global_state.client` holds.
    """

    def __init__(self, client: Client, offset: int):
        self._client, self._offset = client, offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get_live_nodes(self, workers: Sequence[int]) -> dict[int, int]:
        """The liveness barrier: the incarnations of those of `workers` that are alive."""
        tasks = self._client.get_live_nodes([self._offset + w for w in workers])
        return {task - self._offset: incarnation for task, incarnation in tasks.items()}

    def wait_at_barrier(self, name: str, timeout_ms: int, workers: Sequence[int]) -> None:
        """The named barrier of `workers`."""
        self._client.wait_at_barrier(name, timeout_ms, [self._offset + w for w in workers])


class Runtime:
    """JAX's state in one worker process: its store client, its default backend, new CPU clients."""

    def __init__(
        self,
        *,
        address: str,
        worker: int,
        workers: int,
        platform: str,
        heartbeat_timeout_s: float,
        host: str,
    ):
        self.worker, self.workers, self.platform = worker, workers, platform
        self._host = host
        self._address, self._heartbeat_timeout_s = address, heartbeat_timeout_s
        jax.config.update("jax_enable_recoverability", True)
        if platform == "cpu":
            # None for the default backend: collectives are a view's, and gloo would listen on
            # whatever the machine's own name resolves to, or fail where it resolves to nothing.
            jax.config.update("jax_cpu_collectives_implementation", None)
            # Only the first start needs all workers; a slow data set of one must not fail the rest.
            jax.config.update("jax_cpu_get_local_topology_timeout_minutes", DAY_S // 60)
            jax.config.update("jax_cpu_get_global_topology_timeout_minutes", DAY_S // 60)
        self.cancels_by_incarnation = platform == "gpu"
        self.store = self._newest_store = self._connect(worker)

    def _connect(self, task: int) -> Client:
        client = make_client(
            self._address, task, heartbeat_timeout_s=self._heartbeat_timeout_s, owned=False
        )
        client.connect()
        return client

    def start_backend(self, opened: Callable[[], None] = lambda: None) -> None:
        """Opens the default backend: the worker's own devices, and the names of everybody's.

        Blocks until every worker of the run has got here once (the topology exchange).

        Args:
          opened: called, in a thread and while this blocks, once the own devices are open and only
            the others' are missing. Not where this worker was here before: it waits for nobody.
        """
        state = distributed.global_state
        state.client, state.process_id, state.num_processes = (
            self.store,
            self.worker,
            self.workers,
        )
        if self.worker == 0:
            # Process 0 publishes the topology and JAX does not overwrite: a restarted process 0
            # fails with ALREADY_EXISTS unless the old one is gone.
            self.store.key_value_delete(TOPOLOGY_PREFIX[self.platform])
        with self._telling(opened):
            jax.devices()
        if self.worker == 0 and self.workers > 1:
            self._copy_topology()

    @contextlib.contextmanager
    def _telling(self, opened: Callable[[], None]) -> Iterator[None]:
        """Calls `opened` once JAX has published this worker's devices; not after the block."""
        own = f"{LOCAL_PREFIX[self.platform]}{self.worker}"
        if self.workers == 1 or self._has(own):
            yield
            return
        telling, over = threading.Lock(), False

        def tell() -> None:
            try:
                self.store.blocking_key_value_get_bytes(own, DAY_S * 1000)
            except _jax.JaxRuntimeError:  # the service is gone, and this process ends too
                return
            with telling:
                if not over:
                    opened()

        threading.Thread(target=tell, name="devices", daemon=True).start()
        try:
            yield
        finally:
            with telling:
                over = True

    def _has(self, key: str) -> bool:
        try:
            self.store.key_value_try_get_bytes(key)
        except _jax.JaxRuntimeError:  # NOT_FOUND; if it is the service, the next call says so
            return False
        return True

    def _copy_topology(self) -> None:
        """Keeps the topology where the coordinator finds it when process 0 dies (see `fence`)."""
        value = self.store.blocking_key_value_get_bytes(TOPOLOGY_KEY[self.platform], 10_000)
        self.store.key_value_set_bytes(TOPOLOGY_COPY, value, allow_overwrite=True)

    def connect_member(self) -> MemberClient:
        """Registers this worker under its own id: a new incarnation, counted by the barrier."""
        return MemberClient(self._connect(self.workers + self.worker), self.workers)

    def renew_store(self) -> None:
        """A new incarnation of the store task: every backend cancels its collectives with it.

        The newest is kept for its heartbeats. Keys stay on the first, and so does the backend.
        """
        self._newest_store = self._connect(self.worker)

    def store_incarnation(self) -> int | None:
        """The store task's incarnation, as the others' backends know it.

        Not asked through the first client: its backend would take this for all that are alive.
        """
        return self._newest_store.get_live_nodes([self.worker]).get(self.worker)

    def meet_stores(self, workers: Sequence[int], *, for_backend: bool) -> dict[int, int]:
        """Waits until all `workers` have called this; returns their store tasks' incarnations.

        Has no deadline of its own.

        Args:
          workers: the members of a view.
          for_backend: whether this worker's collectives are to be with just these from now on; or
            the call only lets the others go.
        """
        client = self.store if for_backend else self._newest_store
        return dict(client.get_live_nodes(list(workers)))

    def use_member(self, client: MemberClient) -> None:
        """`live_devices` makes its calls through `client` from now on."""
        distributed.global_state.client = client

    def new_view_devices(self) -> list[jax.Device]:
        """Devices whose collectives start from nothing (rule R7), one per worker of the run, by id.

        On GPU, JAX keys communicators by incarnation and drops the old ones itself. On CPU a gloo
        group that failed once stays dead with the client it belongs to, so each view gets a fresh
        client, 10-60 ms. The default backend stays, so arrays made earlier remain usable.
        """
        if self.platform != "cpu":
            return jax.devices()
        if self.worker == 0:
            self.store.key_value_delete(TOPOLOGY_PREFIX["cpu"])
        member = distributed.global_state.client
        # The client to be made keeps this one for gloo's keys: the store client outlives them all.
        distributed.global_state.client = self.store
        try:
            # The address is given: the machine's own name may resolve to nothing, or to another.
            collectives = _jax.make_gloo_tcp_collectives(
                distributed_client=self.store, hostname=self._host
            )
            client = xla_bridge.make_cpu_client(collectives)
        finally:
            distributed.global_state.client = member
        return client.devices()

    @staticmethod
    def forget_view() -> None:
        """Lets go of the last view's devices. Call when nothing of ours refers to them any more.

        jax's caches hold meshes and compiled programs, and these the client with its sockets and
        threads: without this each view leaves some 6 descriptors and 10 threads behind (jax 0.10.2,
        0.12.0.1). Programs compiled ahead of time and held by their owner survive.
        """
        jax.clear_caches()
        gc.collect()


def use_compile_cache(folder: str | None) -> None:
    """Points JAX's compilation cache to `folder`, for programs of any size; None: off."""
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def shares_compile_cache() -> Iterator[None]:
    """Programs for this worker's own device, compiled inside, are every worker's in the cache.

    Two things of jax 0.10.2 to 0.12.0.1 are in the way. jax/_src/compiler.py `_cache_write` lets
    process 0 alone write, which here may be the one that is away: backends know their process
    already, so the number can be lent. And on CPU (not on GPU) jax/_src/cache_key.py puts the
    device's number into the key, in the options and in the topology's fingerprint, so that each
    worker would compile the same program for itself: 4 x 4.5 CPU-seconds at the digits' first
    start.
    """
    state = distributed.global_state
    mine, state.process_id = state.process_id, 0
    options, accelerators = (
        cache_key._hash_serialized_compile_options,
        cache_key._hash_accelerator_config,
    )
    if xla_bridge.get_backend().platform == "cpu":
        cache_key._hash_serialized_compile_options = lambda into, given, **_: options(
            into, given, strip_device_assignment=True
        )
        cache_key._hash_accelerator_config = lambda into, _: into.update(_processor())
    try:
        yield
    finally:
        state.process_id = mine
        cache_key._hash_serialized_compile_options = options
        cache_key._hash_accelerator_config = accelerators


def compile_shared(lowered: Any) -> Any:
    """Compiles a lowered program, or loads it, so that its cache entry serves every worker.

    A program over the workers of a view serves any view of as many: it says which rank gets what,
    and the ranks' devices are told when it is loaded.
    """
    with shares_compile_cache():
        return lowered.compile()


@functools.cache
def _processor() -> bytes:
    """What a program for the CPU depends on: its model and its instruction sets."""
    with open("/proc/cpuinfo", "rb") as file:
        first = file.read().split(b"\n\n")[0].splitlines()
    wanted = (b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(line for line in first if line.startswith(wanted))


def check_no_device_touched() -> None:
    """The data set must leave JAX's devices alone: they are not open yet."""
    if device_is_open():
        raise DatasetError(
            "__init__, dataset() or eval_dataset() used a JAX device (jnp arrays, "
            "jax.random, jax.devices()); make numpy arrays there"
        )


def device_is_open() -> bool:
    """Whether any JAX backend has been started."""
    return xla_bridge.backends_are_initialized()


def freeze_heap() -> None:
    """Takes what exists now out of the garbage collector's rounds; call when all is loaded.

    `forget_view` collects at every change of the set, and most of the heap is modules and traces
    that live as long as the process: 60-100 ms a collection without this.
    """
    gc.collect()
    gc.freeze()

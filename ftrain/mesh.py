"""The mesh of one view, and the collectives on it, of which the first is to sum flat buffers.

All that crosses workers is a flat buffer per device, `[workers, devices_per_worker, n]` on the axes
("worker", "device"), summed over "worker" only. With replicated parameters the device axis has size
one today; parameters sharded inside a worker would each travel with their own device. Only the
small program made here belongs to a view; the heavy ones hold no collective and survive it (rule
R10).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ftrain.errors import AttemptFailedError
from ftrain.lane import LeftBehindError
from ftrain.table import Table

if TYPE_CHECKING:
    from ftrain.communicators import Cutter

WATCH_LATE_S = 3.0
POLL_S = 0.005

Buffers = list[jax.Array]  # one flat buffer per dtype, each of shape (1, 1, n), on a local device


class Summing(NamedTuple):
    """A collective's result, which on GPU may be on its way still; all else is as `DataPlane.sum`.

    If `wait` raises, the buffers hold anything, and so does what was computed from them (rule R1).
    """

    buffers: Buffers
    wait: Callable[[], None] = lambda: None

    def result(self) -> Buffers:
        """The buffers, once they are there."""
        self.wait()
        return self.buffers


class DataPlane:
    """Sums over the workers of one view. Made new for every view, on the view's own devices.

    Args:
      devices: one of each member, in the order of `workers`.
      workers: the members' ids, ascending.
      me: this worker's.
      table: puts rows of bytes into the buffers of a step.
      compile: compiles a lowered program.
      cutter: runs the view's collectives; None for a view of one.
      end_connecting: called when connecting was left behind in another thread.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        workers: Sequence[int],
        me: int,
        table: Table,
        compile: Callable[[Any], Any],
        cutter: Cutter | None = None,
        end_connecting: Callable[[], None] = lambda: None,
    ):
        self._cutter, self._end_connecting = cutter, end_connecting
        self._ran: set[tuple] = set()  # the keys of the programs that have run in this view
        self.workers = list(workers)
        self.rank = self.workers.index(me)
        self._table, self._compile = table, compile
        self._home = jax.local_devices()[0]
        self._mesh = Mesh(np.array(devices).reshape(len(self.workers), -1), ("worker", "device"))
        self._sharding = NamedSharding(self._mesh, P("worker", "device"))
        self._on_home = SingleDeviceSharding(self._home)
        self._programs: dict[tuple, jax.stages.Compiled] = {}

    def connect(self) -> None:
        """Connects the members on GPU, where nothing that may fail may come before it.

        A member that waits in NCCL for one that never connects cannot be let go, and whatever its
        device is given later waits behind it (jax 0.11.2). gloo connects in the first sum, and can
        be let go.
        """
        if self._home.platform == "gpu":
            self.sum([jax.device_put(np.zeros((1, 1, 1), np.float32), self._home)])

    def gather(self, row: bytes, size: int) -> list[bytes]:
        """Every member's `row` of `size` bytes, by rank; zeros where a member gave b"".

        A collective, as `sum`, and it raises what that does.
        """
        summed = self.sum(self._table.put(row, self.rank * size))
        found = self._table.take(summed)
        rows = [found[rank * size : (rank + 1) * size] for rank in range(len(self.workers))]
        if rows[self.rank] != row.ljust(size, b"\0"):
            # A cancelled NCCL collective ends without an error, with garbage (jax 0.11.2).
            raise AttemptFailedError("this worker's own row did not come back from the collective")
        return rows

    def sum(self, buffers: Buffers) -> Buffers:
        """The sum of every member's `buffers`; same shapes and dtypes, on this worker's device.

        A collective: every member calls it with buffers of the same shapes. Waits for the result.

        Raises:
          AttemptFailedError: the collective failed or was cancelled; by whom is not known.
        """
        return self.begin_sum(buffers).result()

    def begin_sum(self, buffers: Buffers, ready: Callable[[], None] = lambda: None) -> Summing:
        """As `sum`; on GPU what comes next can be queued behind it, so that no gap is between them.

        Args:
          buffers: this worker's.
          ready: called once they are computed. From there on it is the others who are waited for;
            before it a hang is this worker's own.
        """
        if len(self.workers) == 1:
            return Summing(buffers)
        return self.begin(
            "sum", lambda parts: [jax.lax.psum(part, "worker") for part in parts], buffers, ready
        )

    def begin(
        self,
        name: Hashable,
        body: Callable[[Buffers], Buffers],
        buffers: Buffers,
        ready: Callable[[], None] = lambda: None,
    ) -> Summing:
        """What `body` makes of every member's `buffers`, on this worker's device.

        Args:
          name: of what `body` does in this view; compiled once for buffers of these shapes.
          body: from one member's buffers to its results, of shapes (1, 1, n) both. Traced in
            `shard_map` over the axes "worker" and "device".
          buffers: this worker's.
          ready: as for `begin_sum`.

        A collective, for two members or more, and it raises, as `begin_sum`. The first run of each
        is waited for: NCCL connects in it what that size needs, and meanwhile holds its caller.
        """
        with self._failing():
            joined = [self._joined(buffer) for buffer in buffers]
            key = (name, *((b.shape, b.dtype) for b in joined))
            program = self._program(key, body, joined)
            if key in self._ran and self._home.platform == "gpu":
                with self._cutter.cancellable():
                    summed = program(joined)
                wait = functools.partial(self._wait, joined, summed, ready)
                return Summing([self._own(array) for array in summed], wait)
            jax.block_until_ready(joined)
            ready()
            summed = self._run_in_lane(program, joined)
            self._ran.add(key)
        return Summing([self._own(array) for array in summed])

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Errors of gloo and NCCL are the attempt's."""
        try:
            yield
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            # gloo surfaces as ValueError from a jitted call, as JaxRuntimeError when a group cannot
            # be formed (jax 0.10.2 to 0.12.0.1). Running out of memory is this worker's own error.
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            raise AttemptFailedError(f"sum over workers {self.workers}: {error}") from error

    def _wait(
        self, joined: list[jax.Array], summed: list[jax.Array], ready: Callable[[], None]
    ) -> None:
        with self._failing():
            jax.block_until_ready(joined)
            ready()
            with self._cutter.cancellable():
                jax.block_until_ready(summed)

    def _joined(self, buffer: jax.Array) -> jax.Array:
        """This worker's part of an array over the view's devices."""
        shape = (len(self.workers), *buffer.shape[1:])
        if self._home.platform != "cpu":
            return jax.make_array_from_single_device_arrays(shape, self._sharding, [buffer])
        # The view has a client of its own, but of the same memory: a copy would be waste.
        own = np.asarray(buffer)
        return jax.make_array_from_callback(shape, self._sharding, lambda _: own)

    def _own(self, array: jax.Array) -> jax.Array:
        """This worker's part of an array over the view's devices, on its own."""
        part = array.addressable_data(0)
        if self._home.platform != "cpu":
            return part
        # What `device_put` does, which takes twice as long over it (jax 0.10.2, 0.12.0.1). The
        # memory is the view's client's: it may not outlive the step, or what moved the state (R7).
        own = np.asarray(part)
        return jax.make_array_from_callback(part.shape, self._on_home, lambda _: own)

    def _run_in_lane(
        self, program: jax.stages.Compiled, joined: list[jax.Array]
    ) -> list[jax.Array]:
        """Where the failure of the view ends it, or leaves it behind.

        The first one of a view connects the members. gloo waits in it 30 s for a member that dies
        meanwhile, whatever timeout it is told, with no connection yet that could be cut; NCCL for
        ever, and it is cancelled only once it is connected (jax 0.11.2). Later ones may hang too on
        CPU (see `lane`); on GPU they are cancelled or the process ends.
        """
        try:
            return self._cutter.run(lambda: self._run_known(program, joined))
        except LeftBehindError:
            if not self._ran:
                self._end_connecting()
            raise

    def _run_known(self, program: jax.stages.Compiled, joined: list[jax.Array]) -> list[jax.Array]:
        """Once this worker's backend knows the members as they are now.

        On GPU it names the communicators by the incarnations that it was told when the stores met,
        and looks these up in what it hears from a watch of its own, which may be late: then it
        calls a new incarnation stale (CheckCliqueIsntStale of XLA, jax 0.11.2). An attempt that
        failed for that would leave the others in NCCL, connecting, from where nothing lets them go.
        """
        deadline = time.monotonic() + WATCH_LATE_S
        while True:
            try:
                return self._run(program, joined)
            except jax.errors.JaxRuntimeError as error:
                late = "Incarnation id" in str(error) and "is stale" in str(error)
                if not late or self._cutter.failed.is_set() or time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    @staticmethod
    def _run(program: jax.stages.Compiled, joined: list[jax.Array]) -> list[jax.Array]:
        return jax.block_until_ready(program(joined))

    def _program(
        self, key: tuple, body: Callable[[Buffers], Buffers], buffers: Buffers
    ) -> jax.stages.Compiled:
        if key not in self._programs:
            spec = P("worker", "device")
            collected = jax.shard_map(body, mesh=self._mesh, in_specs=spec, out_specs=spec)
            self._programs[key] = self._compile(jax.jit(collected).lower(buffers))
        return self._programs[key]

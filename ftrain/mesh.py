"""The mesh of one view, and the one collective on it: sum flat buffers over the workers.

All that crosses workers is a flat buffer per device, `[workers, devices_per_worker, n]` on the axes
("worker", "device"), summed over "worker" only. With replicated parameters the device axis has size
one today; parameters sharded inside a worker would each travel with their own device. Only the small
program made here belongs to a view; the heavy ones hold no collective and survive it (rule R10).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ftrain.errors import AttemptFailedError

Buffers = list[jax.Array]  # one flat buffer per dtype, each of shape (1, 1, n), on a local device


class DataPlane:
    """Sums over the workers of one view. Made new for every view, on the view's own devices."""

    def __init__(self, devices: Sequence[jax.Device], workers: Sequence[int], me: int):
        self.workers = list(workers)
        self.rank = self.workers.index(me)
        self._home = jax.local_devices()[0]
        self._mesh = Mesh(np.array(devices).reshape(len(self.workers), -1), ("worker", "device"))
        self._device = next(d for d in self._mesh.devices[self.rank])
        self._programs: dict[tuple, jax.stages.Compiled] = {}

    def sum(self, buffers: Buffers) -> Buffers:
        """The sum of every member's `buffers`; same shapes and dtypes, on this worker's device.

        A collective: every member calls it with buffers of the same shapes. Waits for the result.

        Raises:
          AttemptFailedError: the collective failed or was cancelled; by whom is not known.
        """
        if len(self.workers) == 1:
            return buffers
        try:
            sharding = NamedSharding(self._mesh, P("worker", "device"))
            shards = [jax.device_put(b, self._device) for b in buffers]
            joined = [
                jax.make_array_from_single_device_arrays(
                    (len(self.workers), *b.shape[1:]), sharding, [b]) for b in shards]
            summed = jax.block_until_ready(self._program(joined)(joined))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            # gloo surfaces as ValueError from a jitted call, as JaxRuntimeError when a group cannot
            # be formed (jax 0.10.2 to 0.12.0.1). Running out of memory is this worker's own error.
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            raise AttemptFailedError(f"sum over workers {self.workers}: {error}") from error
        return [jax.device_put(s.addressable_shards[0].data, self._home) for s in summed]

    def _program(self, buffers: Buffers) -> jax.stages.Compiled:
        shapes = tuple((b.shape, b.dtype) for b in buffers)
        if shapes not in self._programs:
            summed = jax.shard_map(
                lambda parts: [jax.lax.psum(part, "worker") for part in parts],
                mesh=self._mesh, in_specs=P("worker", "device"), out_specs=P(None, "device"))
            self._programs[shapes] = jax.jit(summed).lower(buffers).compile()
        return self._programs[shapes]

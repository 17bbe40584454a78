"""What each member tells all others in one sum: a row of bytes in the buffers of a step.

The bytes travel as numbers in the float32 buffer, which are exact there, so that no program with a
collective is needed but the step's (rule R10). The buffers, which may be large, are made on the
device and only the table leaves it: by way of the host, 100 M parameters cost 0.6 s a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Table:
    """The programs that put a table into the buffers of a step and take it out; made once.

    Args:
      shapes: of the buffers that a step sums; one of them is float32.
      size: bytes of the table; that buffer has room for as many numbers.
    """

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct], size: int):
        self._shapes, self.size = list(shapes), size
        self._which = next(i for i, s in enumerate(shapes) if s.dtype == jnp.float32)

    def lower(self) -> None:
        """Traces the programs."""
        table = jax.ShapeDtypeStruct((self.size,), jnp.uint8)
        self._lowered = [
            jax.jit(self._put).lower(table),
            jax.jit(self._take).lower(self._shapes[self._which]),
        ]

    def compile(self, compile: Callable[[Any], Any]) -> None:
        """Compiles what `lower` traced, or loads it from the compilation cache."""
        self._putting, self._taking = map(compile, self._lowered)
        del self._lowered

    def put(self, row: bytes, start: int) -> list[jax.Array]:
        """Buffers with `row` at byte `start` of the table and zeros elsewhere."""
        table = np.zeros(self.size, np.uint8)
        table[start : start + len(row)] = np.frombuffer(row, np.uint8)
        return self._putting(table)

    def take(self, buffers: Sequence[jax.Array]) -> bytes:
        """The table that summed buffers hold."""
        return np.asarray(self._taking(buffers[self._which])).tobytes()

    def _put(self, table: jax.Array) -> list[jax.Array]:
        buffers = [jnp.zeros(s.shape, s.dtype) for s in self._shapes]
        numbers = table.astype(jnp.float32).reshape(1, 1, -1)
        buffers[self._which] = buffers[self._which].at[:, :, : self.size].set(numbers)
        return buffers

    def _take(self, buffer: jax.Array) -> jax.Array:
        return buffer[0, 0, : self.size].astype(jnp.uint8)

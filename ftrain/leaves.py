"""What may be a leaf of the state: arrays whose every bit can be sent, saved and brought back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.errors import TrainerError

INT32 = range(-(2**31), 2**31)
SHOWN = 60  # characters of a value
# All that JAX computes with, but for types of less than a byte: among other leaves a program may
# want them packed, which no array on the device is, and then fails (jax 0.10.2 to 0.12.0.1).
CARRIED = frozenset(
    """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64
    bfloat16 float16 float32 float64 complex64 complex128
    float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2
    float8_e5m2fnuz float8_e8m0fnu
""".split()
)


def check_leaves(where: str, name: str, tree: Any) -> None:
    """Checks what user code returned as a part of the state, before JAX converts any of it.

    Args:
      where: the method that returned it.
      name: of that part, as paths begin.
      tree: its leaves may be traced.

    Raises:
      TrainerError: a leaf cannot be carried; names it.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        problem = _problem(leaf)
        if problem:
            raise TrainerError(f"{where}: {name}{jax.tree_util.keystr(path)} is {problem}")


def _problem(leaf: Any) -> str:
    """What keeps `leaf` from being carried, and what to do; "" if nothing does."""
    if isinstance(leaf, bool | float | complex):
        return ""
    if isinstance(leaf, int):
        is_carried = leaf in INT32 or jax.config.jax_enable_x64
        return "" if is_carried else f"{leaf}, beyond int32; make it smaller, or set JAX_ENABLE_X64"
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        value = repr(leaf)
        shown = value if len(value) <= SHOWN else value[:SHOWN] + "..."
        return (
            f"a {type(leaf).__name__}, {shown}; leaves are arrays and numbers: keep it in the "
            "trainer (self), or register its class as a pytree"
        )
    dtype = leaf.dtype
    if not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return ""
    if dtype.name not in CARRIED:
        return f"of dtype {dtype.name}, which cannot be sent and saved; use a wider one"
    if dtype.name in ("int64", "uint64") and not jax.config.jax_enable_x64:
        # float64 becomes float32 as everywhere in JAX; an integer would lose its upper half.
        return (
            f"{dtype.name}, which JAX would cut to 32 bits; make it 32 bits or set JAX_ENABLE_X64"
        )
    return ""

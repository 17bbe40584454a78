"""Trees, dtypes and bits that are easily changed on their way. Importing this opens no device."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    """A dataclass of the user's."""

    a: Any
    b: Any


@flax.struct.dataclass
class Struct:
    """flax's, with a field that is no leaf."""

    a: Any
    name: str = flax.struct.field(pytree_node=False, default="x")


class Pair(NamedTuple):
    """A tree node of the user's own."""

    x: Any
    y: Any


def dtype_of(name: str) -> np.dtype:
    return jnp.dtype(name)


def of_bits(name: str, data: bytes, shape: tuple[int, ...] = (-1,)) -> np.ndarray:
    """An array that holds exactly these bits; of booleans the lowest."""
    if name == "bool":
        return (np.frombuffer(data, np.uint8) % 2).astype(bool).reshape(shape)
    return np.frombuffer(data, np.uint8).view(dtype_of(name)).reshape(shape)


def every_dtype(names: list[str]) -> dict[str, Any]:
    """All 256 bytes in every dtype: zeros of both signs, infinities, subnormals, NaN payloads."""
    data = bytes(range(256)) + bytes(range(255, -1, -1))
    tree: dict[str, Any] = {name: jnp.asarray(of_bits(name, data)) for name in names}
    tree["scalars"] = [jnp.asarray(of_bits(n, data[:16])[0]) for n in names]
    tree["empty"] = [jnp.zeros((0,), n) for n in names]
    return tree


def odd_floats() -> dict[str, Any]:
    """Values that arithmetic does not keep, by their bits."""
    return {
        "float32": jnp.asarray(
            np.array(
                [0x80000000, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0x7FC12345, 0xFFB12345],
                np.uint32,
            ).view(np.float32)
        ),
        "bfloat16": jnp.asarray(
            np.array([0x8000, 0x7F80, 0xFF80, 1, 0x7FC1, 0xFFA1], np.uint16).view(
                ml_dtypes.bfloat16
            )
        ),
        "large": jnp.asarray(np.arange(40_000, dtype=np.uint32).view(np.float32)),
        "counts": [jnp.int32(16777217), jnp.uint32(4294967295), jnp.int32(-(2**31))],
    }


def keys() -> dict[str, Any]:
    """Typed keys of each implementation, one and a batch, and an old key."""
    return {
        "old": jax.random.PRNGKey(3),
        **{impl: jax.random.key(7, impl=impl) for impl in KEY_IMPLS},
        **{
            f"{i}s": jax.random.split(jax.random.key(8, impl=i), 6).reshape(2, 3) for i in KEY_IMPLS
        },
    }


def nodes() -> dict[str, Any]:
    """Every kind of tree node, empty ones among them."""
    one, two = jnp.float32(-0.0), jnp.arange(3)
    return {
        "none": None,
        "tuple": (),
        "dict": {},
        "list": [],
        "int keys": {3: one, 1: two, 2: {0: one}},
        "mixed": [(one, [two, None]), {"a": ({"b": [one]},)}],
        "ordered": collections.OrderedDict(b=one, a=two),
        "default": collections.defaultdict(list, {"a": one}),
        "namedtuple": Pair(Pair(one, None), two),
        "dataclass": Registered({"x": one}, ()),
        "struct": Struct((one, two), name="y"),
        "frozen": flax.core.freeze({"a": {"b": one}, "c": two}),
        "partial": jax.tree_util.Partial(max, one),
    }

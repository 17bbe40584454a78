"""The committed state: the user's trees, and the flat form in which it is kept, sent and saved.

Programs take and return flat lists of leaves; the user's trees are rebuilt inside the innermost
trace. flax.nnx refuses variables that were born outside it, and 26 leaves cost 12 us a call where
an nnx tree costs 300 us.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Loss(NamedTuple):
    """What `Trainer.loss` may return.

    Attributes:
      value: the shard's mean loss, a float scalar.
      metrics: {name: float scalar}, averaged over shards with the same weight.
      weight: what `value` is a mean over: None for the samples of the shard; for token masks,
        `mask.sum()`.
      model_state: the changed model state, same tree as `init_params` gave; None for unchanged.
    """

    value: Any
    metrics: dict[str, Any] = {}
    weight: Any = None
    model_state: Any = None


class Init(NamedTuple):
    """Parameters with model state, from `init_params`. A type of its own: a tuple may be a tree."""

    params: Any
    model_state: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that must survive a step, as user code sees it.

    Attributes:
      step: int32, committed steps; in `update` the number of steps before this one, 0 in the first.
      cursor: samples consumed; int64 on the host, int32 (modulo 2**31) inside `update`.
      params: the parameter tree.
      opt_state: optax's state.
      model_state: what `init_params` gave beside the parameters, or None.
    """

    step: Any
    cursor: Any
    params: Any
    opt_state: Any
    model_state: Any

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


class Committed(NamedTuple):
    """The state between steps: two integers and flat leaves on this worker's device."""

    step: int
    cursor: int  # samples consumed; a Python integer, so never out of range
    leaves: list[jax.Array]  # params, then opt_state, then model_state, see StateSpec


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """The shape of the state: trees, paths, dtypes. Equal on every worker, or they may not meet."""

    treedefs: tuple[Any, Any, Any]  # of params, opt_state, model_state
    paths: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @functools.cached_property
    def counts(self) -> tuple[int, int, int]:
        """The number of leaves of params, opt_state and model_state."""
        return tuple(t.num_leaves for t in self.treedefs)  # type: ignore[return-value]

    def split(self, leaves: Sequence[Any]) -> tuple[list, list, list]:
        """Cuts a flat list into those of params, opt_state and model_state."""
        n_params, n_opt, _ = self.counts
        leaves = list(leaves)
        return (leaves[:n_params], leaves[n_params : n_params + n_opt], leaves[n_params + n_opt :])

    def trees(self, leaves: Sequence[Any]) -> tuple[Any, Any, Any]:
        """The user's three trees."""
        return tuple(  # type: ignore[return-value]
            jax.tree.unflatten(t, part)
            for t, part in zip(self.treedefs, self.split(leaves), strict=True)
        )

    def train_state(self, step: Any, cursor: Any, leaves: Sequence[Any]) -> TrainState:
        """What user code is given."""
        return TrainState(step, cursor, *self.trees(leaves))

    def lines(self) -> list[str]:
        """One line a leaf, for messages: `params['w']: float32[3]`."""
        return list(self._lines)

    @functools.cached_property
    def _lines(self) -> list[str]:
        return [
            f"{path}: {describe(leaf)}" for path, leaf in zip(self.paths, self.leaves, strict=True)
        ]

    @functools.cached_property
    def host_shapes(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each leaf in the form `to_host` gives."""
        return [host_shape(leaf) for leaf in self.leaves]

    def fingerprint(self) -> str:
        """Equal exactly if paths, dtypes and shapes are."""
        return fingerprint_of(self.lines())


def spec_of(params: Any, opt_state: Any, model_state: Any) -> StateSpec:
    """The spec of three trees of arrays or of their shapes. Weak types are made strong."""
    paths, leaves, treedefs = [], [], []
    for name, tree in (("params", params), ("opt_state", opt_state), ("model_state", model_state)):
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        treedefs.append(treedef)
        for path, leaf in flat:
            paths.append(name + jax.tree_util.keystr(path))
            leaves.append(
                jax.ShapeDtypeStruct(
                    jnp.shape(leaf),
                    jnp.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype,
                )
            )
    return StateSpec(tuple(treedefs), tuple(paths), tuple(leaves))


def fingerprint_of(lines: Sequence[str]) -> str:
    """`StateSpec.fingerprint`, from its `lines`."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def describe(leaf: Any) -> str:
    """`float32[3,4]`, the way JAX writes it."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def is_key(leaf: Any) -> bool:
    """Whether the leaf holds typed PRNG keys, which are no plain arrays."""
    dtype = leaf.dtype
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def to_host(leaves: Sequence[jax.Array]) -> list[np.ndarray]:
    """The bits of each leaf as a numpy array; PRNG keys as their uint32 words."""
    words = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
    for leaf in words:
        if isinstance(leaf, jax.Array) and leaf.device.platform != "cpu":
            leaf.copy_to_host_async()  # all at once: one after the other a GPU gave 1.2 GB a second
    return [np.asarray(leaf) for leaf in words]


def from_host(spec: StateSpec, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
    """The leaves of a state that `to_host` gave, on this worker's device."""
    return leaves_from_host(spec.leaves, arrays)


def leaves_from_host(
    wanted: Sequence[jax.ShapeDtypeStruct], arrays: Sequence[np.ndarray]
) -> list[jax.Array]:
    """Leaves of those shapes, from what `to_host` gave, on this worker's device."""
    # In one call: thousands of small leaves would cost 0.1 ms each.
    leaves = jax.device_put(list(arrays), jax.local_devices()[0])
    return [
        jax.random.wrap_key_data(leaf, impl=key_impl(like)) if is_key(like) else leaf
        for like, leaf in zip(wanted, leaves, strict=True)
    ]


def key_impl(leaf: Any) -> str:
    """The name of a typed key's implementation, as `jax.random.key(impl=...)` takes it."""
    return str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else leaf.dtype._impl.name


def host_shape(leaf: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a leaf in the form `to_host` gives."""
    if is_key(leaf):
        words = leaf.dtype._impl.key_shape
        return (*leaf.shape, *words), np.dtype(np.uint32)
    return leaf.shape, np.dtype(leaf.dtype)


def host_bytes(spec: StateSpec) -> int:
    """The size of the state."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in spec.host_shapes)


def join_bytes(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """The bytes of arrays on the host, one after the other."""
    flat = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
    return np.concatenate([*flat, np.zeros(0, np.uint8)])


def cut_bytes(
    data: np.ndarray, shapes: Iterable[tuple[Sequence[int], np.dtype]]
) -> list[np.ndarray]:
    """The arrays of those shapes and dtypes whose bytes `join_bytes` gave."""
    arrays, start = [], 0
    for shape, dtype in shapes:
        size = math.prod(shape) * dtype.itemsize
        # A copy: aligned, and it does not keep the others alive.
        arrays.append(data[start : start + size].copy().view(dtype).reshape(shape))
        start += size
    return arrays

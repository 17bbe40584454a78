"""The state of a trainer: its spec, from shapes alone, and the first one (step 0)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.errors import TrainerError
from ftrain.leaves import check_leaves
from ftrain.state import Committed, Init, StateSpec, describe, from_host, spec_of, to_host


def state_spec(trainer: Any, seed: int) -> StateSpec:
    """The spec of the trainer's state, from shapes alone. Sets `trainer.tx`."""

    def init_params() -> Init:
        init = as_init(trainer.init_params(jax.random.key(seed)))
        check_leaves("init_params", "params", init.params)
        check_leaves("init_params", "model_state", init.model_state)
        return init

    def init_optimizer(params: Any) -> Any:
        opt_state = trainer.tx.init(params)
        check_leaves("optimizer", "opt_state", opt_state)
        return opt_state

    init = jax.eval_shape(init_params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(init.params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TrainerError(
                f"init_params: params{jax.tree_util.keystr(path)} is "
                f"{describe(leaf)}; parameters are floating, put other leaves into "
                "model_state: ftrain.Init(params, model_state)"
            )
    return spec_of(init.params, jax.eval_shape(init_optimizer, init.params), init.model_state)


def as_init(out: Any) -> Init:
    """What `init_params` returned, as an Init."""
    return out if isinstance(out, Init) else Init(out)


def initial_state(trainer: Any, spec: StateSpec, seed: int) -> Committed:
    """Step 0, computed from the seed. For the first donor alone: the others only need shapes."""

    def init() -> list[jax.Array]:
        params, model_state = as_init(trainer.init_params(jax.random.key(seed)))
        return jax.tree.leaves((params, trainer.tx.init(params), model_state))

    # Over the host and back: that makes weak types strong, as programs and rejoiners have them.
    return Committed(0, 0, from_host(spec, to_host(jax.jit(init)())))


def state_with(trainer: Any, spec: StateSpec, arrays: list[np.ndarray]) -> Committed:
    """Step 0 with other parameters and model state; the optimizer's state is computed from them.

    Args:
      trainer: with its `tx`.
      spec: the state's.
      arrays: all leaves, as `to_host` gives them; those of the optimizer are not used.
    """

    def init(leaves: list[jax.Array]) -> list[jax.Array]:
        return jax.tree.leaves(trainer.tx.init(jax.tree.unflatten(spec.treedefs[0], leaves)))

    params, _, model_state = spec.split(arrays)
    given, _, _ = spec.split(from_host(spec, arrays))
    return Committed(0, 0, from_host(spec, [*params, *to_host(jax.jit(init)(given)), *model_state]))

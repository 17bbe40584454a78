"""The Trainer that users subclass. The loop that trains it is in `loop`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optax

from ftrain.state import Init, Loss, TrainState

if TYPE_CHECKING:
    import jax

    from ftrain.config import Config
    from ftrain.data import Dataset

Metrics = dict[str, Any]


class Trainer:
    """Subclass it, and `ftrain run` trains it on workers that may die.

    Attributes:
      config: the resolved config, read-only; there before `__init__` runs. With `epochs: N` its
        `steps` is None until `dataset()` has been opened, and from `init_params` and `optimizer()`
        on the number of steps that N epochs are.
      tx: what `optimizer()` returned; it is called once a process.
    """

    config: Config
    tx: optax.GradientTransformation

    def dataset(self) -> Dataset:
        """The training data: a dict of arrays, an object with len() and [i], a grain.MapDataset.

        Opened in each worker, before the first device is touched.
        """
        raise TypeError(f"{type(self).__name__} must define dataset(self)")

    def init_params(self, key: jax.Array) -> Any | Init:
        """Parameters, floating leaves only, or `Init(params, model_state)`.

        Leaves of the model state, as of the optimizer's, are numbers and arrays of any type of
        a byte or more, and typed keys; Python numbers get JAX's strong default type, and 64-bit
        integers need JAX_ENABLE_X64. Anything else is refused with its path.

        Traced: for its shapes in every incarnation, for its values in the first donor alone.
        """
        raise TypeError(f"{type(self).__name__} must define init_params(self, key)")

    def loss(self, params: Any, batch: Any, key: jax.Array, *model_state: Any) -> Any | Loss:
        """Mean loss of one shard: a float scalar, `(scalar, metrics)`, or a `Loss`.

        Traced; pure. `batch` is the sample's tree with a leading axis of
        `batch_size / batch_shards`, or in one shard of the last step of `epochs: N` a shorter one;
        `key` is a function of (seed, step, shard); the model state is
        passed exactly when `init_params` returned one.
        """
        raise TypeError(f"{type(self).__name__} must define loss(self, params, batch, key)")

    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer; may read `self.config.steps` for a schedule, with `epochs: N` too.

        A run that ended with a smaller batch and is made longer takes a step more than that.
        """
        return optax.adamw(1e-3)

    def update(self, state: TrainState, grads: Any) -> TrainState | tuple[TrainState, Metrics]:
        """The next state from the global mean gradient. Traced; local; no collective."""
        updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
        return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    def eval_dataset(self) -> Dataset | None:
        """Held-out data, in the forms of `dataset`; every sample is used once an evaluation."""
        return None

    def evaluate(self, state: TrainState, batch: Any) -> Metrics | tuple[Metrics, Any]:
        """Means over one shard of held-out samples, and their weight if it is not their number.

        Traced; pure; no key: run the model in inference mode.
        """
        raise TypeError(
            f"{type(self).__name__} has eval_dataset() and must define evaluate(self, state, batch)"
        )

    def after_commit(self, step: int, metrics: dict[str, float], state: TrainState) -> None:
        """Reporting hook, on the lowest worker that committed; the others wait for it.

        In order, at most once a step: a death between commit and hook skips it, and of steps that
        are committed together (`steps_per_commit`) it sees the last. Beside its numbers
        `metrics` has `nonfinite`, a list, if the step was skipped for that (`on_nonfinite: skip`).

        What it changes on the trainer changes nothing that is trained: `loss`, `update` and the
        optimizer were traced before, and other workers would not have the change. What shall vary
        while training belongs into the state: a schedule, `optax.inject_hyperparams`, `update`.
        """

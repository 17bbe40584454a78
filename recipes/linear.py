"""A line through points: the smallest trainer, and the file to read first.

    ftrain run configs/linear.yaml      about 5 seconds on 2 cores, w = 3 and b = 1 to 1e-3

A trainer says what the data is, how parameters begin, and what the loss of a batch is. Which worker
computes what, who is alive, and what happens when one dies is not its business.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ftrain


class LinearTrainer(ftrain.Trainer):
    """Fits y = w x + b to 960 points of y = 3 x + 1, by gradient descent."""

    def __init__(self, *, points: int = 960, learning_rate: float = 0.1):
        self.points, self.learning_rate = points, learning_rate

    def dataset(self) -> dict[str, np.ndarray]:
        x = np.linspace(-1, 1, self.points, dtype=np.float32)
        return {"x": x, "y": 3 * x + 1}

    def init_params(self, key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jnp.zeros(()), "b": jnp.zeros(())}

    def loss(self, params: dict, batch: dict, key: jax.Array) -> jax.Array:
        prediction = params["w"] * batch["x"] + params["b"]
        return jnp.mean((prediction - batch["y"]) ** 2)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(self.learning_rate)

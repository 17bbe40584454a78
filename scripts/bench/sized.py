"""A multilayer perceptron on made-up data: steps of any length, by the size of the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ftrain


class Sized(ftrain.Trainer):
    """Classifies random vectors. `width` sets the size of the model, and of what is summed."""

    def __init__(self, *, width: int = 256, layers: int = 2, features: int = 64):
        self.sizes = [features, *[width] * layers, 10]

    def dataset(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        inputs = random.standard_normal((4096, self.sizes[0]), dtype=np.float32)
        return {"x": inputs, "label": random.integers(10, size=4096, dtype=np.int32)}

    def init_params(self, key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(self.sizes) - 1)
        shapes = zip(self.sizes, self.sizes[1:], strict=False)
        return [jax.random.normal(k, s) * s[0] ** -0.5 for k, s in zip(keys, shapes, strict=True)]

    def loss(self, params: list[jax.Array], batch: dict, key: jax.Array) -> jax.Array:
        x = batch["x"]
        for matrix in params[:-1]:
            x = jax.nn.relu(x @ matrix)
        logits = x @ params[-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses)

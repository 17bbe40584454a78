"""The digits recipe with a wider network, for longer steps."""

from __future__ import annotations

import jax
from flax import nnx

import ftrain
from recipes.digits import CNN, DigitsTrainer


class WideCNN(CNN):
    def __init__(self, rngs: nnx.Rngs, width: int):
        super().__init__(rngs)
        self.conv1 = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, 2 * width, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * width, rngs=rngs)
        self.out = nnx.Linear(2 * 2 * 2 * width, 10, rngs=rngs)


class WideTrainer(DigitsTrainer):
    def __init__(self, *, width: int = 64, **options):
        super().__init__(**options)
        self.width = width

    def init_params(self, key: jax.Array) -> ftrain.Init:
        self.graph, params, model_state = nnx.split(
            WideCNN(nnx.Rngs(key), self.width), nnx.Param, ...
        )
        return ftrain.Init(params, model_state)

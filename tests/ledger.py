"""Trainers that count: each sample's uses are parameters, so the run's own state is the ledger."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ftrain
from ftrain.chaos.orders import obey_at_phases
from tests.trainers import Mixed

LENGTH = 1003


class Indices:
    """Its samples are their own numbers; a batch takes `pause_s` to read."""

    def __init__(self, pause_s: float):
        self.pause_s = pause_s

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict:
        return {"index": np.int32(index)}

    def batch_at(self, indices: np.ndarray) -> dict:
        time.sleep(self.pause_s)
        return {"index": indices.astype(np.int32)}


class Ledger(ftrain.Trainer):
    """A step adds 1, exactly, to the parameter of each sample that it used, and its loss is 1.

    The gradient is that of a mean: it is 1 / n for a sample of n, and times n it is 1 only if n
    samples were in the mean. The optimizer counts its steps. Takes orders
    (`ftrain.chaos.orders`).
    """

    def __init__(self, *, pause_s: float = 0.0):
        self.pause_s = pause_s
        obey_at_phases()

    def dataset(self) -> Indices:
        return Indices(self.pause_s)

    def init_params(self, key: jax.Array) -> dict:
        return {"uses": jnp.zeros(LENGTH)}

    def loss(self, params: dict, batch: dict, key: jax.Array) -> Any:
        mean = params["uses"][batch["index"]].mean()
        return 1 - (mean - jax.lax.stop_gradient(mean))

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(optax.constant_schedule(1.0))

    def update(self, state: ftrain.TrainState, grads: Any) -> Any:
        end = 2**30 if self.config.epochs is None else self.config.epochs * LENGTH
        samples = jnp.minimum(self.config.batch_size, end - state.cursor).astype(jnp.float32)
        grads = jax.tree.map(lambda g: g * samples, grads)
        count = optax.tree_utils.tree_get(state.opt_state, "count")
        return super().update(state, grads), {"count": count.astype(jnp.float32)}

    def after_commit(self, step: int, metrics: dict, state: ftrain.TrainState) -> None:
        uses = np.asarray(state.params["uses"])
        row = {
            "step": step,
            "cursor": int(state.cursor),
            "least": float(uses.min()),
            "most": float(uses.max()),
            "sum": float(uses.sum()),
            "count": int(optax.tree_utils.tree_get(state.opt_state, "count")),
        }
        with open(Path(os.environ["FTRAIN_RUN_DIR"]) / "ledger.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")


class Weighted(Ledger):
    """A constant loss with the weights of masks, and the mean index of the samples that count."""

    def loss(self, params: dict, batch: dict, key: jax.Array) -> Any:
        mask = batch["index"] % 3
        mean = (mask * batch["index"]).sum() / mask.sum()
        value = 1 + 0 * params["uses"].sum()
        return ftrain.Loss(value, {"index": mean.astype(jnp.float32)}, mask.sum())


class MixedOrdered(Mixed):
    """`Mixed`, and takes orders."""

    def __init__(self, *, pause_s: float = 0.0):
        super().__init__(pause_s=pause_s)
        obey_at_phases()

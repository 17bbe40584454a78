"""A state of odd trees, dtypes and bits, in real runs: a rejoin, a checkpoint, another dtype."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ftrain
from ftrain.state import to_host
from tests.odd_trees import every_dtype, keys, nodes, odd_floats
from tests.runs import ENDLESS, running
from tests.trainers import Paced

TRAINER = "trainer=tests/test_odd_state.py:Odd"


class Odd(Paced):
    """Holds what is easily changed on its way, and looks at it after every commit.

    `count_dtype` is of a counter that float32 cannot hold.
    """

    def __init__(self, *, pause_s: float = 0.0, count_dtype: str = "int32"):
        super().__init__(pause_s=pause_s)
        self.count_dtype, self.seen = count_dtype, False

    def odd(self):
        return {
            "counts": {
                "int": jnp.asarray(16777217, self.count_dtype),
                "uint": jnp.uint32(2**32 - 1),
            },
            "dtypes": every_dtype(["bool", "int8", "bfloat16", "float16", "float32", "complex64"]),
            "floats": odd_floats(),
            "keys": keys(),
            "nodes": nodes(),
        }

    def init_params(self, key):
        params, state = super().init_params(key)
        return ftrain.Init({**params, "frozen": jnp.ones(3)}, {**state, "odd": self.odd()})

    def optimizer(self):
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.masked(optax.adamw(0.01), {"w": True, "frozen": False}),
            optax.scale_by_schedule(lambda count: 1.0 / (1 + count)),
        )

    def after_commit(self, step, metrics, state):
        if not self.seen:
            got, wanted = state.model_state["odd"], self.odd()
            assert jax.tree.structure(got) == jax.tree.structure(wanted)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
            here, there = (to_host(jax.tree.leaves(t)) for t in (got, wanted))
            assert [x.tobytes() for x in here] == [x.tobytes() for x in there]
            assert int(state.opt_state[2].count) == int(state.step) == step
            self.seen = True
            print(f"all bits as they were, in incarnation {os.environ['FTRAIN_INCARNATION']}")


@pytest.mark.slow
def test_an_odd_state_is_the_same_after_a_rejoin_and_from_a_checkpoint(tmp_path):
    """Treedef, dtypes and bits, as the worker sees them that got them; another dtype is refused."""
    sets = [TRAINER, "cluster.workers=2"]
    with running("tests/paced.yaml", tmp_path / "run", *sets, ENDLESS) as run:
        run.wait_for_step(5)
        run.kill(0)
        run.wait_until("the rejoiner's look", lambda: "in incarnation 1" in run.output)
        run.stop()
        assert run.events("state_synced", "checkpoint_restored")[-1]["donor"] == 1
        step = run.metrics()[-1]["step"]
    kept = ftrain.load_state(tmp_path / "run").model_state["odd"]
    assert kept["counts"] == {"int": np.int32(16777217), "uint": np.uint32(2**32 - 1)}
    with running("tests/paced.yaml", tmp_path / "run", *sets, f"steps={step + 20}") as run:
        assert run.finish() == 0
        assert "all bits as they were, in incarnation 0" in run.output
    wrong = "trainer_args={count_dtype: float32}"
    with running("tests/paced.yaml", tmp_path / "run", *sets, wrong, ENDLESS) as run:
        assert run.finish() == 2
        assert "counts" in run.output and "int32" in run.output and "float32" in run.output

"""Each recipe trains: its data opens without a device, its programs trace, its loss goes down.

The steps are driven by hand through the worker's own programs, in one process: the sums of a single
worker are its buffers. What workers and faults add is tested elsewhere.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftrain.config import load_config
from ftrain.data import ShardReader, Source
from ftrain.initial import initial_state
from ftrain.preparing import trace
from ftrain.user_code import load_trainer
from recipes import chars, digits

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = {  # what is set so that 20 steps take a second or two
    "linear": (),
    "digits": (),
    "chars": ("steps=20", "batch_size=12", "trainer_args={width: 32, layers: 1, length: 32}"),
}
OPEN_ALL = """
import sys
from ftrain.config import load_config
from ftrain.data import Source
from ftrain.user_code import load_trainer
from ftrain.runtime import check_no_device_touched

for name in sys.argv[1:]:
    config = load_config(f"configs/{name}.yaml")
    trainer = load_trainer(config.trainer, ".", config.trainer_args, config)
    for data in trainer.dataset(), trainer.eval_dataset():
        if data is not None:
            Source(data, name)
    check_no_device_touched()
sys.exit("sklearn was imported" if "sklearn" in sys.modules else 0)
"""


def compile_now(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    return lowered.compile()


class OneWorker:
    """A data plane of one worker."""

    rank, workers = 0, [0]

    @staticmethod
    def sum(buffers: list) -> list:
        return buffers


class Driven:
    """A recipe in training, one step a call."""

    def __init__(self, name: str, *sets: str):
        self.config = load_config(REPOSITORY / f"configs/{name}.yaml", sets)
        self.trainer = load_trainer(
            self.config.trainer, str(REPOSITORY), self.config.trainer_args, self.config
        )
        self.source = Source(self.trainer.dataset(), "dataset()")
        held_out = self.trainer.eval_dataset()
        self.held_out = None if held_out is None else Source(held_out, "eval_dataset()")
        self.spec, self.programs, self.evaluation = trace(
            self.trainer, self.config, self.source, self.held_out, compile_now
        )
        self.programs.lower()
        self.programs.compile(compile_now)
        self.state = initial_state(self.trainer, self.spec, self.config.seed)
        self.reader = ShardReader(
            self.source,
            seed=self.config.seed,
            shuffle=self.config.data.shuffle,
            batch_size=self.config.batch_size,
            batch_shards=self.config.batch_shards,
            prefetch_steps=0,
            threads=1,
        )

    def step(self) -> dict[str, float]:
        shards = self.reader.shards(self.state.cursor, range(self.config.batch_shards))
        sums = self.programs.gradients(self.state, shards, stop=False)
        before, begun = self.state, self.programs.update(self.state, sums, self.config.batch_size)
        self.state = begun.state
        return self.programs.result(before, begun, sums)[0]

    def evaluate(self) -> tuple[dict[str, float], float]:
        """The means, and the weight of all parts."""
        sums = np.sum(
            [
                self.evaluation.part(OneWorker, self.state, part)[0]
                for part in range(self.evaluation.parts)
            ],
            axis=0,
        ).tolist()
        return self.evaluation.means(sums), sums[-1]


def test_data_opens_without_a_device_or_sklearn():
    """Workers open it before JAX's devices, and a restarted one while the others wait."""
    ran = subprocess.run(
        [sys.executable, "-c", OPEN_ALL, *RECIPES],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "name", ["linear", "digits", pytest.param("chars", marks=pytest.mark.slow)]
)
def test_loss_goes_down_in_20_steps(name):
    driven = Driven(name, *RECIPES[name])
    metrics = [driven.step() for _ in range(20)]
    losses = [row["loss"] for row in metrics]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert all(np.isfinite(list(row.values())).all() for row in metrics)
    assert driven.state.step == 20
    assert driven.state.cursor == 20 * driven.config.batch_size

    if name == "digits":
        means, weight = driven.evaluate()
        assert means.keys() == {"accuracy"}
        assert weight == 297
        assert means["accuracy"] > 0.2  # BatchNorm's running statistics have only begun to run
    if name == "chars":
        means, weight = driven.evaluate()
        assert means["bits"] == pytest.approx(means["loss"] / np.log(2), rel=1e-5)
        assert weight == 32 * driven.held_out.length  # tokens
        rates = [row["learning_rate"] for row in metrics]
        assert rates == pytest.approx(
            [float(driven.trainer.schedule(step)) for step in range(20)], rel=1e-5
        )
        assert rates[0] == 0 < rates[-1] < max(rates) == rates[2]


@pytest.mark.slow
def test_digits_reaches_97_percent_of_held_out_digits():
    driven = Driven("digits")
    assert driven.trainer.config.steps == 400
    for _ in range(driven.trainer.config.steps):
        driven.step()
    assert driven.evaluate()[0]["accuracy"] >= 0.97


def test_digits_are_1500_and_297_and_always_the_same():
    trainer, again = digits.DigitsTrainer(), digits.DigitsTrainer()
    training, held_out = trainer.dataset(), trainer.eval_dataset()
    assert [len(data["image"]) for data in (training, held_out)] == [1500, 297]
    assert training["image"].shape[1:] == (8, 8, 1)
    assert (training["image"].min(), training["image"].max()) == (0, 1)
    assert set(training["label"]) == set(held_out["label"]) == set(range(10))
    jax.tree.map(np.testing.assert_array_equal, training, again.dataset())


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ftrain\[recipes\]'"):
        digits.load_digits()


def test_texts_share_no_paragraph():
    training, held_out = (set(text.tobytes().split(b"\n\n")) for text in chars.load_text())
    assert not training & held_out
    assert len(training) > 15 * len(held_out) > 1000


def test_windows_are_the_same_one_by_one_and_in_a_batch():
    windows = chars.Windows(np.arange(100, dtype=np.uint8), 9)
    indices = np.array([10, 0, 3])
    batch = windows.batch_at(indices)["tokens"]
    assert len(windows) == 11
    np.testing.assert_array_equal(batch, [windows[i]["tokens"] for i in indices])
    np.testing.assert_array_equal(batch[0], np.arange(90, 100))


@pytest.fixture(scope="module")
def logits():
    """The logits of a small transformer, as a function of tokens and key."""
    trainer = _chars("steps=20", "trainer_args={width: 16, layers: 2, length: 16, dropout: 0.5}")
    params = jax.jit(trainer.init_params)(jax.random.key(0))
    return jax.jit(lambda tokens, key: trainer.logits(params, tokens, key))


def test_a_byte_is_predicted_from_those_before_it_alone(logits):
    tokens = np.arange(16, dtype=np.uint8)[None]
    changed = tokens.copy()
    changed[0, 8] += 100
    before, after = logits(tokens, None), logits(changed, None)
    np.testing.assert_array_equal(before[:, :8], after[:, :8])
    assert jnp.any(before[:, 8:] != after[:, 8:], axis=-1).all()


def test_dropout_depends_on_the_key_and_evaluation_has_none(logits):
    tokens = np.zeros((1, 16), np.uint8)
    one, same, other, none, again = (
        logits(tokens, key)
        for key in (jax.random.key(1), jax.random.key(1), jax.random.key(2), None, None)
    )
    np.testing.assert_array_equal(one, same)
    np.testing.assert_array_equal(none, again)
    assert (one != other).any() and (one != none).any()


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="width=30 is not divisible by heads=4"):
        _chars("trainer_args={width: 30}")


def _chars(*sets: str) -> Any:
    config = load_config(REPOSITORY / "configs/chars.yaml", sets)
    return load_trainer(config.trainer, str(REPOSITORY), config.trainer_args, config)

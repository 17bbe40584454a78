"""Beginning with parameters from elsewhere: real files of each kind, read as a donor does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import ftrain
from ftrain.config import Config, InitFrom
from ftrain.errors import InitFromError
from ftrain.init_from import Plan, new_state
from ftrain.initial import state_spec
from ftrain.state import Committed, StateSpec, to_host
from tests.test_checkpoint import empty, write
from tests.test_state import bits_of, state_of

# Orbax does not wait for its other reads when one has failed; they end in a closed event loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RNG = np.random.default_rng(0)
TRAINED = {
    "encoder": [{"kernel": RNG.normal(size=(3, 4)).astype(np.float32)}, {"bias": np.ones(4, "f4")}],
    "head": {"kernel": RNG.normal(size=(4, 2)).astype(np.float32)},
}
STATISTICS = {"mean": np.full(4, 2, np.float32), "count": np.int32(7)}


class Model(ftrain.Trainer):
    """The parameters of `TRAINED`, fresh, and an optimizer whose state holds a copy of them."""

    def __init__(self, **changed: Any):
        self.changed = changed

    def init_params(self, key):
        params = jax.tree.map(lambda x: jnp.zeros(x.shape), TRAINED)
        params["head"] = {"kernel": jnp.full((4, 2), 9.0)}
        state = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), x.dtype), STATISTICS)
        return ftrain.Init({**params, **self.changed}, state)

    def optimizer(self):
        return optax.chain(optax.ema(0.9), optax.contrib.schedule_free_sgd(0.1))


def spec_for(trainer: Model) -> StateSpec:
    trainer.tx = trainer.optimizer()
    return state_spec(trainer, 0)


def begin(path: Path, trainer: Model | None = None, **settings: Any) -> tuple[Any, dict]:
    """The state that a new run begins with, as a TrainState, and what was reported."""
    trainer = trainer or Model()
    spec = spec_for(trainer)
    wanted = {"path": str(path), **settings}
    config = Config(trainer="a.py:T", run_dir="r", steps=1, batch_size=8, init_from=wanted)
    told: dict[str, Any] = {}
    state = new_state(trainer, spec, config, lambda name, **fields: told.update({name: fields}))
    assert isinstance(state, Committed) and (state.step, state.cursor) == (0, 0)
    return spec.train_state(0, 0, to_host(state.leaves)), told.get("parameters_loaded")


def refused(path: Path, trainer: Model | None = None, **settings: Any) -> list[str]:
    with pytest.raises(InitFromError) as caught:
        Plan(InitFrom(path=str(path), **settings), spec_for(trainer or Model()))
    return [line.removeprefix("init_from: ") for line in str(caught.value).splitlines()]


def equal(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        bits_of(x) == bits_of(y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def flat(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in leaves}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The same parameters as each kind of source."""
    import orbax.checkpoint as ocp

    folder = tmp_path_factory.mktemp("sources")
    for step in (100, 200):
        trained = jax.tree.map(lambda x, step=step: x * (step / 200), TRAINED)
        write(folder / "run", *state_of(trained, (jnp.int32(3),), STATISTICS, step=step))
    tree = {"params": TRAINED, "model_state": STATISTICS, "opt_state": [np.int32(3)], "step": 200}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.save(folder / "params", TRAINED)
        checkpointer.save(folder / "moved", {"x": np.ones(1)})  # to be replaced below
    shutil.rmtree(folder / "moved")
    shutil.copytree(folder / "run" / "checkpoints" / "200", folder / "moved")
    with ocp.CheckpointManager(folder / "manager") as manager:
        manager.save(200, args=ocp.args.StandardSave(tree))
    tensors = flat(TRAINED)
    save_file(tensors, folder / "one.safetensors")
    (folder / "tensors").mkdir()
    for i, name in enumerate(tensors):
        save_file({name: tensors[name]}, folder / "tensors" / f"model-{i}.safetensors")
    return folder


KINDS = ["run", "run/checkpoints/200", "moved", "state", "params", "manager/200"]
KINDS += ["one.safetensors", "tensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_every_kind_of_source_come_bit_for_bit(sources, kind):
    """All leaves are taken; the optimizer is fresh but knows them; the model state is fresh."""
    state, told = begin(sources / kind)
    assert equal(state.params, TRAINED)
    assert (told["leaves"], told["fresh"], told["unused"]) == (3, [], [])
    assert str(sources / kind.split("/")[0]) in told["source"]
    trainer = Model()
    wanted = trainer.optimizer().init(jax.tree.map(jnp.asarray, TRAINED))
    assert equal(state.opt_state, jax.tree.map(np.asarray, wanted))
    assert state.model_state["mean"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["run", "state"])
def test_model_state_comes_when_it_is_asked_for(sources, kind):
    """Statistics of a pre-trained network; the integer stays exact."""
    state, told = begin(sources / kind, model_state=True)
    assert equal(state.params, TRAINED) and told["leaves"] == 5
    assert state.model_state["mean"].tolist() == [2, 2, 2, 2]
    assert int(state.model_state["count"]) == 7


def test_model_state_that_the_source_has_not_is_named(sources):
    """It was asked for: not silently fresh."""
    lines = refused(sources / "one.safetensors", model_state=True)
    assert lines[1:3] == [
        "model_state/count: the trainer has int32[], the source has no such leaf",
        "model_state/mean: the trainer has float32[4], the source has no such leaf",
    ]


def test_without_init_from_the_state_is_that_of_the_seed(tmp_path):
    """And nothing is reported."""
    trainer = Model()
    config = Config(trainer="a.py:T", run_dir="r", steps=1, batch_size=8)
    spec = spec_for(trainer)
    state = new_state(trainer, spec, config, lambda name, **fields: pytest.fail(name))
    assert spec.trees(state.leaves)[0]["head"]["kernel"][0, 0] == 9


def test_a_step_of_a_run_can_be_asked_for(sources):
    """By `@`; without, it is the newest."""
    state, told = begin(Path(f"{sources}/run@100"))
    assert np.array_equal(state.params["encoder"][1]["bias"], np.full(4, 0.5))
    assert told["source"] == f"{sources}/run, step 100"


def test_a_torn_newest_checkpoint_gives_way_and_the_step_is_told(sources, tmp_path):
    """As where a run is continued; one that was asked for does not give way."""
    run = shutil.copytree(sources / "run", tmp_path / "run")
    empty(run / "checkpoints" / "200")
    assert begin(run)[1]["source"] == f"{run}, step 100"
    [line] = refused(Path(f"{run}@200"))
    assert line.startswith(f"{run}/checkpoints/200 cannot be read: ")


def test_names_of_another_program_are_mapped(tmp_path):
    """PyTorch's names for a flax tree; the head stays fresh, what is left over is let go."""
    tensors = {
        "model.layer0.weight": TRAINED["encoder"][0]["kernel"],
        "model.layer1.bias": TRAINED["encoder"][1]["bias"],
        "lm_head.weight": np.zeros((2, 5), np.float32),
    }
    save_file(tensors, tmp_path / "torch.safetensors")
    state, told = begin(
        tmp_path / "torch.safetensors",
        map={r"^model/layer(\d+)": r"encoder/\1", "weight$": "kernel"},
        allow_missing=["^head/"],
        allow_extra=["^lm_head/"],
    )
    assert equal(state.params["encoder"], TRAINED["encoder"])
    assert (state.params["head"]["kernel"] == 9).all()
    assert (told["fresh"], told["unused"]) == (["head/kernel"], ["lm_head/weight"])


def test_everything_that_does_not_fit_is_named_at_once(sources):
    """Missing, extra, another shape and another dtype: each with both sides, and what to do."""
    trainer = Model(
        head={"kernel": jnp.zeros((4, 3)), "scale": jnp.zeros(3)},
        encoder=[{"kernel": jnp.zeros((3, 4), jnp.bfloat16)}],
    )
    for kind in ("run", "state", "one.safetensors"):
        first, *lines, advice = refused(sources / kind, trainer)
        assert first.endswith("does not fit") and "allow_missing" in advice
        assert lines == [
            "encoder/0/kernel: the trainer has bfloat16[3,4], the source has float32[3,4]",
            "head/kernel: the trainer has float32[4,3], the source has float32[4,2]",
            "head/scale: the trainer has float32[3], the source has no such leaf",
            "encoder/1/bias: the trainer has no such leaf, the source has float32[4]",
        ]


@pytest.mark.parametrize("kind", ["orbax", "safetensors"])
def test_floats_are_converted_when_asked(tmp_path, kind):
    """From bfloat16 up, as from float32 down; without `cast` both are named."""
    import orbax.checkpoint as ocp

    half = {"head": {"kernel": TRAINED["head"]["kernel"].astype(ml_dtypes.bfloat16)}}
    path = tmp_path / ("half.safetensors" if kind == "safetensors" else "half")
    if kind == "safetensors":
        save_file(flat(half), path)
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, half)
    rest = {"allow_missing": ["^encoder/"]}
    assert refused(path, **rest)[1:-1] == [
        "head/kernel: the trainer has float32[4,2], the source has bfloat16[4,2]"
    ]
    state, _ = begin(path, cast=True, **rest)
    assert equal(state.params["head"], {"kernel": half["head"]["kernel"].astype(np.float32)})


def test_a_value_too_large_for_its_new_dtype_is_named(tmp_path):
    """A cast that makes an infinity of a number is no conversion; an infinity stays one."""
    kernel = np.zeros((4, 2), np.float32)
    kernel[0, 0], kernel[0, 1] = 1e6, np.inf
    save_file({"head.kernel": kernel}, tmp_path / "m.safetensors")
    trainer = Model(head={"kernel": jnp.zeros((4, 2), jnp.float16)})
    with pytest.raises(InitFromError, match="head/kernel: 1 values are too large for float16"):
        begin(tmp_path / "m.safetensors", trainer, cast=True, allow_missing=["^encoder/"])


def test_a_source_that_gives_nothing_is_refused(sources):
    """Everything allowed to be missing and extra: the run would train from scratch unawares."""
    everything = {"allow_missing": ["."], "allow_extra": ["."], "map": {"^": "model/"}}
    [line] = refused(sources / "params", **everything)
    assert line.startswith(f"{sources}/params gives not one leaf; ")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def fill_with_text(path: Path) -> None:
    path.write_text("no tensors")


@pytest.mark.parametrize("damage", [cut, fill_with_text])
def test_a_torn_safetensors_file_is_named(sources, tmp_path, damage):
    """Before anything is taken from the others."""
    folder = shutil.copytree(sources / "tensors", tmp_path / "tensors")
    damage(folder / "model-1.safetensors")
    [line] = refused(folder)
    assert line.startswith(f"{folder}/model-1.safetensors cannot be read: ")


def test_a_torn_orbax_checkpoint_is_named(sources, tmp_path):
    """Its metadata is no JSON."""
    folder = shutil.copytree(sources / "params", tmp_path / "params")
    fill_with_text(folder / "_METADATA")
    [line] = refused(folder)
    assert line.startswith(f"{folder} cannot be read: ")


def test_a_tensor_that_two_files_have_is_named(tmp_path):
    """Two models in one folder; which was meant?"""
    for file in ("a", "b"):
        save_file({"w": np.ones(1, np.float32)}, tmp_path / f"{file}.safetensors")
    [line] = refused(tmp_path)
    assert line == f"w of {tmp_path}/b.safetensors is also in {tmp_path}/a.safetensors"


def test_a_trainer_with_params_at_the_top_of_its_tree_keeps_them(sources):
    """flax.linen's variables, {"params": ...}, as the whole tree."""

    class Variables(Model):
        def init_params(self, key):
            return {"params": super().init_params(key).params}

    state, _ = begin(sources / "state", Variables(), allow_extra=["^(opt|model)_state/", "^step$"])
    assert equal(state.params, {"params": TRAINED})

"""What a script reads of a run: parameters and state, from whole checkpoints alone."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftrain import load
from ftrain.errors import CheckpointNotFoundError, CheckpointUnreadableError, StateMismatchError
from ftrain.load import load_params, load_state
from ftrain.state import TrainState
from tests.runs import plain_process
from tests.test_checkpoint import NEWER, OLDER, Point, empty, flip_bit, truncate, weights, write
from tests.test_checkpoint import run_dir as run_dir
from tests.test_checkpoint import two_checkpoints as two_checkpoints
from tests.test_state import EVERY_KIND, bits_of, state_of

# Orbax does not wait for its other reads when one has failed; they end in a closed event loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_load_params_gives_nested_dicts_and_lists_of_numpy(tmp_path):
    """A script needs neither the trainer nor a device."""
    params = {"layers": [{"w": jnp.ones((2, 3))}, {"w": jnp.zeros(3)}], "b": jnp.float32(2)}
    write(tmp_path, *state_of(params))
    got = load_params(str(tmp_path))
    assert jax.tree.structure(got) == jax.tree.structure(params)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(got))
    assert got["layers"][0]["w"].tolist() == [[1, 1, 1], [1, 1, 1]] and got["b"] == 2


def test_load_params_takes_the_tree_of_like(tmp_path):
    """Node types of the user's own come back as such."""
    like = Point({"a": jnp.zeros(2)}, (jnp.zeros(()), jnp.zeros(1)))
    write(tmp_path, *state_of(jax.tree.map(jnp.ones_like, like)))
    got = load_params(str(tmp_path), like=like)
    assert isinstance(got, Point) and got.x["a"].tolist() == [1, 1] and isinstance(got.y, tuple)


def test_params_that_are_one_array_load_as_one_array(tmp_path):
    """A tree may be a leaf."""
    write(tmp_path, *state_of(jnp.arange(3.0)))
    assert load_params(str(tmp_path)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", sorted(EVERY_KIND))
def test_load_params_keeps_every_kind_of_leaf(every_kind, kind):
    """Bits and dtype; typed keys are keys again."""
    got = load_params(every_kind)[kind]
    wanted = EVERY_KIND[kind]
    assert (got.dtype, got.shape, bits_of(got)) == (wanted.dtype, wanted.shape, bits_of(wanted))


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory) -> str:
    """A run folder whose parameters are leaves of every kind."""
    folder = tmp_path_factory.mktemp("kinds")
    write(folder, *state_of(EVERY_KIND))
    return str(folder)


def test_load_state_has_all_of_it(tmp_path):
    """Parameters without batch statistics, or a schedule without its count, are useless."""
    tx = optax.sgd(0.1, momentum=0.9)
    params, model = {"w": jnp.ones(3)}, {"mean": jnp.full(3, 2.0), "key": jax.random.key(1)}
    write(tmp_path, *state_of(params, tx.init(params), model, step=5, cursor=2**33))
    like = TrainState(0, 0, params, tx.init(params), model)
    got = load_state(str(tmp_path), like=like)
    assert (int(got.step), int(got.cursor)) == (5, 2**33)
    assert (got.step.dtype, got.cursor.dtype) == (np.int32, np.int64)
    assert jax.tree.structure(got) == jax.tree.structure(like)
    assert got.model_state["mean"].tolist() == [2, 2, 2]
    assert bits_of(got.model_state["key"]) == bits_of(model["key"])


def test_load_state_without_like_has_none_for_a_tree_without_leaves(tmp_path):
    """A trainer without model state."""
    write(tmp_path, *state_of({"w": jnp.ones(3)}, (), None))
    got = load_state(str(tmp_path))
    assert got.model_state is None and got.params["w"].tolist() == [1, 1, 1]


def test_a_list_with_empty_places_keeps_its_indices(tmp_path):
    """`params["layers"][1]` is layer 1, though layer 0 (a flatten, say) has no parameters."""
    write(tmp_path, *state_of({"layers": [{}, {"w": jnp.ones(2)}]}))
    assert load_params(str(tmp_path))["layers"][1]["w"].tolist() == [1, 1]


def test_a_like_of_another_tree_is_refused_by_name(tmp_path):
    """Both sides are named, as where a run is continued."""
    write(tmp_path, *state_of({"w": jnp.ones(2)}))
    with pytest.raises(StateMismatchError, match="v"):
        load_params(str(tmp_path), like={"w": jnp.ones(2), "v": jnp.ones(2)})


def test_a_like_with_other_names_is_refused(tmp_path):
    """Two leaves that changed places must not be taken for one another."""
    write(tmp_path, *state_of({"a": jnp.zeros(2), "b": jnp.ones(2)}))
    with pytest.raises(StateMismatchError):
        load_params(str(tmp_path), like={"b": jnp.ones(2), "c": jnp.ones(2)})


def test_a_given_step_is_loaded(run_dir):
    """Not the newest then."""
    assert int(load_state(str(run_dir), step=OLDER).step) == OLDER
    got = load_params(str(run_dir), step=OLDER)["w"]
    assert bits_of(got) == bits_of(weights(OLDER)[1].leaves[0])


def test_a_step_that_is_not_there_names_those_that_are(run_dir):
    """Value, rule and what to do."""
    with pytest.raises(CheckpointNotFoundError, match="of step 150; use one of the steps 200, 100"):
        load_params(str(run_dir), step=150)


def test_loading_from_a_folder_without_checkpoints_says_so(tmp_path):
    """The folder is named."""
    with pytest.raises(CheckpointNotFoundError, match=f"{tmp_path} has no checkpoint;"):
        load_params(str(tmp_path))


@pytest.mark.parametrize("damage", [truncate, flip_bit, empty])
@pytest.mark.parametrize("load", [load_params, lambda folder: load_state(folder).params])
def test_loading_passes_over_a_torn_checkpoint(run_dir, damage, load):
    """A user gets the parameters of the newest that is whole, never altered ones."""
    damage(run_dir / "checkpoints" / str(NEWER))
    assert bits_of(load(str(run_dir))["w"]) == bits_of(weights(OLDER)[1].leaves[0])


def test_a_torn_checkpoint_that_was_asked_for_is_an_error(run_dir):
    """No other takes its place."""
    truncate(run_dir / "checkpoints" / str(NEWER))
    with pytest.raises(CheckpointUnreadableError, match=f"checkpoints/{NEWER} cannot be read"):
        load_params(str(run_dir), step=NEWER)


# Beside a run, and without one.


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_a_newer(run_dir, monkeypatch):
    """The run that is read goes on: it saves, and removes what is too old."""
    real, seen = load.read_checkpoint, []

    def read(path):
        seen.append(int(path.name))
        if len(seen) == 1:
            write(run_dir, *weights(300))
            for step in (OLDER, NEWER):
                shutil.rmtree(run_dir / "checkpoints" / str(step))
        return real(path)

    monkeypatch.setattr(load, "read_checkpoint", read)
    assert bits_of(load_params(str(run_dir))["w"]) == bits_of(weights(300)[1].leaves[0])
    assert seen == [NEWER, 300]


def test_a_plain_process_loads_without_a_device_and_writes_nothing(two_checkpoints):
    """No JAX_PLATFORMS, no trainer: a script beside a run must not take its GPU's memory."""
    code = """
import json, sys
import ftrain
params = ftrain.load_params(sys.argv[1])
state = ftrain.load_state(sys.argv[1], step=100)
from jax._src import xla_bridge
print(json.dumps([params["w"].shape, int(state.step), xla_bridge.backends_are_initialized()]))
"""
    files = {f: f.stat().st_mtime_ns for f in two_checkpoints.rglob("*")}
    assert plain_process(code, two_checkpoints) == [[8192], OLDER, False]
    assert {f: f.stat().st_mtime_ns for f in two_checkpoints.rglob("*")} == files

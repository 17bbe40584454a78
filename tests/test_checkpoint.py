"""Checkpoints: what is written comes back; what is torn is passed over by name.

Orbax writes real files here; damage is done to copies of one run folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftrain import checkpoint
from ftrain.digests import digest_of
from ftrain.errors import CheckpointUnreadableError, StateMismatchError
from ftrain.restore import restore_newest
from ftrain.state import Committed, StateSpec, spec_of, to_host
from tests.test_state import EVERY_KIND, bits_of, state_of

# Orbax does not wait for its other reads when one has failed; they end in a closed event loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LENGTH = 960  # samples of the data set
OLDER, NEWER = 100, 200


class Point(NamedTuple):
    """A tree node of the user's own."""

    x: Any
    y: Any


def described(
    spec: StateSpec, state: Committed, evaluated: int = 0, dataset_length: int = LENGTH
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What a checkpoint or a snapshot of a state is written from."""
    arrays = to_host(state.leaves)
    meta = checkpoint.meta_of(
        spec,
        step=state.step,
        cursor=state.cursor,
        dataset_length=dataset_length,
        evaluated=evaluated,
        digest=digest_of(spec.lines(), state.step, state.cursor, arrays).hex(),
    )
    return meta, arrays


def write(run_dir: Path, spec: StateSpec, state: Committed) -> None:
    folder = checkpoint.checkpoint_folder(str(run_dir))
    checkpoint.write_checkpoint(folder / str(state.step), *described(spec, state))


class Reports(list):
    """The records that were reported, as (name, fields)."""

    def __call__(self, name: str, **fields: Any) -> None:
        self.append((name, fields))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [fields for reported, fields in self if reported == name]


def restore(
    run_dir: Path,
    spec: StateSpec,
    *,
    dataset_length: int = LENGTH,
    report: Callable[..., None] = lambda name, **fields: None,
) -> Committed | None:
    restored = restore_newest(str(run_dir), spec, dataset_length=dataset_length, report=report)
    return restored and restored.state


def same_bits(a: Committed | None, b: Committed) -> bool:
    return (
        a is not None
        and (a.step, a.cursor) == (b.step, b.cursor)
        and [(x.dtype, x.shape, bits_of(x)) for x in a.leaves]
        == [(x.dtype, x.shape, bits_of(x)) for x in b.leaves]
    )


def weights(step: int) -> tuple[StateSpec, Committed]:
    """A state large enough for data files of its own, and that does not compress."""
    values = np.random.default_rng(step).integers(0, 2**32, 8192, np.uint32).view(np.float32)
    return state_of({"w": jnp.asarray(values)}, step=step, cursor=step * 48)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> Path:
    """A run folder with the steps OLDER and NEWER. Tests damage copies of it."""
    run_dir = tmp_path_factory.mktemp("run")
    for step in (OLDER, NEWER):
        write(run_dir, *weights(step))
    return run_dir


@pytest.fixture
def run_dir(two_checkpoints, tmp_path) -> Path:
    """A copy of `two_checkpoints`."""
    return shutil.copytree(two_checkpoints, tmp_path / "run")


# There and back.


@pytest.mark.parametrize("tree", ["params", "opt_state", "model_state"])
def test_leaves_of_every_kind_come_back_bit_for_bit(tmp_path, tree):
    """Every dtype, shape and key implementation, wherever in the state."""
    trees = {"params": {}, "opt_state": (), "model_state": None, tree: EVERY_KIND}
    spec, state = state_of(**trees, step=7, cursor=2**40)
    write(tmp_path, spec, state)
    assert same_bits(restore(tmp_path, spec), state)


def test_optax_and_nested_trees_come_back(tmp_path):
    """Named tuples, lists in dicts, empty nodes and None."""
    params = {"layers": [{"w": jnp.ones((2, 3))}, {"w": jnp.zeros(3)}], "p": Point(jnp.ones(1), ())}
    spec, state = state_of(params, optax.adamw(1e-3).init(params), {"none": None})
    write(tmp_path, spec, state)
    assert same_bits(restore(tmp_path, spec), state)


def test_a_state_without_leaves_comes_back(tmp_path):
    """Step and cursor alone."""
    spec, state = state_of({})
    write(tmp_path, spec, state)
    assert same_bits(restore(tmp_path, spec), state)


def test_a_second_write_of_a_step_replaces_the_first(tmp_path):
    """After a rewind the same step is reached again, with other bits."""
    spec, state = state_of({"w": jnp.ones(3)})
    write(tmp_path, spec, state)
    again = state._replace(leaves=[jnp.zeros(3)])
    write(tmp_path, spec, again)
    assert same_bits(restore(tmp_path, spec), again)


def test_the_newest_is_restored_and_reported(run_dir):
    """By number, not by name or time: 200 after 100."""
    spec, state = weights(NEWER)
    report = Reports()
    assert same_bits(restore(run_dir, spec, report=report), state)
    digest = described(spec, state)[0]["digest"]
    fields = {"step": NEWER, "tier": "disk", "digest": digest}
    assert report == [("checkpoint_restored", fields)]


def test_step_numbers_are_compared_as_numbers(tmp_path):
    """90 is older than 100."""
    for step in (90, 100):
        write(tmp_path, *state_of({"w": jnp.full(2, float(step))}, step=step))
    assert restore(tmp_path, state_of({"w": jnp.ones(2)})[0]).step == 100


@pytest.mark.parametrize("folder", ["checkpoints", "."])
def test_a_run_without_checkpoints_has_none(tmp_path, folder):
    """A new run begins at step 0, and nothing is reported as skipped."""
    (tmp_path / folder).mkdir(exist_ok=True)
    report = Reports()
    assert restore(tmp_path, weights(1)[0], report=report) is None and report == []


def test_what_orbax_has_not_renamed_yet_is_no_checkpoint(run_dir):
    """A worker died while it wrote."""
    shutil.copytree(
        run_dir / "checkpoints" / str(NEWER), run_dir / "checkpoints" / "300.orbax-checkpoint-tmp-1"
    )
    report = Reports()
    assert restore(run_dir, weights(1)[0], report=report).step == NEWER
    assert report.of("checkpoint_skipped") == []


# Torn.


def largest_file(path: Path) -> Path:
    return max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def truncate(path: Path) -> None:
    file = largest_file(path)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_bit(path: Path) -> None:
    file = largest_file(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def lose_metadata(path: Path) -> None:
    (path / "_METADATA").unlink()


def lose_data(path: Path) -> None:
    largest_file(path).unlink()


DAMAGE = [truncate, flip_bit, empty, lose_metadata, lose_data]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_checkpoint_falls_back_to_the_one_before_it(run_dir, damage):
    """It is named with the reason, and the older one is taken, whole."""
    damage(run_dir / "checkpoints" / str(NEWER))
    spec, state = weights(OLDER)
    report = Reports()
    assert same_bits(restore(run_dir, spec, report=report), state)
    [skipped] = report.of("checkpoint_skipped")
    assert skipped["step"] == NEWER and skipped["why"] and "\n" not in skipped["why"]
    assert [r["step"] for r in report.of("checkpoint_restored")] == [OLDER]


def test_whatever_file_is_damaged_the_state_is_a_whole_one(two_checkpoints, tmp_path):
    """Each file of a checkpoint lost, cut or altered: the newest state exactly, or the older."""
    spec, newer = weights(NEWER)
    _, older = weights(OLDER)
    top = two_checkpoints / "checkpoints" / str(NEWER)
    wrong = []
    for file in sorted(f.relative_to(top) for f in top.rglob("*") if f.is_file()):
        for how in ("lost", "cut", "altered"):
            copy = shutil.copytree(two_checkpoints, tmp_path / "-".join([*file.parts, how]))
            target = copy / "checkpoints" / str(NEWER) / file
            data = bytearray(target.read_bytes())
            data[len(data) // 3] ^= 1
            target.unlink()
            if how != "lost":
                target.write_bytes(data if how == "altered" else data[:-1])
            got = restore(copy, spec)
            if not (same_bits(got, newer) or same_bits(got, older)):
                wrong.append((str(file), how))
    assert wrong == []


def test_a_run_with_no_good_checkpoint_left_does_not_start_afresh(run_dir):
    """Both are named as skipped, and what to do is said."""
    for step in (OLDER, NEWER):
        empty(run_dir / "checkpoints" / str(step))
    report = Reports()
    with pytest.raises(CheckpointUnreadableError, match="none of the steps .200, 100. can be read"):
        restore(run_dir, weights(1)[0], report=report)
    assert [s["step"] for s in report.of("checkpoint_skipped")] == [NEWER, OLDER]


def test_a_checkpoint_of_another_format_is_not_read(tmp_path, monkeypatch):
    """A newer ftrain's: named with both numbers, not guessed at."""
    spec, state = state_of({"w": jnp.ones(3)})
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    write(tmp_path, spec, state)
    monkeypatch.undo()
    report = Reports()
    with pytest.raises(CheckpointUnreadableError):
        restore(tmp_path, spec, report=report)
    assert "its format is 99, this ftrain reads 2" in report.of("checkpoint_skipped")[0]["why"]


# Another trainer or data set.


CHANGED = {
    "another shape": (
        {"w": jnp.ones(4), "b": jnp.ones(())},
        "params['w']: this trainer has float32[4], checkpoint 3 has float32[3]",
    ),
    "another dtype": (
        {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(())},
        "params['w']: this trainer has bfloat16[3], checkpoint 3 has float32[3]",
    ),
    "one more": (
        {"w": jnp.ones(3), "b": jnp.ones(()), "c": jnp.ones(())},
        "params['c']: this trainer has float32[], checkpoint 3 has no such leaf",
    ),
    "one less": (
        {"w": jnp.ones(3)},
        "params['b']: this trainer has no such leaf, checkpoint 3 has float32[]",
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_tree_is_refused_with_the_leaf_and_both_sides(tmp_path, change):
    """Not skipped as torn: the older checkpoints would not fit either."""
    tree, message = CHANGED[change]
    write(tmp_path, *state_of({"w": jnp.ones(3), "b": jnp.ones(())}))
    with pytest.raises(StateMismatchError) as caught:
        restore(tmp_path, spec_of(tree, (), None))
    assert message in str(caught.value)


def test_another_length_of_the_data_set_is_refused(run_dir):
    """The cursor would mean other samples; both lengths are named."""
    with pytest.raises(StateMismatchError) as caught:
        restore(run_dir, weights(1)[0], dataset_length=961)
    assert "len(dataset()): this trainer has 961, checkpoint 200 has 960" in str(caught.value)

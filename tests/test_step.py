"""One step's mathematics: whoever computes which shard, the result is that of the whole batch.

No processes: workers are calls of `gradients`, and their sum is taken here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ftrain
from ftrain.data import Source
from ftrain.errors import TrainerError
from ftrain.initial import initial_state, state_spec
from ftrain.nonfinite import Nonfinite
from ftrain.state import Committed, StateSpec
from ftrain.step import StepPrograms
from tests.test_state import EVERY_KIND, bits_of

SHARDS, SIZE = 3, 4
SEED = 5
ALONE = [[0, 1, 2]]  # one worker with all shards
SPLITS = [ALONE, [[0, 1], [2]], [[0], [1], [2]], [[2], [], [0, 1]], [[2, 0, 1]]]
MASKS = {  # what each sample counts, and so how much each shard weighs
    "even": [1] * 12,
    "uneven": [1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0],
    "fractions": [0.5, 0.25, 0, 0, 3, 0, 0, 1, 1, 0.125, 0, 2],
    "an empty shard": [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
}
RNG = np.random.default_rng(1)
X = RNG.normal(size=(12, 3)).astype(np.float32)
Y = RNG.normal(size=12).astype(np.float32)
W = np.array([0.5, -1.0, 2.0])


class Linear(ftrain.Trainer):
    """A masked mean of squares; gradient descent with rate 1, so a step shows the gradient."""

    def dataset(self, mask: Sequence[float] = MASKS["even"]) -> dict[str, np.ndarray]:
        return {"x": X, "y": Y, "mask": np.array(mask, np.float32)}

    def init_params(self, key: jax.Array) -> Any:
        return {"w": jnp.asarray(W, jnp.float32), "b": jnp.asarray(0.25)}

    def loss(self, params: Any, batch: Any, key: jax.Array) -> Any:
        miss = batch["x"] @ params["w"] + params["b"] - batch["y"]
        weight = batch["mask"].sum()  # 0 in an empty shard, whose means are 0 / 0
        return ftrain.Loss(
            (batch["mask"] * miss**2).sum() / weight,
            {"miss": (batch["mask"] * abs(miss)).sum() / weight},
            weight,
        )

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


def traced(
    trainer: Any,
    source: Source,
    *,
    reduce_dtype: str = "float32",
    seed: int = SEED,
    **options: int,
) -> tuple[StateSpec, StepPrograms]:
    """What every start does with a trainer before it compiles anything."""
    trainer.tx = trainer.optimizer()
    spec = state_spec(trainer, seed)
    return spec, StepPrograms(
        trainer,
        spec,
        source.shapes(SIZE),
        source.treedef,
        seed=seed,
        reduce_dtype=reduce_dtype,
        **options,
    )


class Steps:
    """A trainer's programs, and its steps on any split of the shards over workers."""

    def __init__(self, trainer: Any, data: Any = None, **options: Any):
        source = Source(trainer.dataset() if data is None else data, "dataset()")
        self.spec, self.programs = traced(trainer, source, **options)
        self.programs.lower()
        self.programs.compile(lambda lowered: lowered.compile())
        self.first = initial_state(trainer, self.spec, options.get("seed", SEED))
        self.batches = batches_of(source)

    def on(self, data: Any) -> Steps:
        """The same programs on other data."""
        other = copy.copy(self)
        other.batches = batches_of(Source(data, "dataset()"))
        return other

    def sums(
        self, state: Committed, split: Sequence[Sequence[int]] = ALONE, stop: Sequence[int] = ()
    ) -> list[jax.Array]:
        """What the workers' sum gives each of them; `split` says who has which shards."""
        parts = [
            self.programs.gradients(state, [self.batches[s] for s in shards], stop=worker in stop)
            for worker, shards in enumerate(split)
        ]
        return [sum(group[1:], group[0]) for group in zip(*parts, strict=True)]

    def step(
        self,
        state: Committed | None = None,
        split: Sequence[Sequence[int]] = ALONE,
        stop: Sequence[int] = (),
    ) -> tuple[Committed, dict[str, float], bool]:
        state = state or self.first
        return self.update(state, self.sums(state, split, stop), SHARDS * SIZE)[:3]

    def update(
        self, state: Committed, sums: list[jax.Array], samples: int
    ) -> tuple[Committed, dict[str, float], bool, Nonfinite | None]:
        """The next state, metrics, whether to stop, and what is not finite."""
        begun = self.programs.update(state, sums, samples)
        return begun.state, *self.programs.result(state, begun, sums)

    def trees(self, state: Committed) -> tuple[Any, Any, Any]:
        return self.spec.trees(state.leaves)


def batches_of(source: Source) -> list[tuple[int, list[np.ndarray]]]:
    return [(s, source.batch(np.arange(s * SIZE, (s + 1) * SIZE))) for s in range(SHARDS)]


def reference(mask: Sequence[float]) -> tuple[np.ndarray, float, float, float]:
    """Gradients of w and b, loss and mean miss, in float64, on the whole batch at once."""
    m, x, y = np.array(mask, np.float64), X.astype(np.float64), Y.astype(np.float64)
    miss = x @ W + 0.25 - y
    total = m.sum()
    return (
        2 * (m * miss) @ x / total,
        2 * (m * miss).sum() / total,
        (m * miss**2).sum() / total,
        (m * abs(miss)).sum() / total,
    )


@pytest.fixture(scope="module")
def linear() -> dict[str, Steps]:
    """A compiled `Linear` on each mask."""
    steps = Steps(Linear())
    return {name: steps.on(Linear().dataset(mask)) for name, mask in MASKS.items()}


# Means over shards.


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_gradient_is_that_of_the_weighted_mean_over_the_batch(linear, mask, split):
    """Shards of unequal weight, any split over workers, one of them without a shard."""
    steps = linear[mask]
    params, _, _ = steps.trees(steps.step(split=split)[0])
    grad_w, grad_b, _, _ = reference(MASKS[mask])
    np.testing.assert_allclose(W - params["w"], grad_w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(0.25 - params["b"], grad_b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", MASKS)
def test_loss_and_metrics_are_weighted_means(linear, mask):
    """With the same weights as the gradient."""
    _, metrics, _ = linear[mask].step(split=[[0], [1, 2]])
    _, _, loss, miss = reference(MASKS[mask])
    assert metrics == pytest.approx({"loss": loss, "miss": miss}, rel=1e-5)


def test_without_a_weight_each_sample_counts_once():
    """`loss` returns a plain scalar, the mean over the shard."""

    class Plain(Linear):
        def loss(self, params, batch, key):
            return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()

    steps = Steps(Plain())
    state, metrics, _ = steps.step()
    grad_w, _, loss, _ = reference(MASKS["even"])
    np.testing.assert_allclose(W - steps.trees(state)[0]["w"], grad_w, rtol=1e-5)
    assert metrics == {"loss": pytest.approx(loss, rel=1e-5)}
    assert float(steps.sums(steps.first)[0][0, 0, -2]) == SHARDS * SIZE  # the weight, before stop


def test_a_pair_of_loss_and_metrics_is_taken():
    """The form between a scalar and `Loss`."""

    class Pair(Linear):
        def loss(self, params, batch, key):
            return params["b"] ** 2, {"b": params["b"]}

    assert Steps(Pair()).step()[1] == {"loss": 0.0625, "b": 0.25}


def test_the_weight_takes_no_gradient():
    """Though it depends on the parameters, `value` alone is what is descended."""

    class Steep(Linear):
        def loss(self, params, batch, key):
            return ftrain.Loss(params["b"] * batch["y"].mean(), weight=params["b"] ** 2)

    steps = Steps(Steep())
    got = 0.25 - steps.trees(steps.step()[0])[0]["b"]
    np.testing.assert_allclose(got, Y.mean(), rtol=1e-5)


def test_a_step_without_any_weight_moves_nothing_and_says_so(linear):
    """Every token masked: gradient 0, loss 0, metrics 0, and `weight: 0` in the line."""
    steps = linear["even"].on(Linear().dataset([0] * 12))
    state, metrics, _ = steps.step(split=[[0], [1, 2]])
    assert metrics == {"loss": 0, "miss": 0, "weight": 0}
    assert [bits_of(x) for x in state.leaves] == [bits_of(x) for x in steps.first.leaves]


def test_a_step_with_weight_does_not_mention_it(linear):
    """The key is there for the odd case alone."""
    assert "weight" not in linear["an empty shard"].step()[1]


def test_a_shard_without_weight_may_hold_nan(linear):
    """0/0 in one shard spoils neither the gradient nor the loss of the others."""
    steps = linear["an empty shard"]
    alone = steps.programs.gradients(steps.first, [steps.batches[1]], stop=False)
    assert all(np.all(np.asarray(b) == 0) for b in alone)


# Precision.


class Coarse(ftrain.Trainer):
    """One bfloat16 parameter, whose gradient in shard s is GRADIENTS[s]."""

    GRADIENTS = (256.0, 1.0, 1.0)  # 256 + 1 is 256 in bfloat16

    def dataset(self) -> Any:
        return {"x": np.repeat(np.float32(self.GRADIENTS), SIZE)}

    def init_params(self, key: jax.Array) -> Any:
        return {"w": jnp.zeros((), jnp.bfloat16)}

    def loss(self, params: Any, batch: Any, key: jax.Array) -> Any:
        return params["w"] * batch["x"].mean().astype(jnp.bfloat16)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


@pytest.mark.parametrize(("reduce_dtype", "gradient"), [("float32", 86.0), ("param", 85.5)])
def test_bfloat16_gradients_are_summed_in_the_reduce_dtype(reduce_dtype, gradient):
    """In float32 the two ones count; in their own dtype they are lost, as the user chose."""
    steps = Steps(Coarse(), reduce_dtype=reduce_dtype)
    state, _, _ = steps.step(split=[[0], [1], [2]])
    assert float(steps.trees(state)[0]["w"]) == -gradient


@pytest.mark.parametrize(
    ("reduce_dtype", "dtypes"), [("float32", {"float32"}), ("param", {"bfloat16", "float32"})]
)
def test_the_reduce_dtype_is_what_travels(reduce_dtype, dtypes):
    """`param` halves the traffic of a bfloat16 model; loss and metrics stay float32."""
    _, programs = traced(
        Coarse(), Source(Coarse().dataset(), "dataset()"), reduce_dtype=reduce_dtype
    )
    assert {b.dtype.name for b in programs.buffer_shapes} == dtypes


def test_buffers_have_room_for_the_table_of_a_view_and_the_numbers_stay(linear):
    """Digests travel by the step's program: its float32 buffer is as large as they need."""
    wide = Steps(Linear(), Linear().dataset(MASKS["uneven"]), table_size=500)
    assert [b.shape for b in wide.programs.buffer_shapes] == [(1, 1, 500)]
    assert wide.step(split=[[0], [1, 2]])[1:] == linear["uneven"].step(split=[[0], [1, 2]])[1:]


@pytest.mark.parametrize("reduce_dtype", ["float32", "param"])
def test_update_is_given_gradients_in_the_parameters_dtype(reduce_dtype):
    """Whatever they were summed in."""

    class Asking(Coarse):
        def update(self, state, grads):
            assert grads["w"].dtype == jnp.bfloat16
            return super().update(state, grads)

    trainer = Asking()
    _, programs = traced(trainer, Source(trainer.dataset(), "dataset()"), reduce_dtype=reduce_dtype)
    programs.lower()


def test_parameters_of_several_dtypes_train_together():
    """Each with its own gradient, in its own place of the buffers."""

    class Mixed(Coarse):
        def init_params(self, key):
            return {
                "a": jnp.zeros((2,), jnp.bfloat16),
                "b": jnp.zeros((3,)),
                "c": jnp.zeros((2, 2), jnp.float16),
            }

        def loss(self, params, batch, key):
            return sum(
                (i + 1) * params[name].astype(jnp.float32).sum() for i, name in enumerate("abc")
            )

    steps = Steps(Mixed(), reduce_dtype="param")
    params, _, _ = steps.trees(steps.step()[0])
    assert [np.unique(np.float32(params[name])).tolist() for name in "abc"] == [[-1], [-2], [-3]]


# Model state.


class Stateful(Linear):
    """Linear, with model state that `change` turns into the next, from a shard's x and key."""

    def __init__(self, before: Any, change: Any):
        self.before, self.change = before, change

    def init_params(self, key: jax.Array) -> Any:
        return ftrain.Init(super().init_params(key), self.before)

    def loss(self, params: Any, batch: Any, key: jax.Array, model_state: Any) -> Any:
        out = super().loss(params, batch, key)
        return out._replace(model_state=self.change(model_state, batch["x"], key))


def test_an_untouched_leaf_keeps_its_bits_and_does_not_travel():
    """-0.0 and NaN payloads too, beside one that changes; averaging copies would lose them."""
    before = {"kept": EVERY_KIND["odd"], "key": EVERY_KIND["key rbg"], "mean": jnp.zeros(3)}
    steps = Steps(Stateful(before, lambda old, x, key: {**old, "mean": x.mean(0)}))
    state, _, _ = steps.step(split=[[0, 1], [2]])
    _, _, model = steps.trees(state)
    assert bits_of(model["kept"]) == bits_of(EVERY_KIND["odd"])
    assert bits_of(model["key"]) == bits_of(EVERY_KIND["key rbg"])
    sent = 4 + 3 + len("loss, miss, weight, stop".split())  # gradients, mean
    assert sum(b.size for b in steps.sums(steps.first)) == sent


def test_model_state_that_loss_leaves_out_stays():
    """`Loss.model_state` is None: all of it is unchanged."""
    steps = Steps(Stateful({"odd": EVERY_KIND["odd"]}, lambda old, x, key: None))
    assert bits_of(steps.trees(steps.step()[0])[2]["odd"]) == bits_of(EVERY_KIND["odd"])


def test_a_leaf_handed_through_a_jitted_function_is_untouched():
    """`jax.jit` inside loss is no change."""
    passed = jax.jit(lambda old, x: {"odd": old["odd"], "mean": old["mean"] + x.mean()})
    steps = Steps(
        Stateful(
            {"odd": EVERY_KIND["odd"], "mean": jnp.zeros(())}, lambda old, x, key: passed(old, x)
        )
    )
    assert bits_of(steps.trees(steps.step()[0])[2]["odd"]) == bits_of(EVERY_KIND["odd"])


def test_two_leaves_that_change_places_have_changed():
    """Handed back untouched, but not at their own place."""
    before = {"a": jnp.zeros(2), "b": jnp.ones(2)}
    steps = Steps(Stateful(before, lambda old, x, key: {"a": old["b"], "b": old["a"]}))
    _, _, model = steps.trees(steps.step()[0])
    assert (model["a"].tolist(), model["b"].tolist()) == ([1, 1], [0, 0])


FLOATS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@pytest.fixture(scope="module")
def floats() -> Steps:
    before = {name: jnp.full(3, -0.0, dtype) for name, dtype in FLOATS.items()}
    return Steps(
        Stateful(
            before,
            lambda old, x, key: {name: x.mean(0).astype(dtype) for name, dtype in FLOATS.items()},
        )
    )


@pytest.mark.parametrize("name", FLOATS)
def test_a_changed_floating_leaf_becomes_the_weighted_mean(floats, name):
    """Over shards, in float32, cast back to its own dtype at the end."""
    steps = floats.on(Linear().dataset(MASKS["fractions"]))
    _, _, model = steps.trees(steps.step(split=[[0], [1, 2]])[0])
    shards = [jnp.asarray(x.mean(0)).astype(FLOATS[name]) for x in X.reshape(3, SIZE, 3)]
    weights = np.sum(np.reshape(MASKS["fractions"], (3, SIZE)), 1)
    wanted = jnp.asarray(np.average(np.float32(shards), 0, weights)).astype(FLOATS[name])
    assert model[name].dtype == wanted.dtype
    np.testing.assert_allclose(np.float32(model[name]), np.float32(wanted), rtol=1e-6)


def test_without_any_weight_a_floating_leaf_stays_as_it_was(floats):
    """There is no mean to take."""
    steps = floats.on(Linear().dataset([0] * 12))
    assert bits_of(steps.trees(steps.step()[0])[2]["float32"]) == bits_of(jnp.full(3, -0.0))


def first_row_as(dtype: Any) -> Any:
    """A shard's own value of any dtype: a function of its first sample."""

    def change(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return jax.lax.complex(x[0], x[1])
        return x[0] > 0 if dtype == jnp.bool_ else (x[0] * 100).astype(dtype)

    return change


NO_FLOATS = {
    np.dtype(d).name: d
    for d in (jnp.int32, jnp.uint32, jnp.int8, jnp.uint16, jnp.bool_, jnp.complex64)
}
KEYS = {impl: jax.random.key(3, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg")}


def counts_and_keys(old: Any, x: jax.Array, key: Any) -> Any:
    leaves = {name: first_row_as(dtype)(x) for name, dtype in NO_FLOATS.items()}
    number = (x[0, 0] * 1000).astype(jnp.int32)
    return leaves | {impl: jax.random.fold_in(old[impl], number) for impl in KEYS}


@pytest.fixture(scope="module")
def counts() -> Steps:
    before = {name: jnp.zeros(3, dtype) for name, dtype in NO_FLOATS.items()} | KEYS
    return Steps(Stateful(before, counts_and_keys), Linear().dataset(MASKS["uneven"]))


@pytest.mark.parametrize("split", [ALONE, [[1, 2], [0]], [[1], [], [2, 0]]], ids=str)
def test_a_changed_leaf_that_is_no_float_is_shard_0_s(counts, split):
    """Integers, booleans, complex numbers, typed keys: the same bits whoever has shard 0."""
    _, _, model = counts.trees(counts.step(split=split)[0])
    wanted = counts_and_keys(KEYS, jnp.asarray(X), None)
    assert {n: (leaf.dtype, bits_of(leaf)) for n, leaf in model.items()} == {
        n: (leaf.dtype, bits_of(leaf)) for n, leaf in wanted.items()
    }


@pytest.mark.parametrize("model_state", [{"n": jnp.zeros(())}, {}], ids=["one leaf", "no leaf"])
def test_model_state_is_passed_exactly_when_init_params_gave_one(model_state):
    """An empty one is one."""
    traced(Stateful(model_state, lambda old, x, key: old), Source(Linear().dataset(), "dataset()"))


def test_every_shard_starts_from_the_committed_model_state():
    """Not from what the shard before it made of it."""
    steps = Steps(Stateful({"n": jnp.asarray(10.0)}, lambda old, x, key: {"n": old["n"] + 1}))
    state = steps.first
    for _ in range(2):
        state, _, _ = steps.step(state)
    assert float(steps.trees(state)[2]["n"]) == 12


class Normed(ftrain.Trainer):
    """A flax model with BatchNorm and dropout, merged inside `loss`."""

    def dataset(self) -> Any:
        return {"x": X, "y": Y}

    def init_params(self, key: jax.Array) -> Any:
        class Model(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                self.norm = nnx.BatchNorm(3, momentum=0.0, rngs=rngs)
                self.drop = nnx.Dropout(0.5, rngs=rngs)
                self.out = nnx.Linear(3, 1, rngs=rngs)

            def __call__(self, x: jax.Array) -> jax.Array:
                return self.out(self.drop(self.norm(x)))[:, 0]

        self.graph, params, rest = nnx.split(Model(nnx.Rngs(key)), nnx.Param, ...)
        return ftrain.Init(params, rest)

    def loss(self, params: Any, batch: Any, key: jax.Array, model_state: Any) -> Any:
        model = nnx.merge(self.graph, params, model_state)
        model.train()
        nnx.reseed(model, default=key)
        loss = ((model(batch["x"]) - batch["y"]) ** 2).mean()
        return ftrain.Loss(loss, model_state=nnx.state(model, nnx.Not(nnx.Param)))


def test_a_flax_model_with_batch_statistics_trains():
    """Its running mean is the mean over the shards, its loss falls, on any split."""
    steps = Steps(Normed())
    state, first, _ = steps.step(split=[[0], [1, 2]])
    mean = steps.trees(state)[2]["norm"]["mean"]
    np.testing.assert_allclose(mean[...], X.mean(0), rtol=1e-4, atol=1e-6)
    for _ in range(100):
        state, last, _ = steps.step(state)
    assert last["loss"] < first["loss"]


# Randomness.


class Drawing(Linear):
    """Tells what it drew."""

    def loss(self, params: Any, batch: Any, key: jax.Array) -> Any:
        return params["b"], {"draw": jax.random.uniform(key)}


@pytest.fixture(scope="module")
def drawing() -> Steps:
    return Steps(Drawing())


def draw(steps: Steps, shard: int, state: Committed | None = None) -> float:
    return steps.step(state, split=[[shard]])[1]["draw"]


def test_each_shard_and_step_has_a_key_of_its_own(drawing):
    """Nine draws of three shards in three steps, all different."""
    states = [drawing.first._replace(step=step) for step in range(3)]
    assert len({draw(drawing, shard, s) for shard in range(3) for s in states}) == 9


def test_the_key_does_not_depend_on_who_computes_the_shard(drawing):
    """The mean over shards is the same for every split: same keys wherever they are."""
    means = [drawing.step(split=split)[1]["draw"] for split in SPLITS]
    assert means == pytest.approx([means[0]] * len(SPLITS), rel=1e-6)


def test_the_key_does_not_depend_on_cursor_or_parameters(drawing):
    """Seed, step and shard alone: a changed batch size or state draws the same."""
    other = Committed(0, 12345, [x + 1 for x in drawing.first.leaves])
    assert draw(drawing, 1, other) == draw(drawing, 1)


def test_the_key_depends_on_the_seed(drawing):
    """Another run, other draws."""
    assert draw(Steps(Drawing(), seed=SEED + 1), 1) != draw(drawing, 1)


# Stop, retry, commit.


@pytest.mark.parametrize(("stop", "all_stop"), [((), False), ((1,), True), ((0, 1, 2), True)])
def test_a_request_to_stop_at_one_worker_reaches_all(linear, stop, all_stop):
    """It travels in the sum, so all stop at one step; it leaves the numbers alone."""
    steps = linear["even"]
    state, metrics, stopped = steps.step(split=[[0], [1], [2]], stop=stop)
    calm, same, _ = steps.step(split=[[0], [1], [2]])
    assert stopped is all_stop
    assert metrics == same and [bits_of(x) for x in state.leaves] == [
        bits_of(x) for x in calm.leaves
    ]


def test_a_worker_without_shards_can_ask_to_stop(linear):
    """More workers than shards."""
    assert linear["even"].step(split=[[0, 1, 2], []], stop=[1])[2] is True


def test_a_step_that_is_tried_again_gives_the_same_bits(linear):
    """Nothing of the committed state was donated to the first attempt."""
    steps = linear["uneven"]
    before = [bits_of(x) for x in steps.first.leaves]
    first, again = steps.step()[0], steps.step()[0]
    assert [bits_of(x) for x in first.leaves] == [bits_of(x) for x in again.leaves]
    assert [bits_of(x) for x in steps.first.leaves] == before


def test_no_number_of_shards_compiles_anything(linear):
    """A worker that takes over another's shards goes on at once."""
    steps, compiled, listening = linear["even"], [], [True]

    def heard(name: str, seconds: float, **fields: Any) -> None:
        if listening and "backend_compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    steps.programs.gradients(steps.first, [], stop=False)
    for count in (1, 2, 3):
        steps.programs.gradients(steps.first, steps.batches[:count], stop=True)
    jax.jit(lambda x: x + count).lower(1).compile()  # shows that compilations are heard
    listening.clear()
    assert len(compiled) == 1


class Counting(Linear):
    """Its update tells the step and cursor it saw, and returns others."""

    def update(self, state: Any, grads: Any) -> Any:
        new = super().update(state, grads)
        seen = {
            "seen_step": state.step.astype(jnp.float32),
            "seen_cursor": state.cursor.astype(jnp.float32),
        }
        return new.replace(step=state.step + 7, cursor=state.cursor * 0), seen


@pytest.fixture(scope="module")
def counting() -> Steps:
    return Steps(Counting())


def test_update_sees_the_step_before_its_own(counting):
    """0 in the first step, then 1."""
    first, metrics, _ = counting.step()
    _, later, _ = counting.step(first)
    assert (metrics["seen_step"], metrics["seen_cursor"]) == (0, 0)
    assert (later["seen_step"], later["seen_cursor"]) == (1, 12)


def test_step_and_cursor_are_ftrain_s_whatever_update_returns(counting):
    """One step and its samples further."""
    state, _, _ = counting.step()
    assert (state.step, state.cursor) == (1, SHARDS * SIZE)


def test_a_cursor_beyond_32_bits_is_kept_exactly(counting):
    """It is a Python integer; only inside update it is cut."""
    state, _, _ = counting.step(counting.first._replace(cursor=2**40))
    assert state.cursor == 2**40 + 12


def test_metrics_of_update_stand_beside_those_of_loss(counting):
    """Each under its own name."""
    assert set(counting.step()[1]) == {"loss", "miss", "seen_step", "seen_cursor"}


def test_the_first_state_depends_on_the_seed_alone():
    """Any worker may be the first donor, at any time."""

    class Random(Linear):
        def init_params(self, key):
            return {"w": jax.random.normal(key, (3,)), "b": jnp.zeros(())}

    def first(seed: int) -> list[bytes]:
        trainer = Random()
        spec, _ = traced(trainer, Source(trainer.dataset(), "dataset()"), seed=seed)
        return [bits_of(x) for x in initial_state(trainer, spec, seed).leaves]

    assert first(1) == first(1) != first(2)


# Refusals.


def refusal(trainer: Any) -> str:
    with pytest.raises(TrainerError) as caught:
        _, programs = traced(trainer, Source(trainer.dataset(), "dataset()"))
        programs.lower()
    return str(caught.value)


def linear_with(**methods: Any) -> Any:
    return type("T", (Linear,), methods)()


def test_integer_parameters_are_refused():
    """With the leaf's path and where they belong."""
    trainer = linear_with(init_params=lambda self, key: {"n": [jnp.zeros(2, jnp.int32)]})
    assert refusal(trainer) == (
        "init_params: params['n'][0] is int32[2]; parameters are floating, put other leaves into "
        "model_state: ftrain.Init(params, model_state)"
    )


LOSSES = {
    "a vector": (lambda p, b, k: b["x"] @ p["w"], "loss: returned float32[4]; it must be a float"),
    "an integer": (lambda p, b, k: jnp.int32(1), "loss: returned int32[]; it must be a float"),
    "a metric that is a vector": (
        lambda p, b, k: (p["b"], {"m": b["y"]}),
        "loss: metric 'm' is float32[4]; it must be a float scalar",
    ),
    "a metric that is an integer": (
        lambda p, b, k: (p["b"], {"m": jnp.int32(3)}),
        "loss: metric 'm' is int32[]; it must be a float scalar",
    ),
    "metrics that are no dict": (lambda p, b, k: (p["b"], p["b"]), "loss: metrics are "),
    "a metric without a name": (lambda p, b, k: (p["b"], {1: p["b"]}), "the metric name 1 is"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_returns_something_else_is_refused(what):
    """Each with what came and what must."""
    returns, message = LOSSES[what]
    assert message in refusal(linear_with(loss=lambda self, p, b, k: returns(p, b, k)))


def test_a_loss_that_forgets_to_return_is_refused():
    """The commonest slip of all."""
    assert "loss" in refusal(linear_with(loss=lambda self, params, batch, key: None))


@pytest.mark.parametrize(
    "name",
    [
        "t",
        "step",
        "loss",
        "samples",
        "workers",
        "step_time_s",
        "digest",
        "weight",
        "nonfinite",
        "eval_accuracy",
    ],
)
@pytest.mark.parametrize("where", ["loss", "update"])
def test_reserved_metric_names_are_refused(where, name):
    """They are keys of a metrics line already."""
    metrics = {name: jnp.float32(0)}
    returns = {
        "loss": lambda self, p, b, k: (p["b"], metrics),
        "update": lambda self, state, grads: (state, metrics),
    }
    message = refusal(linear_with(**{where: returns[where]}))
    assert message.startswith(f"{where}: the metric name {name!r} is ftrain's own")


def test_a_metric_of_both_loss_and_update_is_refused():
    """One would overwrite the other."""
    trainer = linear_with(update=lambda self, state, grads: (state, {"miss": jnp.float32(0)}))
    assert refusal(trainer) == ("update: metric 'miss' is already returned by loss; rename one")


MODEL_STATES = {
    "one leaf more": (lambda old, x, key: {**old, "more": x.mean()}, "model_state has the tree"),
    "one leaf less": (lambda old, x, key: {}, "model_state has the tree"),
    "a list for a dict": (lambda old, x, key: list(old.values()), "model_state has the tree"),
}


@pytest.mark.parametrize("what", MODEL_STATES)
def test_model_state_of_another_tree_is_refused(what):
    """Told with both trees."""
    change, message = MODEL_STATES[what]
    text = refusal(Stateful({"m": jnp.zeros((2, 3)), "n": jnp.int32(0)}, change))
    assert text.startswith(f"loss: {message}") and "init_params gave" in text


LEAVES = {
    "a transposed leaf": lambda old, x, key: {**old, "m": x[:2].T},
    "a larger leaf": lambda old, x, key: {**old, "m": x},
    "a float for a count": lambda old, x, key: {**old, "n": old["n"] + x.mean()},
    "a count for a float": lambda old, x, key: {**old, "m": jnp.ones((2, 3), jnp.int32)},
}


@pytest.mark.parametrize("what", LEAVES)
def test_model_state_of_another_shape_or_dtype_is_refused(what):
    """Told with the leaf and both sides, before a step is tried."""
    text = refusal(Stateful({"m": jnp.zeros((2, 3)), "n": jnp.int32(0)}, LEAVES[what]))
    assert text.startswith("loss: model_state")


UPDATES = {
    "another dtype": (
        lambda state: state.replace(
            params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
        ),
        "params['b']: float32[] became params['b']: bfloat16[]",
    ),
    "another shape": (
        lambda state: state.replace(params={**state.params, "w": jnp.zeros(4)}),
        "params['w']: float32[3] became params['w']: float32[4]",
    ),
    "a leaf more": (
        lambda state: state.replace(params={**state.params, "z": jnp.zeros(())}),
        "became",
    ),
    "a leaf less": (lambda state: state.replace(params={"b": state.params["b"]}), "became"),
    "other node types": (lambda state: state.replace(params=list(state.params.values())), "became"),
    "model state from nowhere": (
        lambda state: state.replace(model_state={"m": jnp.zeros(())}),
        "became",
    ),
}


@pytest.mark.parametrize("what", UPDATES)
def test_an_update_that_returns_another_tree_is_refused(what):
    """Shapes and dtypes of a run never change; the first difference is told with both sides."""
    returns, message = UPDATES[what]
    text = refusal(linear_with(update=lambda self, state, grads: returns(state)))
    assert text.startswith("update: must return a state of the same tree") and message in text


@pytest.mark.parametrize("returned", ["params", "nothing"])
def test_an_update_that_returns_no_state_is_refused(returned):
    """The new parameters alone, or a forgotten return."""
    trainer = linear_with(
        update=lambda self, state, grads: state.params if returned == "params" else None
    )
    assert "update" in refusal(trainer)

"""Data by index: the three forms, what is refused and how, and the thread that reads ahead."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.data import Dataset, ShardReader, Source, shards_of
from ftrain.errors import DatasetError

QUICK = settings(max_examples=100, deadline=None, database=None)
LENGTH = 10
IMAGES = np.arange(LENGTH * 6, dtype=np.float32).reshape(LENGTH, 2, 3)
LABELS = np.arange(LENGTH, dtype=np.int32) * 3
DEADLINE_S = 20.0


class Samples:
    """A data set of one's own, from a list of samples."""

    def __init__(self, *samples: Any):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.samples[index]


class Vectorised(Samples):
    """With `batch_at`, and no use of [i]."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("batch_at is there: [i] must not be used")

    def batch_at(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"image": IMAGES[indices], "label": LABELS[indices]}


class Recording(Samples):
    """Notes which samples are read; waits at a gate before each."""

    def __init__(self, length: int):
        super().__init__(*range(length))
        self.read: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def __getitem__(self, index: int) -> np.float32:
        assert self.gate.wait(DEADLINE_S)
        self.read.append(index)
        return np.float32(index)


def one_by_one() -> Samples:
    return Samples(*({"image": i, "label": n} for i, n in zip(IMAGES, LABELS, strict=True)))


FORMS = {
    "dict": lambda: {"image": IMAGES, "label": LABELS},
    "indexed": one_by_one,
    "batch_at": lambda: Vectorised(*range(LENGTH)),
    "grain": lambda: grain.MapDataset.source(one_by_one()),
}


def refusal(dataset: Any, *, batch: list[int] | None = None) -> str:
    """The message with which a data set is refused, at once or at a later batch."""
    if batch is None:
        with pytest.raises(DatasetError) as caught:
            Source(dataset, "dataset()")
    else:
        source = Source(dataset, "dataset()")
        with pytest.raises(DatasetError) as caught:
            source.batch(np.array(batch))
    return str(caught.value)


# The three forms.


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_batch(form):
    """A dict of arrays, [i], batch_at and grain: same tree, dtypes and values."""
    source = Source(FORMS[form](), "dataset()")
    image, label = source.batch(np.array([3, 0, 9]))
    np.testing.assert_array_equal(image, IMAGES[[3, 0, 9]], strict=True)
    np.testing.assert_array_equal(label, LABELS[[3, 0, 9]], strict=True)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_tells_the_same_length_and_shapes(form):
    """What programs are compiled for does not depend on the form."""
    source = Source(FORMS[form](), "dataset()")
    shapes = [(s.shape, s.dtype) for s in source.shapes(4)]
    assert source.length == LENGTH
    assert shapes == [((4, 2, 3), np.float32), ((4,), np.int32)]


@pytest.mark.parametrize("form", ["dict", "indexed", "batch_at"])
def test_an_index_beyond_the_epoch_wraps_round(form):
    """`epoch * length + index` is sample `index` for a data set without augmentations."""
    source = Source(FORMS[form](), "dataset()")
    _, label = source.batch(np.array([2 * LENGTH + 4]))
    assert label.tolist() == [12]


def test_the_protocol_describes_what_is_taken():
    """`isinstance(x, ftrain.Dataset)` holds for a class with len() and [i]."""
    assert isinstance(Samples(1), Dataset) and not isinstance(iter([1]), Dataset)


@pytest.mark.parametrize(
    ("given_as", "wanted"),
    [
        (np.float64, np.float32),
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.complex128, np.complex64),
        (np.bool_, np.bool_),
        (np.uint8, np.uint8),
    ],
)
def test_samples_come_in_the_dtype_that_jax_computes_with(given_as, wanted):
    """64-bit data is cut to 32 bits once, where it is read; the rest stays."""
    source = Source({"x": np.ones(3, given_as)}, "dataset()")
    assert source.batch(np.array([0, 1]))[0].dtype == wanted


def test_a_sample_may_be_a_plain_number():
    """A tree of one leaf, a Python number."""
    assert Source(Samples(1.5, 2.5), "dataset()").batch(np.array([1, 0]))[0].tolist() == [2.5, 1.5]


# grain.


def augmented() -> grain.MapDataset:
    return (
        grain.MapDataset.source(Samples(*map(np.float32, range(LENGTH))))
        .seed(3)
        .random_map(lambda x, rng: x + np.float32(rng.random()))
    )


def test_grain_augments_differently_in_every_epoch():
    """The same sample in two epochs: two draws of its seeded random_map."""
    source = Source(augmented(), "dataset()")
    [values] = source.batch(np.array([4, LENGTH + 4]))
    assert np.floor(values).tolist() == [4, 4] and values[0] != values[1]


def test_grain_augments_alike_after_a_fault():
    """The same (epoch, index), read again in another process and another batch: the same draw."""
    [first] = Source(augmented(), "dataset()").batch(np.array([LENGTH + 4, 7]))
    [again] = Source(augmented(), "dataset()").batch(np.array([2, LENGTH + 4]))
    assert first[0] == again[1]


# Refusals.


def test_strings_are_refused():
    """A string is no number, and its path is named."""
    assert refusal(Samples({"a": {"b": "text"}})) == (
        "dataset()[0]['a']['b']: <U4 is no number; encode it beforehand"
    )


def test_objects_are_refused():
    """A Python object neither."""
    assert "dataset()[0]['a']: object is no number" in refusal(Samples({"a": {1, 2}}))


def test_dates_are_refused():
    """numpy has a dtype for them, JAX has none."""
    assert "is no number; encode it" in refusal(Samples(np.datetime64("2024-01-01")))


def test_a_structured_array_is_refused():
    """Record arrays are no numbers for JAX; told in one line, not by a traceback of JAX's."""
    assert "dataset()[0]['a']" in refusal({"a": np.zeros(3, [("x", np.int32)])})


def test_a_dict_of_ragged_lists_is_refused():
    """Rows of unequal length make no array."""
    assert "dataset()" in refusal({"a": [[1.0], [1.0, 2.0]]})


def test_ragged_samples_are_refused_with_their_index():
    """A later sample of another shape names itself and the one it differs from."""
    data = Samples(np.zeros(2), np.zeros(2), np.zeros(3))
    message = refusal(data, batch=[1, 2])
    assert "sample 2: float64[3], sample 1 has float64[2]; pad or cut them" in message


def test_a_changed_dtype_is_refused_with_its_index():
    """Silently converting a float to the integer of sample 0 would change the data."""
    data = Samples({"x": 1}, {"x": 2}, {"x": 0.5})
    message = refusal(data, batch=[1, 2])
    assert "sample 2['x']: float64[], sample 1 has int64[]; pad or cut them" in message


def test_a_batch_whose_samples_all_differ_from_sample_0_is_refused():
    """Alike among themselves, but not what was compiled for; the indices are named."""
    data = Samples({"x": 1}, {"x": 0.5}, {"x": 0.25})
    message = refusal(data, batch=[1, 2])
    assert "dataset()[1, 2]['x']: float64[2], sample 0 asks for int32[2]" in message


def test_a_changed_tree_is_refused_with_its_index():
    """A key that only some samples have."""
    message = refusal(Samples({"x": 1}, {"x": 1}, {"y": 1}), batch=[1, 2])
    assert "sample 2 has the tree" in message


def test_none_is_refused():
    """In sample 0, at the start."""
    assert "sample 0: None; a filtered data set has holes" in refusal(Samples(None))


def test_a_refused_sample_says_of_which_data_set():
    """dataset() and eval_dataset() both have a sample 1."""
    assert "dataset()" in refusal(Samples(np.zeros(2), np.zeros(3)), batch=[0, 1])


def test_a_hole_of_a_filtered_grain_data_set_is_refused_with_its_index():
    """grain gives None for what a filter took out."""
    data = grain.MapDataset.source(Samples(*range(LENGTH))).filter(lambda x: x != 4)
    message = refusal(data, batch=[3, 4])
    assert "sample 4: None; a filtered data set has holes, select its indices" in message


def test_a_hole_in_a_later_epoch_is_named_by_its_sample():
    """Sample 4 of the second epoch is called sample 4."""
    data = grain.MapDataset.source(Samples(*range(LENGTH))).filter(lambda x: x != 4)
    assert "sample 4: None" in refusal(data, batch=[LENGTH + 4])


def test_an_endless_data_set_is_refused():
    """`.repeat()`: ftrain makes the epochs."""
    assert refusal(FORMS["grain"]().repeat()) == (
        "dataset(): its length is not finite; leave out .repeat(), ftrain makes the epochs"
    )


@pytest.mark.parametrize(
    "stream",
    [lambda: FORMS["grain"]().to_iter_dataset(), lambda: (i for i in range(3)), lambda: {1, 2}],
)
def test_a_stream_is_refused_in_one_line(stream):
    """What has no len() and [i] cannot be read from the middle."""
    message = refusal(stream())
    assert "has no len() and [i]" in message and "\n" not in message


@pytest.mark.parametrize("empty", [Samples(), {"x": np.zeros((0, 3))}])
def test_an_empty_data_set_is_refused(empty):
    """No sample, no step."""
    assert refusal(empty) == "dataset(): has 0 samples; it needs at least 1"


def test_unequally_long_arrays_are_refused_with_their_lengths():
    """Which array is short can be read off the message."""
    assert "{'x': 3, 'y': 2}" in refusal({"x": np.zeros(3), "y": np.zeros(2)})


def test_an_empty_dict_is_refused():
    """Nothing to train on, told as such."""
    assert "dataset()" in refusal({})


def test_a_dict_of_scalars_is_refused():
    """An array without a sample axis."""
    assert "dataset()" in refusal({"x": np.float32(1)})


def test_a_batch_at_that_returns_too_few_samples_is_refused():
    """A vectorised read that drops some of what it was asked for."""

    class Short(Vectorised):
        def batch_at(self, indices):
            return super().batch_at(indices[:1])

    assert "[0, 1]" in refusal(Short(*range(LENGTH)), batch=[0, 1])


# The reader.


def reader(
    dataset: Any, *, prefetch_steps: int = 1, threads: int = 1, **options: int
) -> ShardReader:
    """Steps of 6 samples in 3 shards, in order, or as `options` say."""
    return ShardReader(
        Source(dataset, "dataset()"),
        seed=0,
        **{"shuffle": False, "batch_size": 6, "batch_shards": 3, **options},
        prefetch_steps=prefetch_steps,
        threads=threads,
    )


def values(batches: list[tuple[int, list[np.ndarray]]]) -> dict[int, list[float]]:
    return {shard: batch[0].tolist() for shard, batch in batches}


def until_read(data: Recording, count: int) -> list[int]:
    """Waits until the background thread has read `count` samples."""
    waiting = threading.Event()
    for _ in range(int(DEADLINE_S / 0.005)):
        if len(data.read) >= count:
            break
        waiting.wait(0.005)
    return list(data.read)


def test_a_step_s_shards_are_its_samples_in_order():
    """Shard s of the step at cursor c has the samples c + s * size and on."""
    got = reader(Recording(100)).shards(12, [0, 1, 2])
    assert values(got) == {0: [12, 13], 1: [14, 15], 2: [16, 17]}


def test_only_the_worker_s_own_shards_are_read():
    """Neither of this step nor of the next are other workers' samples touched."""
    data = Recording(100)
    own = reader(data)
    data.read.clear()
    own.shards(0, [1])
    assert sorted(until_read(data, 4)) == [2, 3, 8, 9]


def test_the_next_step_is_read_ahead():
    """While this step runs; when it is asked for, only the one after it is read."""
    data = Recording(100)
    own = reader(data)
    own.shards(0, [0])
    until_read(data, 5)  # sample 0 for its shape, 0 and 1, and 6 and 7 ahead
    data.read.clear()
    assert values(own.shards(6, [0])) == {0: [6, 7]}
    assert sorted(until_read(data, 2)) == [12, 13]


def test_without_prefetch_nothing_is_read_ahead():
    """prefetch_steps=0 holds one batch in memory."""
    data = Recording(100)
    own = reader(data, prefetch_steps=0)
    data.read.clear()
    own.shards(0, [0])
    own._pool.shutdown()
    assert data.read == [0, 1]


def test_a_change_of_the_set_reads_only_what_is_new():
    """What was read ahead for shards that stay with this worker is kept."""
    data = Recording(100)
    own = reader(data)
    own.shards(0, [0])
    until_read(data, 5)
    data.read.clear()
    assert values(own.shards(6, [0, 1])) == {0: [6, 7], 1: [8, 9]}  # it took over shard 1
    assert set(until_read(data, 6)) == {8, 9, 12, 13, 14, 15}


def test_a_step_that_is_tried_again_gets_the_same_samples():
    """The cursor did not move, so neither do the samples."""
    own = reader(Recording(100))
    first = values(own.shards(6, [0, 2]))
    assert values(own.shards(6, [0, 2])) == first == {0: [6, 7], 2: [10, 11]}


def test_what_was_read_for_earlier_steps_is_let_go():
    """A worker that was given other shards meanwhile does not hoard what it read ahead."""
    own = reader(Recording(1000))
    for step in range(20):
        own.shards(6 * step, [step % 3])
    assert all(cursor >= 6 * 19 for cursor, _ in own._reads)


def test_shards_come_in_the_order_asked_for_from_several_threads():
    """However the threads overtake one another."""
    got = reader(Recording(100), threads=3).shards(0, [2, 0, 1])
    assert [shard for shard, _ in got] == [2, 0, 1]
    assert values(got) == {2: [4, 5], 0: [0, 1], 1: [2, 3]}


def test_an_exception_of_the_data_set_surfaces_where_the_samples_are_used():
    """Not in the thread that read ahead, and with its own type: it is this worker's local error."""

    class Broken(Recording):
        def __getitem__(self, index):
            if index == 7:
                raise OSError("disk is gone")
            return super().__getitem__(index)

    own = reader(Broken(100))
    own.shards(0, [0])  # reads 6 and 7 ahead
    with pytest.raises(OSError, match="disk is gone"):
        own.shards(6, [0])


def test_what_has_been_read_is_ready_and_what_has_not_is_not_waited_for():
    """Asking reads nothing, and does not show the error of what could not be read."""
    source = Recording(100)
    own = reader(source, prefetch_steps=0)
    source.read.clear()
    assert own.ready(0, [0]) is None
    own.read_ahead(-6, [0])  # nothing: so many steps ahead as it was told
    assert own.ready(0, [0]) is None and not source.read
    own = reader(source)
    own.shards(0, [0])  # reads 6 and 7 ahead
    assert until_read(source, 4)[-2:] == [6, 7]
    own.shards(0, [1])  # after what its one thread was at
    assert values(own.ready(6, [0])) == {0: [6, 7]}
    assert own.ready(6, [0]) is None  # it was taken


def test_a_read_that_failed_is_tried_again():
    """The step's second attempt does not meet the first one's stored exception."""

    class Flaky(Recording):
        failed = False

        def __getitem__(self, index):
            if index == 1 and not self.failed:
                self.failed = True
                raise OSError("once")
            return super().__getitem__(index)

    own = reader(Flaky(100))
    with pytest.raises(OSError, match="once"):
        own.shards(0, [0])
    assert values(own.shards(0, [0])) == {0: [0, 1]}


def test_reading_goes_on_behind_the_caller_s_back():
    """`shards` returns when its own samples are there; the next step's need not be."""

    class Gated(Recording):
        def __getitem__(self, index):
            if index >= 6:
                assert self.gate.wait(DEADLINE_S)
            self.read.append(index)
            return np.float32(index)

    data = Gated(100)
    own = reader(data)
    data.gate.clear()
    try:
        assert values(own.shards(0, [0])) == {0: [0, 1]}
    finally:
        data.gate.set()


def test_samples_are_named_by_cursor_and_by_index_of_the_data_set():
    """What a user looks up: the index is the data set's in whatever epoch, shuffled or not."""
    assert reader(Recording(100)).name(198, 2) == "2 samples from cursor 202 on, 2 3 of dataset()"
    shuffled = reader(Recording(100), shuffle=True)
    read = values(shuffled.shards(198, [2]))[2]
    first, second = (int(index) % 100 for index in read)
    assert shuffled.name(198, 2).endswith(f", {first} {second} of dataset()")
    many = reader(Recording(100), batch_size=30, batch_shards=3).name(0, 1)
    assert many == "10 samples from cursor 10 on, 10 11 12 13 14 15 16 17 ... of dataset()"


# The end of a run.


def test_the_last_batch_is_whole_shards_and_one_shorter_one():
    """The run ends at cursor 15; of the six samples from 12 on there are three."""
    got = reader(Recording(100), end=15).shards(12, [0, 1, 2])
    assert [shard for shard, _ in got] == [0, 1, 2]
    assert [None if batch is None else batch[0].tolist() for _, batch in got] == [
        [12, 13],
        [14],
        None,
    ]


def test_nothing_is_read_beyond_the_end_of_a_run():
    """Neither for its last step nor ahead of it."""
    data = Recording(100)
    own = reader(data, end=9, prefetch_steps=3)
    data.read.clear()
    own.shards(0, [0, 1, 2])
    own.shards(6, [0, 1, 2])
    own._pool.shutdown()
    assert data.read == list(range(9))


# Who has which shard.


@QUICK
@given(st.integers(1, 64), st.integers(1, 80))
def test_every_shard_is_somebody_s_and_nobody_else_s(ranks, shards):
    """Nothing is left out or done twice, whoever is alive."""
    held = [s for rank in range(ranks) for s in shards_of(rank, ranks, shards)]
    assert held == list(range(shards))


@QUICK
@given(st.integers(1, 64), st.integers(1, 80))
def test_counts_of_shards_differ_by_one_at_most(ranks, shards):
    """A step waits for the worker with most shards."""
    counts = [len(shards_of(rank, ranks, shards)) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


@QUICK
@given(st.integers(1, 64), st.integers(1, 80))
def test_a_worker_s_shards_are_neighbours(ranks, shards):
    """So that a read may be one stretch of a file."""
    gaps = {
        b - a
        for rank in range(ranks)
        for a, b in itertools.pairwise(shards_of(rank, ranks, shards))
    }
    assert gaps <= {1}

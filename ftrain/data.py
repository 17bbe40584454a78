"""Training data by index: the three forms a data set may have, and the thread that reads ahead.

A worker reads only the samples of its own shards. Which samples those are is a pure function of the
committed cursor (`order`), so a step that is tried again reads the same ones, whoever is alive.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from ftrain.errors import DatasetError
from ftrain.order import ShardOrder

INDICES_TOLD = 8

Batch = list[np.ndarray]  # leaves with a leading axis of samples


@runtime_checkable
class Dataset(Protocol):
    """A data set of one's own; a dict of equally long arrays or a `grain.MapDataset` will do too.

    `batch_at(indices) -> batch`, vectorised, is used instead of `[i]` where it exists.
    """

    def __len__(self) -> int:
        """The number of samples, finite and >= 1."""
        ...

    def __getitem__(self, index: int) -> Any:
        """Sample `index`: a tree of numbers and numpy arrays, alike for every index."""
        ...


class Source:
    """A data set in any of the three forms, as batches of leaves of one fixed tree and dtype.

    Raises:
      DatasetError: the data set cannot be used, and why.
    """

    def __init__(self, dataset: Any, name: str):
        self.name = name
        self.length = _length(dataset, name)
        self._fetch = _fetcher(dataset, name, self.length)
        self._batch_first = isinstance(dataset, dict) or hasattr(dataset, "batch_at")
        first = self._fetch(np.zeros(1, np.int64))
        leaves, self.treedef = _flatten(first, f"{name}[0]")
        self.samples = [_checked_leaf(leaf, path, f"{name}[0]") for path, leaf in leaves]

    def shapes(self, samples: int) -> list[jax.ShapeDtypeStruct]:
        """The leaves of a batch of so many samples."""
        return [jax.ShapeDtypeStruct((samples, *s.shape), s.dtype) for s in self.samples]

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples at `indices` (as `sample_indices` gives them), stacked.

        Raises:
          DatasetError: a sample differs from sample 0 in tree, shape or dtype; names its index.
        """
        leaves, treedef = _flatten(self._fetch(indices), self.name)
        where = f"{self.name}{[int(i) % self.length for i in indices[:4]]}"
        if treedef != self.treedef:
            raise DatasetError(
                f"{where}: the sample's tree is {treedef}, sample 0 has "
                f"{self.treedef}; every sample must have the same tree"
            )
        return [
            self._like_first(leaf, path, first, len(indices), where)
            for (path, leaf), first in zip(leaves, self.samples, strict=True)
        ]

    def _like_first(
        self, leaf: Any, path: str, first: np.ndarray, samples: int, where: str
    ) -> np.ndarray:
        array = np.asarray(leaf)
        wanted = (samples, *first.shape)
        same = jax.dtypes.canonicalize_dtype(array.dtype) == first.dtype
        if array.shape != wanted or not same:
            raise DatasetError(
                f"{where}{path}: {array.dtype}{list(array.shape)}, sample 0 asks for "
                f"{first.dtype}{list(wanted)}; shapes and dtypes must not change"
            )
        narrow = array.astype(first.dtype, copy=False)
        if (
            array.dtype.kind in "iu"
            and narrow.itemsize < array.itemsize
            and np.any(narrow != array)
        ):
            raise DatasetError(
                f"{where}{path}: {array.dtype} values that {first.dtype} cannot hold, and JAX "
                "computes with that; make them smaller, or set JAX_ENABLE_X64=1"
            )
        return narrow


def _length(dataset: Any, name: str) -> int:
    if isinstance(dataset, dict):
        lengths = {key: len(_array(value, f"{name}[{key!r}]")) for key, value in dataset.items()}
        if len(set(lengths.values())) != 1:
            raise DatasetError(
                f"{name}: the arrays of a dict must be equally long; they are {lengths}"
            )
        length = next(iter(lengths.values()))
    elif not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DatasetError(
            f"{name}: {type(dataset).__name__} has no len() and [i]; ftrain needs "
            "random access, so that no fault repeats or skips a sample: give a "
            "dict of arrays, a class with both, or a grain.MapDataset"
        )
    else:
        length = len(dataset)
    if length < 1:
        raise DatasetError(f"{name}: has {length} samples; it needs at least 1")
    if length >= 2**62:
        raise DatasetError(
            f"{name}: its length is not finite; leave out .repeat(), ftrain makes the epochs"
        )
    return length


def _array(value: Any, where: str) -> np.ndarray:
    """One array of a dict data set, samples along its first axis."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DatasetError(f"{where}: {error}; its rows must be equally long") from None
    if array.ndim < 1:
        raise DatasetError(f"{where}: {array.dtype} without an axis of samples")
    return array


def _fetcher(dataset: Any, name: str, length: int) -> Callable[[np.ndarray], Any]:
    """A function from indices to a batch tree."""
    if isinstance(dataset, dict):
        arrays = {key: np.asarray(value) for key, value in dataset.items()}
        return lambda indices: {key: array[indices % length] for key, array in arrays.items()}
    if hasattr(dataset, "batch_at"):
        return lambda indices: dataset.batch_at(indices % length)
    # grain is not imported to ask: epoch * length + index gives its random_map other augmentations
    # each epoch, and the same ones after any fault.
    grain = any(
        c.__name__ == "MapDataset" and c.__module__.startswith("grain")
        for c in type(dataset).__mro__
    )
    return lambda indices: _stack(
        [dataset[int(i if grain else i % length)] for i in indices],
        [int(i) % length for i in indices],
        name,
    )


def _stack(samples: Sequence[Any], indices: Sequence[int], name: str) -> Any:
    flat = [
        _flatten(sample, f"{name}: sample {i}") for sample, i in zip(samples, indices, strict=True)
    ]
    first_leaves, first_tree = flat[0]
    for (leaves, tree), i in zip(flat, indices, strict=True):
        if tree != first_tree:
            raise DatasetError(
                f"{name}: sample {i} has the tree {tree}, sample {indices[0]} has "
                f"{first_tree}; every sample must have the same tree"
            )
        for (path, leaf), (_, first) in zip(leaves, first_leaves, strict=True):
            a, b = np.asarray(leaf), np.asarray(first)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise DatasetError(
                    f"{name}: sample {i}{path}: {a.dtype}{list(a.shape)}, sample "
                    f"{indices[0]} has {b.dtype}{list(b.shape)}; pad or cut them"
                )
    columns = zip(*([np.asarray(leaf) for _, leaf in leaves] for leaves, _ in flat), strict=True)
    return jax.tree.unflatten(first_tree, [np.stack(column) for column in columns])


def _flatten(tree: Any, where: str) -> tuple[list[tuple[str, Any]], Any]:
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    for path, leaf in flat:
        if leaf is None:
            raise DatasetError(
                f"{where}{jax.tree_util.keystr(path)}: None; a filtered data set "
                "has holes, select its indices beforehand instead"
            )
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat], treedef


def _checked_leaf(leaf: Any, path: str, where: str) -> np.ndarray:
    """Sample 0's leaf, without the batch axis, in the dtype that JAX will compute with."""
    array = np.asarray(leaf)
    if array.dtype.kind in "OUSMm" or array.dtype.names:
        raise DatasetError(f"{where}{path}: {array.dtype} is no number; encode it beforehand")
    if array.ndim < 1:
        raise DatasetError(f"{where}{path}: batch_at gave no batch axis")
    return np.zeros(array.shape[1:], jax.dtypes.canonicalize_dtype(array.dtype))


class _Read(NamedTuple):
    """One shard of those that a task of the thread reads together."""

    future: concurrent.futures.Future[list[Batch]]
    number: int

    def batch(self) -> Batch:
        return self.future.result()[self.number]

    def is_there(self) -> bool:
        return self.future.done() and self.future.exception() is None


class ShardReader:
    """Reads the shards of a step in a background thread, and those of the next step ahead of it."""

    def __init__(
        self,
        source: Source,
        *,
        seed: int,
        shuffle: bool,
        batch_size: int,
        batch_shards: int,
        prefetch_steps: int,
        threads: int,
        end: int | None = None,
    ):
        self._source = source
        self._end = end  # the cursor at the end of the run; None: there is always a next batch
        self._batch_size, self._shard_size = batch_size, batch_size // batch_shards
        self._order = ShardOrder(
            source.length,
            seed=seed,
            shuffle=shuffle,
            batch_size=batch_size,
            shard_size=self._shard_size,
            shards=batch_shards,
        )
        self._prefetch_steps = prefetch_steps
        self._threads = threads
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "ftrain-data")
        self._reads: dict[tuple[int, int], _Read] = {}

    def shards(self, cursor: int, shards: Iterable[int]) -> list[tuple[int, Batch | None]]:
        """The batches of `shards` of the step that starts at `cursor`; reads the next ahead.

        In the run's last step one may be shorter, and None stands for those without any sample.
        What was read ahead for shards that stay with this worker is kept over a change of the set.

        Raises:
          DatasetError, or whatever the data set raised.
        """
        shards = list(shards)
        self._read(cursor, shards)
        self.read_ahead(cursor, shards)
        return self._take(cursor, shards)

    def ready(self, cursor: int, shards: Sequence[int]) -> list[tuple[int, Batch | None]] | None:
        """As `shards`, if they have been read; else None. Never waits, raises or reads."""
        keys = [(cursor, s) for s in shards if self._samples(cursor, s)]
        if not all(key in self._reads and self._reads[key].is_there() for key in keys):
            return None
        return self._take(cursor, shards)

    def read_ahead(self, cursor: int, shards: Sequence[int]) -> None:
        """Begins to read the same shards of the steps after the one that starts at `cursor`.

        Where something is about to be dispatched, that comes first: the thread that begins to read
        takes the interpreter's lock from who would dispatch it.
        """
        for key in [key for key in self._reads if key[0] < cursor]:
            self._reads.pop(key).future.cancel()
        for step in range(1, 1 + self._prefetch_steps):
            self._read(cursor + step * self._batch_size, shards)

    def _take(self, cursor: int, shards: Sequence[int]) -> list[tuple[int, Batch | None]]:
        reads = [self._reads.pop((cursor, s), None) for s in shards]
        return [(s, read and read.batch()) for s, read in zip(shards, reads, strict=True)]

    def _read(self, cursor: int, shards: Sequence[int]) -> None:
        """Has those read that are not yet: all in one go, or in as many as there are threads.

        A call of the data set, and a task for the thread, cost as much as many samples do.
        """
        missing = [s for s in shards if (cursor, s) not in self._reads and self._samples(cursor, s)]
        tasks = min(self._threads, len(missing))
        for part in (missing[i::tasks] for i in range(tasks)):
            future = self._pool.submit(self._fetch, cursor, part)
            for number, shard in enumerate(part):
                self._reads[cursor, shard] = _Read(future, number)

    def _fetch(self, cursor: int, shards: list[int]) -> list[Batch]:
        indices = [self._indices(cursor, shard) for shard in shards]
        ends = np.cumsum([len(part) for part in indices])
        leaves = self._source.batch(np.concatenate(indices))
        return [list(cut) for cut in zip(*(np.split(x, ends[:-1]) for x in leaves), strict=True)]

    def _samples(self, cursor: int, shard: int) -> int:
        """The samples of a shard: none beyond the end of the run."""
        left = self._shard_size
        if self._end is not None:
            left = self._end - cursor - shard * self._shard_size
        return max(0, min(self._shard_size, left))

    def _indices(self, cursor: int, shard: int) -> np.ndarray:
        start = cursor + shard * self._shard_size
        return self._order.samples(start)[: self._samples(cursor, shard)]

    def name(self, cursor: int, shard: int) -> str:
        """What a shard's samples are found by: `2 samples from cursor 54 on, 7 2 of dataset()`."""
        indices = (self._indices(cursor, shard) % self._source.length).tolist()
        first = " ".join(map(str, indices[:INDICES_TOLD])) + " ..." * (len(indices) > INDICES_TOLD)
        return (
            f"{len(indices)} sample{'s' * (len(indices) > 1)} from cursor "
            f"{cursor + shard * self._shard_size} on, {first} of dataset()"
        )


def shards_of(rank: int, ranks: int, batch_shards: int) -> list[int]:
    """The shards of the device of that rank: neighbours, and counts differ by one at most."""
    return [s for s in range(batch_shards) if rank_of(s, ranks, batch_shards) == rank]


def rank_of(shard: int, ranks: int, batch_shards: int) -> int:
    """The rank of the device that has that shard."""
    return shard * ranks // batch_shards

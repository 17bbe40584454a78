"""State on its way between workers: packing, buckets, digests. The data plane is one of threads.

Ranks are threads that meet in a barrier, so that the code under test is exactly what a worker runs,
without processes and networks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.digests import Digests, digest_of
from ftrain.errors import AttemptFailedError
from ftrain.mesh import DataPlane, Summing
from ftrain.state import (
    Committed,
    StateSpec,
    cut_bytes,
    host_bytes,
    join_bytes,
    spec_of,
    to_host,
)
from ftrain.sync import HEADER, Synced, sync_state
from ftrain.table import Table
from ftrain.transfer import BUCKET_WORDS, Transfer
from tests.test_state import EVERY_KIND, bits_of, state_of

QUICK = settings(max_examples=50, deadline=None, database=None)
DEADLINE_S = 20.0


def compiled(traced: Any) -> Any:
    traced.lower()
    traced.compile(lambda lowered: lowered.compile())
    return traced


def table_of(size: int) -> Table:
    shapes = [
        jax.ShapeDtypeStruct((1, 1, 5), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 1, size + 3), jnp.float32),
    ]
    return compiled(Table(shapes, size))


class Plane(DataPlane):
    """The data plane of one rank, but for its sum; `meeting` is what its ranks share."""

    def __init__(self, meeting: Meeting, rank: int):
        self.workers, self.rank, self._meeting = meeting.workers, rank, meeting
        self._home = jax.local_devices()[0]
        self._table = table_of(HEADER.size * len(self.workers))

    def begin_sum(self, buffers: list[jax.Array]) -> Summing:
        return Summing([jnp.asarray(total) for total in self._meeting.sum(self.rank, buffers)])


class Meeting:
    """All ranks of a view: each sum waits for every one of them."""

    def __init__(self, workers: Sequence[int], spoil: Callable[[int, np.ndarray], None]):
        self.workers, self.spoil = list(workers), spoil
        self.sizes: list[int] = []  # of each sum's last buffer
        self._given: list[list[jax.Array]] = [[] for _ in workers]
        self._changed = threading.Condition()
        self._arrived, self._cancelled = 0, False

    def cancel(self) -> None:
        """One has left: the others need not wait for it. A sum that is complete stays so."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def sum(self, rank: int, buffers: list[jax.Array]) -> list[np.ndarray]:
        self._given[rank] = buffers
        self._meet()
        total = [
            np.sum([np.asarray(g) for g in group], 0, dtype=group[0].dtype)
            for group in zip(*self._given, strict=True)
        ]
        if rank == 0:
            self.sizes.append(total[-1].size)
        self._meet()
        self.spoil(len(self.sizes), total[-1].reshape(-1))
        return total

    def _meet(self) -> None:
        with self._changed:
            together = (self._arrived // len(self.workers) + 1) * len(self.workers)
            self._arrived += 1
            self._changed.notify_all()
            here = self._changed.wait_for(
                lambda: self._arrived >= together or self._cancelled, DEADLINE_S
            )
            if not here or self._arrived < together:
                raise AttemptFailedError("cancelled")


def synced(
    states: dict[int, Committed | None],
    spec: StateSpec,
    *,
    donor: int,
    holders: Sequence[int],
    spoil: Callable[[int, np.ndarray], None] = lambda n, words: None,
    bucket_words: int | None = None,
) -> tuple[dict[int, Synced | BaseException], list[int]]:
    """What `sync_state` gives each worker, or raises there; and the size of each sum."""
    meeting = Meeting(list(states), spoil)
    results: dict[int, Any] = {}
    digests = compiled(Digests(spec))
    transfer = compiled(Transfer(spec, bucket_words))

    def work(rank: int, worker: int) -> None:
        try:
            results[worker] = sync_state(
                Plane(meeting, rank),
                spec,
                digests,
                transfer,
                states[worker],
                donor=donor,
                holders=holders,
            )
        except AttemptFailedError as error:
            results[worker] = error
            meeting.cancel()

    threads = [
        threading.Thread(target=work, args=item, name=f"rank {item[0]}")
        for item in enumerate(states)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert set(results) == set(states)
    return results, meeting.sizes


def stale(spec: StateSpec, state: Committed) -> Committed:
    """A state of an earlier step, with other bits."""
    return Committed(state.step - 1, state.cursor - 4, [jnp.zeros_like(x) for x in state.leaves])


def same_bits(a: Committed, b: Committed) -> bool:
    return (a.step, a.cursor) == (b.step, b.cursor) and all(
        x.dtype == y.dtype and bits_of(x) == bits_of(y)
        for x, y in zip(a.leaves, b.leaves, strict=True)
    )


def test_a_cancelled_collective_that_ends_with_zeros_agrees_with_nobody():
    """NCCL's may end without an error: zeros as everybody's digest are no agreement (R1)."""
    spec, state = state_of(EVERY_KIND)

    def cancelled(number: int, words: np.ndarray) -> None:
        words[:] = 0

    results, _ = synced({0: state, 1: state}, spec, donor=0, holders=[1], spoil=cancelled)
    assert all("own row did not come back" in str(results[w]) for w in (0, 1))


# Packing.


def test_leaves_of_every_kind_come_out_of_the_bytes_as_they_went_in():
    """Dtypes, shapes, empty ones and all bits."""
    spec, state = state_of(EVERY_KIND)
    arrays = to_host(state.leaves)
    out = cut_bytes(join_bytes(arrays), spec.host_shapes)
    assert [(a.dtype, a.shape, a.tobytes()) for a in out] == [
        (a.dtype, a.shape, a.tobytes()) for a in arrays
    ]


def test_a_state_without_leaves_packs_to_nothing():
    """Neither parameters nor anything else: a legal, if useless, state."""
    spec = spec_of({}, (), None)
    assert join_bytes([]).size == 0 and cut_bytes(join_bytes([]), spec.host_shapes) == []


@QUICK
@given(st.integers(0, 10**11))
def test_a_bucket_holds_the_state_or_is_as_large_as_may_be(size):
    """Few sizes, so few programs: powers of two up to 4 MiB, whatever the state."""
    spec = spec_of({"w": jax.ShapeDtypeStruct((size,), jnp.uint8)}, None, None)
    words = Transfer(spec).words
    assert 1 <= words <= BUCKET_WORDS["cpu"] == 2**20 and words & (words - 1) == 0
    assert words == 2**20 or size <= 4 * words < 2 * size + 8


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("words", [1, 3, 64])
def test_a_leaf_of_any_kind_is_cut_and_joined_bit_for_bit(name, words):
    """On the device: of items of any width, in buckets that it does not fill."""
    spec, state = state_of({"x": EVERY_KIND[name]})
    transfer = compiled(Transfer(spec, words))
    got: dict[int, jax.Array] = {}
    for part, count in enumerate(transfer.counts):
        buckets = transfer.cut(part, state.leaves)
        assert [b.shape for b in buckets] == [(1, 1, transfer.words)] * count
        got |= transfer.join(part, buckets)
    assert list(got) == [0] and bits_of(got[0]) == bits_of(state.leaves[0])
    assert (got[0].dtype, got[0].shape) == (state.leaves[0].dtype, state.leaves[0].shape)


# The transfer.


def test_the_donor_s_state_arrives_bit_for_bit():
    """Leaves of every kind; at a worker that has nothing and at one that is behind."""
    spec, state = state_of(EVERY_KIND)
    results, _ = synced({2: None, 3: state, 5: stale(spec, state)}, spec, donor=3, holders=[3])
    assert all(same_bits(r.state, state) for r in results.values())


@pytest.mark.parametrize("donor", [0, 1, 2])
def test_any_rank_may_be_the_donor(donor):
    """And gives its own bits, not the sum of everybody's."""
    spec, state = state_of({"w": jnp.arange(5.0)})
    states = {w: state if w == donor else stale(spec, state) for w in range(3)}
    results, _ = synced(states, spec, donor=donor, holders=[donor])
    assert all(same_bits(r.state, state) for r in results.values())


@pytest.mark.parametrize("words", [4, 64])
def test_a_state_larger_than_a_bucket_travels_in_many(words):
    """In equal buckets, the last of a leaf padded; nothing is lost at their seams."""
    spec, state = state_of(EVERY_KIND)
    results, sizes = synced({0: state, 1: None}, spec, donor=0, holders=[0], bucket_words=words)
    assert same_bits(results[1].state, state)
    assert set(sizes[1:]) == {words}  # the first is that of the headers
    assert 4 * sum(sizes[1:]) >= host_bytes(spec)


def test_a_cursor_beyond_32_bits_arrives():
    """Samples consumed, of a long run on a large data set."""
    spec, state = state_of({"w": jnp.ones(1)}, step=2**31 - 1, cursor=2**60 + 12345)
    results, _ = synced({0: None, 1: state}, spec, donor=1, holders=[1])
    assert (results[0].state.step, results[0].state.cursor) == (2**31 - 1, 2**60 + 12345)


def test_a_first_state_travels_though_nobody_was_said_to_hold_one():
    """The donor has just computed or restored it: `holders` is empty."""
    spec, state = state_of({"w": jnp.arange(3.0)}, step=0, cursor=0)
    results, _ = synced({0: state, 1: None}, spec, donor=0, holders=[])
    assert same_bits(results[1].state, state)


def test_a_state_without_leaves_travels():
    """Step and cursor all the same."""
    spec, state = state_of({})
    results, _ = synced({0: state, 1: None}, spec, donor=0, holders=[0])
    assert same_bits(results[1].state, state)


def test_who_holds_the_state_keeps_its_own():
    """Its arrays are not replaced by equal ones: nothing is allocated twice."""
    spec, state = state_of({"w": jnp.arange(3.0)})
    copy = Committed(state.step, state.cursor, [jnp.array(x) for x in state.leaves])
    results, _ = synced({0: state, 1: copy, 2: None}, spec, donor=0, holders=[0, 1])
    assert results[0].state is state and results[1].state is copy


def test_of_several_that_hold_the_state_only_the_donor_gives_it():
    """Bits of two, added, would be nobody's."""
    spec, state = state_of({"w": jnp.arange(3.0)})
    results, _ = synced({0: state, 1: state, 2: None}, spec, donor=0, holders=[0, 1])
    assert same_bits(results[2].state, state)


def test_among_equals_only_digests_move():
    """A view that only lost a member: one small sum, no bytes."""
    spec, state = state_of({"w": jnp.arange(3.0)})
    results, sizes = synced({0: state, 1: state}, spec, donor=0, holders=[0, 1])
    assert len(sizes) == 1 and [r.bytes_moved for r in results.values()] == [0, 0]


def test_everybody_learns_the_same_digest_and_size():
    """That of the donor's state, as it is written into the records."""
    spec, state = state_of(EVERY_KIND)
    results, _ = synced({0: state, 1: None}, spec, donor=0, holders=[0])
    wanted = digest_of(spec.lines(), state.step, state.cursor, to_host(state.leaves)).hex()
    assert {(r.digest, r.bytes_moved) for r in results.values()} == {(wanted, host_bytes(spec))}


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_gather_gives_every_member_s_bytes_by_rank(workers):
    """All 256 of them, through a sum of floats; zeros from who gave nothing."""
    meeting = Meeting(range(workers), lambda n, words: None)
    rows = [
        bytes(np.random.default_rng(r).permutation(256).astype(np.uint8))[: HEADER.size]
        if r % 2 == 0
        else b""
        for r in range(workers)
    ]
    got: list[list[bytes]] = []
    threads = [
        threading.Thread(
            target=lambda r=r: got.append(Plane(meeting, r).gather(rows[r], HEADER.size))
        )
        for r in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert got == [[row or bytes(HEADER.size) for row in rows]] * workers


def test_a_row_of_any_bytes_survives_the_sum():
    """0 to 255: each is exact in float32."""
    meeting = Meeting([0], lambda n, words: None)
    plane = Plane(meeting, 0)
    plane._table = table_of(256)
    assert plane.gather(bytes(range(256)), 256) == [bytes(range(256))]


# What must not pass.


@pytest.mark.parametrize("where", ["first bucket", "last bucket"])
def test_a_bit_lost_on_the_way_fails_the_attempt(where):
    """The receiver's digest is not the donor's: nothing is committed, all try again."""
    spec, state = state_of({"w": jnp.arange(60.0)})
    number = 2 if where == "first bucket" else 3  # the first sum is that of the headers

    def spoil(call: int, words: np.ndarray) -> None:
        if call == number:
            words[3] ^= np.uint32(1 << 9)

    results, sizes = synced(
        {0: state, 1: None}, spec, donor=0, holders=[0], spoil=spoil, bucket_words=32
    )
    assert len(sizes) == 3
    assert isinstance(results[1], AttemptFailedError)
    assert "the state received for step 3 has digest" in str(results[1])


def test_a_digest_lost_on_the_way_fails_the_attempt():
    """The words that carry the digest are checked as much as those it is about."""
    spec, state = state_of({"w": jnp.arange(60.0)})
    assert digest_of(spec.lines(), 3, 12, to_host(state.leaves))[-1] < 255  # and so has a successor

    def spoil(call: int, words: np.ndarray) -> None:
        # A byte of the donor's digest, as the other gets it; the donor would find its own at once.
        words[HEADER.size - 1] += call == 1 and threading.current_thread().name == "rank 1"

    results, _ = synced({0: state, 1: None}, spec, donor=0, holders=[0], spoil=spoil)
    assert isinstance(results[1], AttemptFailedError)


@pytest.mark.parametrize("differs", ["a bit", "the cursor"])
def test_holders_with_other_bits_are_told_to_all_and_nothing_moves(differs):
    """Two who say they are at one step and are not: nobody takes either for the truth."""
    spec, state = state_of({"w": jnp.zeros(3)})
    other = (
        state._replace(leaves=[-state.leaves[0]])
        if differs == "a bit"
        else (state._replace(cursor=state.cursor + 1))
    )
    results, sizes = synced({0: state, 1: other, 2: None}, spec, donor=0, holders=[0, 1])
    assert len(sizes) == 1
    assert results[0].state is state and results[2].state is None
    told = [r.differ for r in results.values()]
    assert told[0] == told[1] == told[2] and set(told[0]) == {0, 1}
    assert told[0][0] != told[0][1]

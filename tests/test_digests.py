"""The digest of a committed state: the same on device and host, another for any other bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain import digests as digests_module
from ftrain.digests import Digests, digest_of
from ftrain.state import Committed, spec_of, to_host
from tests.test_state import EVERY_KIND, QUICK, state_of


def on_device(spec, state: Committed) -> bytes:
    compiled = Digests(spec)
    compiled.lower()
    compiled.compile(lambda lowered: lowered.compile())
    return compiled(state)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_device_and_host_give_the_same(name):
    """For every kind of leaf: a checkpoint is read on the host, a sync is checked on the device."""
    spec, state = state_of({"x": EVERY_KIND[name]})
    host = digest_of(spec.lines(), state.step, state.cursor, to_host(state.leaves))
    assert on_device(spec, state) == host


def test_leaves_are_joined_and_cut_as_the_device_likes(monkeypatch):
    """Small ones before, between and after large ones; nothing at all."""
    tree = {f"{i:03d}": jnp.arange(i % 7 * 10.0) for i in range(12)}
    tree["005"] = jnp.arange(1000.0)
    spec, state = state_of(tree)
    before = on_device(spec, state)
    for small, chunk in ((1, 7), (64, 100), (1 << 20, 1 << 20)):
        monkeypatch.setattr(digests_module, "SMALL", small)
        monkeypatch.setattr(digests_module, "CHUNK", chunk)
        jax.clear_caches()
        assert on_device(spec, state) == before
        assert digest_of(spec.lines(), state.step, state.cursor, to_host(state.leaves)) == before
    empty = spec_of({}, (), None)
    assert on_device(empty, Committed(0, 0, [])) == digest_of([], 0, 0, [])


@pytest.mark.parametrize("part", [8, 10, 1000, 1024])
def test_a_large_leaf_may_be_added_up_part_by_part(monkeypatch, part):
    """On CPU, whether parts are left over or not, and wherever in the whole it begins."""
    tree = {"a": jnp.arange(70.0), "b": jnp.arange(1000.0), "c": jnp.arange(16.0)}
    tree |= {"d": jnp.arange(1000, dtype=jnp.bfloat16), "e": jnp.arange(1000) * (1 + 2j)}
    tree |= {"f": jnp.arange(2000).reshape(2, -1) % 2 == 0}
    spec, state = state_of(tree)
    before = on_device(spec, state)
    monkeypatch.setattr(digests_module, "SMALL", 20)
    monkeypatch.setattr(digests_module, "LOOPED", max(64, part))
    monkeypatch.setattr(digests_module, "PART", part)
    jax.clear_caches()
    assert on_device(spec, state) == before


def test_two_leaves_that_change_places_change_the_digest():
    """Their words are the same, at other places."""
    a, b = jnp.arange(5.0), jnp.arange(5.0) + 1
    spec, state = state_of({"a": a, "b": b})
    _, other = state_of({"a": b, "b": a})
    assert on_device(spec, state) != on_device(spec, other)


def test_equal_states_have_equal_digests():
    """Held by two workers, in memory of their own."""
    spec, state = state_of(EVERY_KIND)
    copy = [np.array(a) for a in to_host(state.leaves)]
    assert digest_of(spec.lines(), 3, 12, copy) == digest_of(
        spec.lines(), 3, 12, to_host(state.leaves)
    )
    assert len(digest_of(spec.lines(), 3, 12, copy)) == 32


@QUICK
@given(st.data())
def test_any_flipped_bit_changes_the_digest(data):
    """One bit of one leaf of any dtype."""
    spec, state = state_of(EVERY_KIND)
    arrays = [np.array(a) for a in to_host(state.leaves)]
    before = digest_of(spec.lines(), 3, 12, arrays)
    chosen = data.draw(st.sampled_from([i for i, a in enumerate(arrays) if a.size]))
    flat = arrays[chosen].reshape(-1).view(np.uint8).copy()
    flat[data.draw(st.integers(0, flat.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    arrays[chosen] = flat.view(arrays[chosen].dtype).reshape(arrays[chosen].shape)
    assert digest_of(spec.lines(), 3, 12, arrays) != before


def test_negative_zero_has_another_digest_than_zero():
    """Equal as numbers, and replicas that differ all the same."""
    digests = set()
    for zero in (0.0, -0.0):
        spec, state = state_of({"w": jnp.full(3, zero)})
        digests.add(digest_of(spec.lines(), 3, 12, to_host(state.leaves)))
    assert len(digests) == 2


@pytest.mark.parametrize("place", [(4, 12), (3, 13), (12, 3), (31, 2)])
def test_step_and_cursor_change_the_digest(place):
    """Equal leaves at another place in the run are another state; 3, 12 is not 31, 2."""
    spec, state = state_of({"w": jnp.ones(3)})
    arrays = to_host(state.leaves)
    assert digest_of(spec.lines(), *place, arrays) != digest_of(spec.lines(), 3, 12, arrays)


def test_the_tree_changes_the_digest():
    """The same bytes under another name, in another shape or dtype."""
    ones = jnp.ones(4)
    trees = [
        {"w": ones},
        {"v": ones},
        {"w": ones.reshape(2, 2)},
        {"w": jax.lax.bitcast_convert_type(ones, jnp.int32)},
        {"a": ones[:2], "b": ones[2:]},
    ]
    digests = set()
    for tree in trees:
        spec, state = state_of(tree)
        digests.add(digest_of(spec.lines(), 3, 12, to_host(state.leaves)))
    assert len(digests) == len(trees)

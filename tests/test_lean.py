"""`commit: lean`: what the sums tell before there is an update, and that update."""

from __future__ import annotations

import numpy as np
import optax
import pytest

from tests.test_nonfinite import NAN, Told
from tests.test_state import bits_of
from tests.test_step import MASKS, SHARDS, SIZE, Linear, Steps

SAMPLES = SHARDS * SIZE


class Bursts(Told):
    """Its optimizer makes an infinite step of a finite gradient."""

    def optimizer(self) -> optax.GradientTransformation:
        return optax.scale(float("inf"))


@pytest.mark.parametrize("mask", MASKS)
def test_a_lean_update_makes_the_same_bits_in_the_old_states_place(mask):
    """And tells the same of the step, once before it and once after."""
    data = Linear().dataset(MASKS[mask])
    kept, lean = (Steps(Linear(), data, judged_shards=SHARDS, lean=lean) for lean in (False, True))
    new, metrics, stop = kept.step()
    sums = lean.sums(lean.first)
    assert lean.programs.judged(lean.first, sums) == (metrics, stop, None)
    begun = lean.programs.update(lean.first, sums, SAMPLES)
    assert lean.programs.applied(begun) == (metrics, False)
    assert [bits_of(x) for x in begun.state.leaves] == [bits_of(x) for x in new.leaves]
    assert begun.state[:2] == new[:2]
    assert any(leaf.is_deleted() for leaf in lean.first.leaves)


def test_what_is_not_finite_in_the_sums_is_found_before_the_commit():
    """With the same words as where there are two states."""
    steps = Steps(Told(), Told().dataset(loss=[1, NAN, 1]), judged_shards=SHARDS, lean=True)
    *_, found = steps.programs.judged(steps.first, steps.sums(steps.first))
    assert found.shards == {1: ["loss"]}
    assert np.isfinite(steps.first.leaves[0]).all()  # there is a state to go on from


def test_what_the_update_makes_of_finite_gradients_is_found_after_it():
    """There is no state before it any more: the worker ends."""
    steps = Steps(Bursts(), judged_shards=SHARDS, lean=True)
    sums = steps.sums(steps.first)
    assert steps.programs.judged(steps.first, sums)[2] is None
    assert steps.programs.applied(steps.programs.update(steps.first, sums, SAMPLES))[1]

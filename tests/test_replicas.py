"""Who is wrong when replicas differ: by majority."""

from __future__ import annotations

import pytest

from ftrain.errors import AttemptFailedError, ReplicaDivergedError, ReplicasDifferError
from ftrain.replicas import differ, judge

A, B, C = (bytes([n]) * 32 for n in (1, 2, 3))


def test_equal_replicas_are_in_order():
    """However many, one included."""
    assert not differ({0: A}) and not differ({0: A, 3: A})
    assert differ({0: A, 3: B})


@pytest.mark.parametrize(
    "digests, outliers",
    [({0: A, 1: A, 2: B}, [2]), ({0: B, 1: A, 2: A, 3: A, 4: C}, [0, 4])],
)
def test_the_minority_ends_itself_and_the_others_try_again(digests, outliers):
    """Each judges for itself, of the same values; who has no state is with the others."""
    for worker in [*digests, 9]:
        error = ReplicaDivergedError if worker in outliers else AttemptFailedError
        with pytest.raises(error, match="step 7"):
            judge(worker, 7, digests)


@pytest.mark.parametrize("digests", [{0: A, 1: B}, {0: A, 1: A, 2: B, 3: B}, {0: A, 1: B, 2: C}])
def test_without_a_majority_nobody_is_right(digests):
    """All say so, with every side."""
    for worker in digests:
        with pytest.raises(ReplicasDifferError, match="worker 0 has digest 0101.*worker 1"):
            judge(worker, 7, digests)

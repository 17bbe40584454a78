"""Whether the replicas are equal, and which of them is wrong if they are not. Pure.

Every member of a view hears every other's digest in the same collective and judges by itself, from
the same values: the outlier ends its process before the barrier, and the others drop the block and
go on without it. So nothing that it touched is committed, and it is brought back with their state.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from ftrain.errors import AttemptFailedError, ReplicaDivergedError, ReplicasDifferError


def check_replicas(me: int, step: int, digests: Mapping[int, bytes]) -> None:
    """Returns if all digests are equal.

    Args:
      me: this worker.
      step: the committed step that they are of.
      digests: worker -> digest of its state, of all who have that step.

    Raises:
      ReplicaDivergedError: this worker's differs from that of most.
      AttemptFailedError: another worker's does.
      ReplicasDifferError: no state is that of most: nobody can say which is right.
    """
    counts = collections.Counter(digests.values())
    if len(counts) == 1:
        return
    (most, votes), *_ = counts.most_common()
    if 2 * votes <= len(digests):
        raise ReplicasDifferError(step, digests)
    outliers = [w for w, d in sorted(digests.items()) if d != most]
    if me in outliers:
        raise ReplicaDivergedError(me, step, digests[me], most)
    raise AttemptFailedError(
        f"step {step}: the state of worker {' '.join(map(str, outliers))} differs from most"
    )

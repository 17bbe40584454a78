"""Whether the replicas are equal, and which of them is wrong if they are not. Pure.

Every member of a view hears every other's digest in the same collective. If they differ, the block
does nothing else; once the barrier has confirmed it, so that all have heard the same and it was no
cancelled collective's garbage (rule R1), each judges by itself in the next block: the outlier ends
its process, and the others go on without it. So nothing is made of a step at which states differ,
and the outlier is brought back with the others' state.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import NoReturn

from ftrain.errors import AttemptFailedError, ReplicaDivergedError, ReplicasDifferError

Digests = Mapping[int, bytes]  # worker -> digest of its state, of all who have the step


def differ(digests: Digests) -> bool:
    """Whether not all are equal."""
    return len(set(digests.values())) > 1


def judge(me: int, step: int, digests: Digests) -> NoReturn:
    """Acts on digests that differ.

    Args:
      me: this worker.
      step: the committed step that they are of.
      digests: confirmed by the barrier.

    Raises:
      ReplicaDivergedError: this worker's differs from that of most.
      AttemptFailedError: another worker's does.
      ReplicasDifferError: no state is that of most: nobody can say which is right.
    """
    (most, votes), *_ = collections.Counter(digests.values()).most_common()
    if 2 * votes <= len(digests):
        raise ReplicasDifferError(step, digests)
    outliers = [w for w, d in sorted(digests.items()) if d != most]
    if me in outliers:
        raise ReplicaDivergedError(me, step, digests[me], most)
    raise AttemptFailedError(
        f"step {step}: the state of worker {' '.join(map(str, outliers))} differs from most"
    )

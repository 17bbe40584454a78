"""State moves from the donor to whoever lacks it, bit for bit, by a sum over the workers (rule R6).

The donor contributes its bits and all others zeros, summed as unsigned integers: a float sum would
turn -0.0 into 0.0 and may drop the payload of a NaN. One small program of a fixed shape serves
every state, so a rejoin compiles the same little whatever the model (rule R10), and memory beside
the state is bounded by a bucket. When nobody lacks the state, which is so after every death, only
digests meet, and they travel by the program of the step: nothing is compiled for them.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import jax
import numpy as np

from ftrain.digests import Digests
from ftrain.errors import AttemptFailedError
from ftrain.mesh import DataPlane
from ftrain.replicas import differ
from ftrain.state import (
    Committed,
    StateSpec,
    cut_bytes,
    from_host,
    host_bytes,
    join_bytes,
    to_host,
)

HEADER = struct.Struct("<qq32s")  # step, cursor, digest; zeros from who has no state
BUCKET_WORDS = 1 << 20  # 4 MiB of uint32: beyond that more buckets, not larger ones


@dataclasses.dataclass(frozen=True)
class Synced:
    """What a sync did: the committed state everybody has now, and how much of it had to move.

    If donor and holders do not have the same bits nothing was done, and `differ` has their digests.
    """

    state: Committed
    digest: str
    bytes_moved: int
    differ: dict[int, bytes] | None = None


def sync_state(
    plane: DataPlane,
    spec: StateSpec,
    digests: Digests,
    mine: Committed | None,
    *,
    donor: int,
    holders: Sequence[int],
) -> Synced:
    """Gives every member of the view the donor's committed state, checked by digest.

    Args:
      plane: of the settled view.
      spec: the state's; the same on every member.
      digests: of such states.
      mine: this worker's committed state; not None on the donor and on `holders`.
      donor: the member whose state all take.
      holders: the members that say they are at the donor's step already. They contribute nothing to
        the transfer but check their own state against the donor's digest.

    Raises:
      AttemptFailedError: a collective failed, or what was received has not the donor's digest.

    A collective: every member calls it, inside `live_devices`. If all are holders, only digests
    move.
    """
    workers, me = plane.workers, plane.workers[plane.rank]
    with_state = sorted({donor, *holders})
    header = b""
    if me in with_state:
        header = HEADER.pack(mine.step, mine.cursor, digests(mine))
    headers = [HEADER.unpack(row) for row in plane.gather(header, HEADER.size)]
    step, cursor, wanted = headers[workers.index(donor)]
    held = {w: headers[workers.index(w)][2] for w in with_state}
    if differ(held):
        return Synced(mine, "", 0, held)
    if len(with_state) == len(workers):
        return Synced(mine, wanted.hex(), 0)
    moved = _broadcast(plane, spec, to_host(mine.leaves) if me == donor else None)
    if me in with_state:
        return Synced(mine, wanted.hex(), host_bytes(spec))
    state = Committed(step, cursor, from_host(spec, moved))
    got = digests(state)
    if got != wanted:
        raise AttemptFailedError(
            f"the state received for step {step} has digest {got.hex()[:16]}, "
            f"worker {donor} sent {wanted.hex()[:16]}"
        )
    return Synced(state, wanted.hex(), host_bytes(spec))


def _bucket_words(spec: StateSpec) -> int:
    need = max(1, (host_bytes(spec) + 3) // 4)
    return min(BUCKET_WORDS, 1 << (need - 1).bit_length())


def _sum_words(plane: DataPlane, words: np.ndarray) -> np.ndarray:
    [summed] = plane.sum([jax.device_put(words.reshape(1, 1, -1), jax.local_devices()[0])])
    return np.asarray(summed).reshape(-1)


def _broadcast(
    plane: DataPlane, spec: StateSpec, arrays: Sequence[np.ndarray] | None
) -> list[np.ndarray]:
    """The donor's leaves, on every member. `arrays` is None for all but the donor."""
    size, words = host_bytes(spec), _bucket_words(spec)
    sent = np.zeros(0, np.uint8) if arrays is None else join_bytes(arrays)
    received = np.empty(-(-size // (4 * words)) * 4 * words, np.uint8)
    for start in range(0, size, 4 * words):
        bucket = np.zeros(4 * words, np.uint8)
        part = sent[start : start + 4 * words]
        bucket[: part.size] = part
        received[start : start + 4 * words] = _sum_words(plane, bucket.view(np.uint32)).view(
            np.uint8
        )
    return cut_bytes(received[:size], spec.host_shapes)

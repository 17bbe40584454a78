"""State moves from the donor to whoever lacks it, bit for bit, by a sum over the workers (rule R6).

The donor contributes its bits and all others zeros, summed as unsigned integers: a float sum would
turn -0.0 into 0.0 and may drop the payload of a NaN. One small program of a fixed shape serves
every state, so a rejoin compiles the same little whatever the model (rule R10), and memory beside
the state is bounded by a bucket. When nobody lacks the state, which is so after every death, only
digests meet, and they travel by the program of the step: nothing is compiled for them.
"""

from __future__ import annotations

import collections
import dataclasses
import struct
from collections.abc import Sequence

import jax

from ftrain.digests import Digests
from ftrain.errors import AttemptFailedError
from ftrain.mesh import DataPlane, Summing
from ftrain.replicas import differ
from ftrain.state import Committed, StateSpec, host_bytes
from ftrain.transfer import Transfer

HEADER = struct.Struct("<qq32s")  # step, cursor, digest; zeros from who has no state
IN_FLIGHT = 8  # buckets queued on a GPU when a leaf is taken up: the link does not idle


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
    transfer: Transfer,
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
      transfer: of such states.
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
    given = mine.leaves if me == donor else None
    moved = _broadcast(plane, transfer, given, keep=me not in with_state)
    if me in with_state:
        return Synced(mine, wanted.hex(), host_bytes(spec))
    state = Committed(step, cursor, moved)
    got = digests(state)
    if got != wanted:
        raise AttemptFailedError(
            f"the state received for step {step} has digest {got.hex()[:16]}, "
            f"worker {donor} sent {wanted.hex()[:16]}"
        )
    return Synced(state, wanted.hex(), host_bytes(spec))


def _broadcast(
    plane: DataPlane,
    transfer: Transfer,
    given: Sequence[jax.Array] | None,
    *,
    keep: bool,
) -> list[jax.Array]:
    """The donor's leaves, on every member that keeps them.

    Args:
      plane: of the settled view.
      transfer: of the state's spec.
      given: the leaves, on the donor alone.
      keep: whether this member lacks them; the others help to move them and let them go.
    """
    leaves: dict[int, jax.Array] = {}
    empty = transfer.empty() if given is None else None  # one serves every sum
    under_way: collections.deque[Summing] = collections.deque()
    for part, count in enumerate(transfer.counts):
        mine = [empty] * count if given is None else transfer.cut(part, given)
        summing = [plane.begin_sum([bucket]) for bucket in mine]
        under_way.extend(summing)
        while len(under_way) > (0 if transfer.is_by_host(part) else IN_FLIGHT):
            under_way.popleft().wait()
        if keep:
            leaves |= transfer.join(part, [bucket for each in summing for bucket in each.buffers])
    return [leaves[i] for i in range(len(leaves))]

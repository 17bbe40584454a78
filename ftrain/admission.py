"""Who takes part: a worker that computes with something else than the others does not.

Each publishes a record of what it computes with (`identity`), and members compare fingerprints: as
they settle, before anything is computed, and a worker that comes later before it joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from ftrain.errors import AttemptFailedError, WorkerDiffersError
from ftrain.identity import Identity, difference, fingerprint, of_most
from ftrain.run_keys import RunKeys


class Admission:
    """One worker's side of the comparison.

    Args:
      keys: to publish the record to, and read the others' from.
      identity: this worker's record.
      min_workers: the config's; fewer do not go on without the odd one.
    """

    def __init__(self, keys: RunKeys, identity: Identity, min_workers: int):
        self._keys, self._identity, self._min_workers = keys, identity, min_workers
        self.fingerprint = fingerprint(identity)

    def check_before_joining(self) -> None:
        """Refuses without anybody's notice: those who train shall not lose a step by every try."""
        self._keys.publish_identity(self.fingerprint, self._identity)
        holders = self._keys.holders()
        if holders and self.fingerprint not in holders.values():
            self._refuse(min(holders), holders[min(holders)])

    def donor(
        self, ahead: Mapping[int, int], prints: Mapping[int, str], restorable: Mapping[int, int]
    ) -> int:
        """The donor of a view (R5), if its members are the same in all but their state.

        Args:
          ahead: the step that each member holds, -1 for none.
          prints: each member's fingerprint.
          restorable: the step that each would restore, should nobody have state: hosts have
            memories of their own.

        Raises:
          WorkerDiffersError: this worker is not like the donor. In a view without state the donor
            is one of most; without any such majority everybody raises it.
          AttemptFailedError: another worker is not, and ends.
        """
        right = prints[min(ahead, key=lambda w: (-ahead[w], w))]
        if len(set(prints.values())) > 1 and max(ahead.values()) == -1:
            right = of_most(prints, self._min_workers)
        if right is None:
            self._refuse_all(prints)
        same = [w for w in ahead if prints[w] == right]
        donor = min(same, key=lambda w: (-ahead[w], -restorable[w] if ahead[w] < 0 else 0, w))
        if self.fingerprint != right:
            self._refuse(donor, right)
        if others := sorted(set(ahead) - set(same)):
            raise AttemptFailedError(f"worker {' '.join(map(str, others))} differs from the others")
        return donor

    def _refuse(self, other: int, theirs: str) -> NoReturn:
        found = difference(
            f"worker {self._keys.worker}",
            self._identity,
            f"worker {other}",
            self._keys.read_identity(theirs),
        )
        raise WorkerDiffersError(found, others_go_on=True)

    def _refuse_all(self, prints: Mapping[int, str]) -> NoReturn:
        """In the same words on every member."""
        first = min(prints)
        odd = min(w for w in prints if prints[w] != prints[first])
        records = (self._keys.read_identity(prints[w]) for w in (odd, first))
        found = difference(f"worker {odd}", next(records), f"worker {first}", next(records))
        raise WorkerDiffersError(found, others_go_on=False)

"""The run's own keys at the coordinator, which outlast views: its end, histories, identities."""

from __future__ import annotations

import json
from typing import Any

from ftrain.membership import calls_that_fail

FINISHED = "ftrain/run/finished"
LINEAGE = "ftrain/run/lineage"
RECORDS = "ftrain/record/"  # by fingerprint
HOLDERS = "ftrain/identity/"  # by worker; the coordinator takes a key away when it fences


class RunKeys:
    """What one worker says to and hears from all there are, members of a view or not.

    Args:
      store: the client of the run's key-value store.
      worker: this one.
    """

    def __init__(self, store: Any, worker: int):
        self._store, self.worker = store, worker

    def finished(self) -> str | None:
        """Why the run is over, or None: whoever sees it in a block leaves (rule R8)."""
        rows = dict(self._store.key_value_dir_get("ftrain/run/"))
        return rows.get(FINISHED)

    def set_finished(self, reason: str) -> None:
        """The last checkpoint is durable: everybody may leave."""
        self._store.key_value_set(FINISHED, reason, allow_overwrite=True)

    def next_lineage(self) -> int:
        """A number for a history that begins here, from a restore or from nothing: 1, 2, ..."""
        return self._store.key_value_increment(LINEAGE, 1)

    def publish_identity(self, fingerprint: str, identity: dict[str, str]) -> None:
        """Lets a worker whose identity differs say in what (see `identity`)."""
        self._store.key_value_set(RECORDS + fingerprint, json.dumps(identity), allow_overwrite=True)

    def read_identity(self, fingerprint: str) -> dict[str, str]:
        """What `publish_identity` was given under that fingerprint."""
        return json.loads(self._store.blocking_key_value_get(RECORDS + fingerprint, 10_000))

    def holds_state(self, fingerprint: str) -> None:
        """Says that this worker has the run's state, with programs of that identity."""
        with calls_that_fail("saying that it has the state"):
            self._store.key_value_set(f"{HOLDERS}{self.worker}", fingerprint, allow_overwrite=True)

    def holders(self) -> dict[int, str]:
        """The fingerprints of those who have said `holds_state` and live."""
        rows = self._store.key_value_dir_get(HOLDERS)
        return {int(name.rsplit("/", 1)[1]): fingerprint for name, fingerprint in rows}

"""The entrance of a view: its members settle, connect, and get the state of one (R4 to R8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftrain.membership import Members, View
from ftrain.mesh import DataPlane
from ftrain.outcome import Outcome, Progress, Replica
from ftrain.sync import sync_state

if TYPE_CHECKING:
    from ftrain.admission import Admission
    from ftrain.beat import Beat
    from ftrain.digests import Digests
    from ftrain.run_keys import RunKeys
    from ftrain.state import Committed, StateSpec
    from ftrain.table import Table
    from ftrain.transfer import Transfer


class Entrance:
    """Takes this worker into one view after another.

    Args:
      first_state: in a donor alone, where nobody has state: from a checkpoint or the seed, and the
        last step that was evaluated.
      forget_view: lets go of the last view's devices.
      compile: compiles a lowered program.
      restorable: the newest step that `first_state` would find here, on this host.

    Attributes:
      plane: the collectives of the view that was entered last; nobody else keeps it (rule R7).
    """

    def __init__(
        self,
        members: Members,
        keys: RunKeys,
        admission: Admission,
        spec: StateSpec,
        digests: Digests,
        transfer: Transfer,
        table: Table,
        *,
        beat: Beat,
        report: Callable[..., None],
        first_state: Callable[[], tuple[Committed, int]],
        forget_view: Callable[[], None],
        compile: Callable[[Any], Any],
        restorable: int,
    ):
        self._members, self._keys, self._admission = members, keys, admission
        self._spec, self._digests = spec, digests
        self._transfer, self._table = transfer, table
        self._beat, self._report = beat, report
        self._first_state, self._restorable = first_state, restorable
        self._forget_view, self._compile = forget_view, compile
        self.plane: DataPlane | None = None

    def join(self, together: list[int], name: str) -> None:
        """Registers this worker, as `Members.join` and `meet_at_start` do; the others wait for it.

        Raises:
          WorkerDiffersError: it is not like those who train; they have noticed nothing.
        """
        self._admission.check_before_joining()
        self._beat.phase("barrier")
        self._members.join()
        if len(together) > 1:
            self._members.meet_at_start(name, together)

    def enter(self, view: View, mine: Replica) -> Outcome | None:
        """Settles a new view and gives its members the state of one; `mine` has it then.

        A collective of the view's members, inside `live_devices`; raises `AttemptFailedError`.

        Returns:
          None, or what this block will have done: the run is over, or the states differ.
        """
        started = time.perf_counter()
        self._beat.phase("settle")
        holds = self._members.settle(
            view,
            {
                "step": mine.state.step if mine.state else None,
                "progress": mine.progress,
                "identity": self._admission.fingerprint,
                "restorable": self._restorable,
            },
        )
        settled = time.perf_counter()
        self._open_plane(view)
        connected = time.perf_counter()
        # R5: blank ranks below every step, and of those furthest ahead the lowest gives.
        ahead = {w: -1 if holds[w]["step"] is None else holds[w]["step"] for w in view.workers}
        donor = self._admission.donor(
            ahead,
            {w: holds[w]["identity"] for w in view.workers},
            {w: holds[w]["restorable"] for w in view.workers},
        )
        if ahead[donor] == -1:
            if self._keys.finished():  # R8: a view without state never restores then
                return Outcome(mine.state, mine.progress, leave=True)
            if donor == self._members.me:
                self._begin(mine)
        if donor == self._members.me:
            self._members.publish("progress", mine.progress)
        holders = [w for w in view.workers if 0 <= ahead[w] == ahead[donor]]
        if found := self._sync(mine, donor, holders):
            return Outcome(mine.state, mine.progress, differ=found)
        progress = Progress(*self._members.read("progress"))
        # A stop that one has committed is everybody's, kept whatever becomes of this block: none
        # may train on while another leaves.
        stopping = [Progress(*holds[w]["progress"]).stopping for w in view.workers]
        mine.progress = progress._replace(
            stopping=progress.stopping or next(filter(None, stopping), "")
        )
        self._report(
            "view_changed",
            view=self._members.name,
            workers=view.workers,
            step=mine.state.step,
            lineage=mine.progress.lineage,
            seconds=time.perf_counter() - started,
            connect_s=connected - settled,
            sync_s=time.perf_counter() - settled,
        )
        self._beat.take_spent()  # told just now
        return None

    def _begin(self, mine: Replica) -> None:
        """Nobody has state: this worker restores or computes it, for all, as their donor."""
        self._beat.phase("restore")
        mine.state, evaluated = self._first_state()
        mine.progress = Progress(lineage=self._keys.next_lineage(), evaluated=evaluated)

    def _open_plane(self, view: View) -> None:
        """New communicators for a new view; nothing of the old one may stay referenced (R7)."""
        self._beat.phase("sync")
        self.plane = None
        self._forget_view()
        devices = self._members.open_devices(view)
        self.plane = DataPlane(
            devices,
            view.workers,
            self._members.me,
            self._table,
            self._compile,
            cutter=self._members.cutter,
            end_connecting=self._members.end_connecting,
        )
        self.plane.connect()

    def _sync(self, mine: Replica, donor: int, holders: list[int]) -> dict[int, bytes] | None:
        """Everybody has the donor's state afterwards; or the digests of those who differ."""
        self._beat.phase("sync")
        started = time.perf_counter()
        synced = sync_state(
            self.plane,
            self._spec,
            self._digests,
            self._transfer,
            mine.state,
            donor=donor,
            holders=holders,
        )
        if synced.differ:
            return synced.differ
        # R6: verified, so committed at once: the donor may die in this very step.
        mine.state, mine.compared_step = synced.state, synced.state.step
        self._keys.holds_state(self._admission.fingerprint)
        if self._members.me != donor and self._members.me not in holders:
            self._report(
                "state_synced",
                donor=donor,
                step=mine.state.step,
                digest=synced.digest,
                bytes=synced.bytes_moved,
                seconds=time.perf_counter() - started,
            )
        return None

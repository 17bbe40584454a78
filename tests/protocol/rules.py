"""What is switched on in a schedule: the protocol's rules, and the setting it runs in."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of the step protocol (design, section 3). Each default is the rule as designed.

    A field is named after the rule that it breaks when it is False; the line under it says how.
    """

    r1_commit_on_barriers_word: bool = True
    """Off: a body that ended without an exception commits, whatever the exit barrier says."""

    r1_ahead_is_of_committed_state: bool = True
    """Off: gradients begun before the barrier are used whatever it said."""

    r1_steps_of_a_commit_end_alike: bool = True
    """Off: a worker that is asked to stop ends the steps of a commit at once, by itself."""

    r2_view_is_incarnations: bool = True
    """Off: views are compared by ids, and an aborted step does not forget the agreed view."""

    r3_failure_reregisters: bool = True
    """Off: a failed attempt goes to the barrier as it is, and is retried by that worker alone."""

    r3_local_error_ends_process: bool = True
    """Off: an out-of-memory or a bad record goes to the barrier with its old incarnation."""

    r3_stop_travels_in_buffer: bool = True
    """Off: a worker acts on its own SIGTERM at once, not when a committed step has told all."""

    r4_settle_before_collective: bool = True
    """Off: the members of a new view enter its first collective without having met."""

    r5_donor_is_furthest_ahead: bool = True
    """Off: the donor is the lowest member, whatever it holds."""

    r5_ranks_under_view_name: bool = True
    """Off: who holds what lies in one key a worker, overwritten before every barrier."""

    r5_recurring_view_publishes_again: bool = True
    """Off: keys are written once, so a view that comes back reads what its first use wrote."""

    r5_stopping_published: bool = True
    """Off: a new member of a stopping view is not told that the view is stopping."""

    r6_digest_is_checked: bool = True
    """Off: whatever the sync brought is taken for the donor's state."""

    r6_verified_sync_is_kept: bool = True
    """Off: a verified copy becomes state only with the commit of the step that follows it."""

    r6_stopping_is_kept: bool = True
    """Off: a member that was told so forgets that the view is stopping if the block aborts."""

    r7_new_communicators: bool = True
    """Off: on cpu one gloo group for a set of ids, in all its incarnations."""

    r8_leaving_is_agreed: bool = True
    """Off: `while step < steps`: a worker leaves with its own commit of the last step."""

    r8_finished_is_looked_at_first: bool = True
    """Off: a view without state restores although the run is over."""

    r9_fence_before_start: bool = True
    """Off: the fence of a dead worker and the start of its replacement come in any order."""

    r9_kill_first: bool = True
    """Off: a stopped worker that was declared dead is replaced but not killed, and may wake up."""

    r9_self_check: bool = True
    """Off: a worker goes on when an answer lacks it or shows a foreign incarnation."""

    r9_min_workers_after_sync: bool = True
    """Off: a view below `min_workers` does nothing, instead of all but the step."""

    def without(self) -> list[str]:
        """The names of the rules that are left out."""
        return [field.name for field in fields(self) if not getattr(self, field.name)]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a schedule meets besides its seed. None leaves the choice to the seed."""

    steps: int | None = None
    """Committed steps after which the run is to end; None: it goes on."""

    stop_request: bool = False
    """Some time during the chaos, SIGTERM reaches one worker after the other."""

    replace_after_stop: bool = True
    """Whether the supervisor still starts a worker once the stop was requested."""

    kills: bool = True
    """False: nobody is killed and no local error ends a worker; all other faults remain."""

    style: str | None = None
    """`cpu` (gloo: no cancellation but ftrain's own) or `gpu` (NCCL, cancelled by JAX)."""

    min_workers: int | None = None

    lean: bool = False
    """What is uncommitted is the sums: a while passes between the barrier's word and the state."""

    steps_per_commit: int = 1
    """That one barrier commits; fewer where something comes that all know of."""

    chaos_ticks: int = 7000
    """Length of the phase with faults. A committed step takes about 8 ticks of 4 workers."""

    quiet_ticks: int = 9000
    """Longest phase without faults, in which everybody has to come back (a run: to end)."""

    @property
    def ends(self) -> bool:
        return self.steps is not None or self.stop_request

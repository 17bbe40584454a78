"""The worker's loop (design, section 3) as a generator that yields its calls.

The form modelled: *every failure re-registers, with a new incarnation, before the exit barrier*
(R3). As in JAX, the exit barrier of one block is the entry barrier of the next.
"""

from collections import Counter
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from . import calls
from .calls import Name, Rank, View
from .collectives import Garbage, Reduced
from .process import Process, State

if TYPE_CHECKING:
    from .world import World

SAVE_ROUNDS = 3  # the last checkpoint takes that many empty blocks ...
SAVE_PAUSES = 24  # ... or that many pauses of a worker by itself


class Agreed(NamedTuple):
    """A view whose members are known to hold equal state, and to be alike in `stopping`."""

    view: View
    name: Name
    use: int
    stopping: bool


class Outcome(NamedTuple):
    """What a body that ended without an exception wants to commit."""

    agreed: Agreed
    state: State
    steps: tuple[tuple[State, Reduced | Garbage], ...] = ()  # that lead there, and their sums


class Worker:
    def __init__(self, world: "World", process: Process):
        self.world = world
        self.rules = world.rules
        self.process = process
        self.id = process.id
        self.agreed: Agreed | None = None
        self.block = 0  # of this use of the agreed view
        self.uses: Counter[Name] = Counter()
        self.save_rounds = 0
        self.ahead: tuple[State, bool] | None = None  # gradients of that state, and a stop request

    def loop(self) -> Generator:
        yield calls.Pause()  # imports; compilation
        yield calls.Connect()  # last, when it could call at once (R9)
        view = yield from self.meet()
        while True:
            outcome = None
            try:
                outcome = yield from self.body(view)
            except calls.Leave:
                return
            except (calls.SettleFailed, calls.CollectiveFailed) as failure:
                yield from self.fail(view, failure)
            except calls.LocalFailure:
                if self.rules.r3_local_error_ends_process:
                    raise
            before, view = view, (yield from self.meet())
            failed = {id for id in before if view.get(id) != before[id]}
            if not self.rules.r1_commit_on_barriers_word and outcome is not None:
                failed = set()
            if failed or outcome is None:
                self.abort(failed)
                continue
            if self.world.setting.lean:
                yield calls.Pause()  # the update
            self.commit(outcome)
            if not self.rules.r8_leaving_is_agreed and self.at_target(outcome.state):
                yield from self.leave_alone(before)
                return

    def meet(self) -> Generator[Any, Any, View]:
        """The liveness barrier, and the check that the answer knows this very process (R9)."""
        if not self.rules.r5_ranks_under_view_name:
            yield calls.Put("rank", self.id, self.rank())
        view = yield calls.Meet()
        if self.rules.r9_self_check and view.get(self.id) != self.process.incarnation:
            raise calls.SelfCheckFailed(f"{self.process} is not in {view}")
        return view

    def rank(self) -> Rank:
        process = self.process
        stopping = process.stopping or process.stop_requested
        step = process.state.step if process.state else -1
        return Rank(process.state is not None, step, stopping, process.incarnation)

    def fail(self, view: View, failure: Exception) -> Generator:
        """Tells everybody: sockets shut at once on cpu (R7), and a new incarnation (R3)."""
        if isinstance(failure, calls.CollectiveFailed) and self.world.style == "cpu":
            yield calls.Put("abort", calls.name_of(view), self.id)
        if self.rules.r3_failure_reregisters:
            yield calls.Reregister()

    def abort(self, failed: set[int]) -> None:
        self.world.count["aborts"] += 1
        self.process.uncommitted_copy = None
        if self.rules.r2_view_is_incarnations or not failed:
            self.agreed = None

    def commit(self, outcome: Outcome) -> None:
        """The only place that assigns committed state, but for a verified sync (R6)."""
        for state, word in outcome.steps or [(outcome.state, None)]:
            self.world.commit(self.process, state, word)
        self.process.stopping = outcome.agreed.stopping
        self.agreed = outcome.agreed
        self.block += 1

    # One block ---------------------------------------------------------------------------

    def body(self, view: View) -> Generator[Any, Any, Outcome | None]:
        too_small = len(view) < self.world.min_workers
        if self.id not in view or too_small and not self.rules.r9_min_workers_after_sync:
            yield calls.Pause()
            return None
        if self.is_agreed(view):
            agreed, state = self.agreed._replace(view=view), self.process.state
        else:
            agreed, state = yield from self.settle_and_sync(view)
        if self.must_finish(agreed, state):
            return (yield from self.finish(agreed, state))
        if too_small:
            return (yield from self.wait_for_more(agreed, state))
        return (yield from self.step(agreed, state))

    def is_agreed(self, view: View) -> bool:
        if self.agreed is None:
            return False
        if self.rules.r2_view_is_incarnations:
            return view == self.agreed.view
        return view.keys() == self.agreed.view.keys()

    def settle_and_sync(self, view: View) -> Generator[Any, Any, tuple[Agreed, State]]:
        """A new view's members meet (R4), agree on a donor (R5) and take its state (R6)."""
        name = calls.name_of(view)
        if self.rules.r5_ranks_under_view_name:
            if self.rules.r5_recurring_view_publishes_again or not self.uses[name]:
                yield calls.Put(("rank", name), self.id, self.rank())
        if self.rules.r4_settle_before_collective:
            yield calls.Settle(name)
        # A view's name comes back when a joiner came and died. Safe, since all members have then
        # met in it equally often, so the named barrier's counters agree; but keys must be
        # overwritten, and communicators be new for this use of the name.
        self.uses[name] += 1
        self.block = 0
        folder = ("rank", name) if self.rules.r5_ranks_under_view_name else "rank"
        published = yield calls.ListFolder(folder)
        ranks = {id: published.get(id, Rank()) for id in view}
        ranks = {id: r if r.incarnation == view[id] else Rank() for id, r in ranks.items()}
        stopping = any(rank.stopping for rank in ranks.values())
        if not self.rules.r5_stopping_published:
            stopping = self.process.stopping
        if self.rules.r6_stopping_is_kept:
            self.process.stopping = stopping
        agreed = Agreed(view, name, self.uses[name], stopping)
        best = max(rank[:2] for rank in ranks.values())
        if not best[0] and self.rules.r8_finished_is_looked_at_first:
            yield from self.leave_if_finished()  # never restored then (R8)
        donor = min(id for id in ranks if ranks[id][:2] == best)
        if not self.rules.r5_donor_is_furthest_ahead:
            donor = min(view)
        given = None
        if donor == self.id:
            given = self.process.state or self.world.restore(self.process)
        self.act(agreed, "sync")
        state = yield calls.Collective(name, agreed.use, view, "sync", given)
        self.block = 1
        self.take(state)
        return agreed, state

    def act(self, agreed: Agreed, action: str) -> None:
        self.world.checks.act(self.process, agreed.name, agreed.use, self.block, action)

    def take(self, state: State | Garbage) -> None:
        """Verified by its digest, the donor's state is this worker's at once (R6)."""
        if isinstance(state, Garbage):
            if self.rules.r6_digest_is_checked:
                raise calls.CollectiveFailed("digest differs")
            raise calls.Violation(f"GARBAGE: {self.process} takes {state.reason!r} for the state")
        self.world.count["syncs"] += 1
        self.world.checks.synced(self.process, state)
        if self.rules.r6_verified_sync_is_kept:
            self.world.adopt(self.process, state)
        elif self.process.state is None:
            self.process.uncommitted_copy = state

    def step(self, agreed: Agreed, state: State) -> Generator[Any, Any, Outcome]:
        """Local gradients, one reduction that carries the stop request along, local update.

        As often as one barrier commits; and no more, whatever a worker itself knows by then.
        """
        steps, stopping = [], False
        while not self.ends_commit(steps, stopping):
            self.act(agreed, "step")
            self.world.faults.local_error(self.process)
            reduced = yield calls.Collective(
                agreed.name, agreed.use, agreed.view, "step", self.gradients(state)
            )
            self.world.faults.local_error(self.process)
            # Garbage can read as anything, so as a stop request too.
            stopping = isinstance(reduced, Garbage) or reduced.stopping
            state = self.world.checks.next_state(state, reduced)
            steps.append((state, reduced))
            # Before the barrier has spoken, and with what this worker knows of its SIGTERM by now.
            self.ahead = state, self.process.stop_requested
        return Outcome(agreed._replace(stopping=stopping), state, tuple(steps))

    def ends_commit(self, steps: list[tuple[State, Reduced | Garbage]], stopping: bool) -> bool:
        if not steps:
            return False
        if not self.rules.r1_steps_of_a_commit_end_alike and self.process.stop_requested:
            return True
        return (
            stopping
            or len(steps) == self.world.setting.steps_per_commit
            or self.at_target(steps[-1][0])
        )

    def gradients(self, state: State) -> tuple[State, bool]:
        """Of that state: those begun ahead, if they are of it, else new ones."""
        ahead, self.ahead = self.ahead, None
        if ahead and (ahead[0] == state or not self.rules.r1_ahead_is_of_committed_state):
            return ahead
        return state, self.process.stop_requested

    def wait_for_more(self, agreed: Agreed, state: State) -> Generator[Any, Any, Outcome]:
        """Below `min_workers` only the step is skipped (R9).

        No buffer carries a stop request here, so members act on their own; they may, since a
        block that waits and one that finishes are both empty.
        """
        self.act(agreed, "nothing")
        yield from self.leave_if_finished()
        yield calls.Pause()
        stopping = agreed.stopping or self.process.stop_requested
        return Outcome(agreed._replace(stopping=stopping), state)

    # The end (R8) ------------------------------------------------------------------------

    def at_target(self, state: State) -> bool:
        steps = self.world.setting.steps
        return steps is not None and state.step >= steps

    def must_finish(self, agreed: Agreed, state: State) -> bool:
        if not self.rules.r3_stop_travels_in_buffer and self.process.stop_requested:
            return True
        return self.at_target(state) or agreed.stopping

    def finish(self, agreed: Agreed, state: State) -> Generator[Any, Any, Outcome]:
        """An empty body; the lowest saves meanwhile, over several blocks."""
        self.act(agreed, "nothing")
        if self.id == min(agreed.view):
            self.save_rounds += 1
            if self.save_rounds > SAVE_ROUNDS:
                self.world.disk = state
                yield calls.Put("run", "finished", state.step)
        yield from self.leave_if_finished()
        return Outcome(agreed, state)

    def leave_if_finished(self) -> Generator:
        if (yield calls.Get("run", "finished")) is not None:
            raise calls.Leave

    def leave_alone(self, view: View) -> Generator:
        """R8 left out: the loop is over for this worker; the lowest saves after it."""
        self.process.last_holder = len(view) > 1
        if self.id == min(view):
            for _ in range(SAVE_PAUSES):
                yield calls.Pause()
            self.world.disk = self.process.state

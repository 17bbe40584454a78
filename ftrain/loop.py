"""The step loop: each step is a transaction that every live worker commits or none does.

    with live_devices(...):     the members meet; what they do is uncommitted, under `new`
        enter the view          if it changed: settle, new communicators, everybody gets one state
        body                    steps, a part of an evaluation, a wait, or the end
    an answer without failures  `new` becomes the committed state, on every member
    ProcessFailureError         on every member: `new` is dropped and the same step tried again

Nothing but `_commit` and a verified sync (`entrance`) assigns the committed state, `mine`. Each
rule (R1 to R10, docs/protocol.md) is named where it is kept; R3 and R9 are in `membership`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ftrain.membership import Members, ProcessFailureError, View, live_devices
from ftrain.outcome import Outcome, Progress, Replica
from ftrain.replicas import differ, judge
from ftrain.state import Committed, StateSpec

if TYPE_CHECKING:
    from ftrain.beat import Beat
    from ftrain.config import Config
    from ftrain.digests import Digests
    from ftrain.entrance import Entrance
    from ftrain.evaluation import Evaluation
    from ftrain.profiling import Profiler
    from ftrain.run_keys import RunKeys
    from ftrain.saving import Saving
    from ftrain.span import Span
    from ftrain.stepping import Stepping
    from ftrain.target import Target
    from ftrain.trainer import Trainer

DIGEST_BYTES = 32
POLL_S = 0.02  # between blocks in which there is nothing to do


@dataclasses.dataclass
class StepLoop:
    """One worker's part of the run, from its first barrier to its last."""

    trainer: Trainer
    config: Config
    target: Target
    members: Members
    keys: RunKeys
    entrance: Entrance
    spec: StateSpec
    digests: Digests
    stepping: Stepping
    span: Span
    evaluation: Evaluation | None
    saving: Saving
    beat: Beat
    report: Callable[..., None]
    stop_requested: Callable[[], bool]
    profiler: Profiler | None = None

    mine: Replica = dataclasses.field(default_factory=Replica)
    agreed: View | None = None  # the view whose members are known to hold equal state
    hook: dict[str, Any] | None = None  # the metrics of a commit that after_commit has not seen
    differ: dict[int, bytes] | None = None  # confirmed by the barrier: the replicas are not equal
    below_min_since: float | None = None
    evaluating_since: float | None = None

    @property
    def state(self) -> Committed | None:
        """The committed one."""
        return self.mine.state

    @property
    def progress(self) -> Progress:
        """What is committed beside it."""
        return self.mine.progress

    def run(self, together: list[int], name: str) -> None:
        """Trains until the run is over.

        Args:
          together: the workers that begin with this one, for a first view with them all.
          name: of this beginning, used once.
        """
        self.entrance.join(together, name)
        new = Outcome(None, self.progress)
        while not new.leave:
            started = time.perf_counter()
            try:
                with live_devices(jax.devices()):
                    with self.members.attempt():
                        view = self.members.current_view()
                        new = self._block(view)
                    self.beat.phase("barrier")  # also after an attempt that failed
            except ProcessFailureError:
                # All members come here together, with whatever the body computed uncommitted (R1).
                if self.keys.finished():
                    return  # one of them has left, as all may (R8)
                self._abort(view, time.perf_counter() - started)
            else:
                self._commit(view, new, time.perf_counter() - started)

    def _block(self, view: View) -> Outcome:
        """What this block does, on uncommitted copies; the barrier decides whether it is so."""
        if self.differ is not None:
            judge(self.members.me, self.state.step if self.state else 0, self.differ)
        if view != self.agreed:
            self.stepping.drop_ahead()  # another rank's shards, or a state that is not committed
            if ended := self.entrance.enter(view, self.mine):
                return ended
        step = self.state.step
        if self.stepping.digest_due(step) and self.mine.compared_step < step:
            if found := self._compare_replicas():
                return Outcome(self.state, self.progress, differ=found)
        self._after_last_commit(view)
        if self._evaluation_due():
            return self._evaluate_part()
        if self.progress.stopping or self._target_reached():
            return self._finish(view)
        if len(view.workers) < self.config.cluster.min_workers:
            return self._pause()
        return self._step(view)

    def _abort(self, view: View, seconds: float) -> None:
        self.beat.take_spent()  # counted as an abort, whatever it was
        alive = self.members.answered()
        self.report(
            "step_aborted",
            step=self.state.step + 1 if self.state else None,
            view=self.members.name,
            failed=[w for w in view.workers if w not in alive],
            seconds=seconds,
        )
        self.agreed = self.differ = None

    def _commit(self, view: View, new: Outcome, seconds: float) -> None:
        """The barrier's exit raised nothing, here and everywhere: it is so (R1)."""
        if new.apply is not None:
            state, metrics = new.apply()  # an error of it is this worker's own, and ends it
            new = new._replace(state=state, metrics=metrics)
        self.mine.state, self.agreed, self.differ = new.state, view, new.differ
        self.mine.progress = new.progress._replace(round=new.progress.round + 1)
        self.beat.round, self.beat.step = self.progress.round, self.state.step if self.state else -1
        steps = new.steps
        for step in steps:
            self.report(
                "commit",
                step=step.state.step,
                samples=step.state.cursor,
                workers=view.workers,
                step_time_s=seconds / len(steps),
                lineage=self.progress.lineage,
                eval_due=step is steps[-1] and self._evaluation_due(),
                metrics=step.metrics,
                skipped=step.skipped,
                spent=self.beat.take_spent(),
            )
        if steps:
            self.hook = steps[-1].metrics if view.lowest == self.members.me else None
        if new.evaluated is not None:
            self.report(
                "evaluated",
                step=self.state.step,
                metrics=new.evaluated,
                seconds=time.monotonic() - self.evaluating_since,
            )
            self.evaluating_since = None

    # The things a block may do.

    def _step(self, view: View) -> Outcome:
        """Training steps up to the next commit, uncommitted: one, or up to `steps_per_commit`."""
        self.below_min_since = None
        new = Outcome(self.state, self.progress)
        while True:
            if self.profiler is not None:
                self.profiler.before(new.state.step + 1, view.lowest == self.members.me)
            new = self.stepping.step(self.entrance.plane, new.state, new.progress).after(new)
            if self.span.ends(new):
                return new

    def _compare_replicas(self) -> dict[int, bytes] | None:
        """Before anything is made of a step whose digest was due: all members have the same bits.

        On entering a view the sync has seen to that, so members agree on when this is due.
        """
        self.beat.phase("compare")
        rows = self.entrance.plane.gather(self.digests(self.state), DIGEST_BYTES)
        digests = dict(zip(self.entrance.plane.workers, rows, strict=True))
        if differ(digests):
            return digests
        self.mine.compared_step = self.state.step
        return None

    def _target_reached(self) -> bool:
        return self.target.reached(self.state.step, self.state.cursor)

    def _evaluation_due(self) -> bool:
        if self.evaluation is None or self.progress.stopping:
            return False
        step, every = self.state.step, self.config.eval.every_steps
        due = self._target_reached() or (every and step % every == 0)
        return bool(due) and self.progress.evaluated < step

    def _evaluate_part(self) -> Outcome:
        """A part of an evaluation, uncommitted: a death repeats this part."""
        self.beat.phase("evaluate")
        self.evaluating_since = self.evaluating_since or time.monotonic()
        part = self.progress.eval_part
        sums, stop = self.evaluation.part(
            self.entrance.plane, self.state, part, stop=self.stop_requested()
        )
        if stop:  # dropped: whoever continues the run evaluates this step first
            stopped = self.progress._replace(stopping="stop", eval_part=0, eval_sums=())
            return Outcome(self.state, stopped)
        if self.progress.eval_sums:
            sums = [a + b for a, b in zip(self.progress.eval_sums, sums, strict=True)]
        if part + 1 < self.evaluation.parts:
            return Outcome(
                self.state, self.progress._replace(eval_part=part + 1, eval_sums=tuple(sums))
            )
        done = self.progress._replace(evaluated=self.state.step, eval_part=0, eval_sums=())
        return Outcome(self.state, done, evaluated=self.evaluation.means(sums))

    def _pause(self) -> Outcome:
        """Fewer than `min_workers`: settled and synced, only the step is skipped (R9)."""
        if self.keys.finished():
            return Outcome(self.state, self.progress, leave=True)
        self.beat.phase("pause")
        now = time.monotonic()
        self.below_min_since = self.below_min_since or now
        stopping = "stop" if self.stop_requested() else ""
        if now - self.below_min_since > self.config.cluster.below_min_timeout_s:
            stopping = stopping or "below_min_workers"
        time.sleep(POLL_S)
        # Members may come to this at different moments; their blocks are empty either way.
        return Outcome(self.state, self.progress._replace(stopping=stopping))

    def _finish(self, view: View) -> Outcome:
        """The members go on meeting until the lowest's last checkpoint is durable (R8)."""
        if self.keys.finished():
            return Outcome(self.state, self.progress, leave=True)
        if self.profiler is not None:
            self.profiler.before(None, False)
        self.beat.phase("save")
        if view.lowest == self.members.me:
            failed = self.saving.finish(self.state, self.progress.evaluated)
            if failed is not None:
                why = failed and f"the last save failed: {failed}"
                self.keys.set_finished(why or self.progress.stopping or "target")
        time.sleep(POLL_S)
        return Outcome(self.state, self.progress)

    def _after_last_commit(self, view: View) -> None:
        """The user's hook and the snapshot that the last commit made due; on one worker alone.

        In the block after the commit, so that an error here is handled like any other, and after
        the settle: nothing slow may lie between the liveness barrier and that one (R4).
        """
        if self.hook is not None:
            self.beat.phase("hook")
            metrics, self.hook = self.hook, None
            step, cursor = np.int32(self.state.step), np.int64(self.state.cursor)
            self.trainer.after_commit(
                self.state.step,
                dict(metrics),
                self.spec.train_state(step, cursor, self.state.leaves),
            )
        me = self.members.me
        if self.saving.is_of(me, view.workers) and not self._evaluation_due():
            self.beat.phase("copy")
            self.saving.after_commit(
                self.state,
                self.progress.evaluated,
                for_disk=view.lowest == me,
                lineage=self.progress.lineage,
            )

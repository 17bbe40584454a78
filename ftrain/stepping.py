"""One training step, uncommitted; and the gradients of the step after it, begun ahead.

While the members meet in the barrier that ends a step, their devices would idle. So each begins its
gradients of the next step on the state that this one would commit. They are its own shards' alone:
no collective, nothing that another member waits for. If the step is committed they are used; if it
is not, they are dropped with the state they were computed from (rule R1). Whether they may be used
is asked of the committed state itself, never of an event that might have been missed.

With `commit: lean` what is uncommitted is the sums. The update waits for the barrier's word and
then takes the old state's memory: there are never two states, and nothing can begin ahead. What a
member committed is the same to the bit, since the sums are, and the update is a function of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ftrain.data import rank_of, shards_of
from ftrain.errors import LeanUpdateError
from ftrain.mesh import Buffers, DataPlane, Summing
from ftrain.nonfinite import SKIPS_IN_A_ROW, Nonfinite, one_line, why_stopped
from ftrain.outcome import Outcome, Progress
from ftrain.reduction import tree_sum
from ftrain.state import Committed

if TYPE_CHECKING:
    from ftrain.beat import Beat
    from ftrain.config import Config
    from ftrain.data import Batch, ShardReader
    from ftrain.digests import Digests
    from ftrain.step import StepPrograms
    from ftrain.target import Target


class _Ahead(NamedTuple):
    """A worker's own part of a step's sums, computed or on its way, of that very state."""

    state: Committed
    shards: list[int]
    sums: list[Buffers]


class Stepping:
    """The steps of one worker.

    Args:
      config: the run's.
      target: where it ends.
      programs: compiled.
      digests: of the state, for steps whose digest is due.
      reader: of the training data.
      beat: told what this worker is at.
      stop_requested: whether this worker has been asked to stop.
      compile: compiles a lowered program.
    """

    def __init__(
        self,
        config: Config,
        target: Target,
        programs: StepPrograms,
        digests: Digests,
        reader: ShardReader,
        beat: Beat,
        stop_requested: Callable[[], bool],
        compile: Callable[[Any], Any],
    ):
        self._config, self._target, self._programs = config, target, programs
        self._digests, self._reader, self._beat = digests, reader, beat
        self._stop_requested, self._compile = stop_requested, compile
        self._ahead: _Ahead | None = None

    def step(self, plane: DataPlane, state: Committed, progress: Progress) -> Outcome:
        """The step after `state`, if the barrier says so.

        A collective, inside `live_devices`; raises what `DataPlane.sum` does, and the user's own.
        """
        shards = shards_of(plane.rank, len(plane.workers), self._config.batch_shards)
        summing = self._begin_sum(plane, self._own_sums(state, shards, progress.one_by_one))
        sums, lean = summing.buffers, self._config.commit == "lean"
        if lean:
            self._wait(summing)
            new_state = self._counted_on(state)
            metrics, stop, found = self._programs.judged(state, sums)
        else:
            self._beat.phase("update")
            begun = self._programs.update(state, sums, self._target.batch(state.cursor))
            self._wait(summing)
            # Not before the sum is known to be one: a failed one's gradients would keep the device.
            self._go_ahead(begun.state, shards)
            new_state = begun.state
            metrics, stop, found = self._programs.result(state, begun, sums)
        if stop or found is not None:
            self.drop_ahead()
        if found is not None and self._is_mixed(progress):
            return Outcome(state, progress._replace(one_by_one=True))
        # The request to stop travelled in the sums: all stop at one step.
        after = progress._replace(stopping="stop" if stop else "", skipped=0, one_by_one=False)
        new = Outcome(new_state, after, metrics)
        if found is not None:
            new = self._not_finite(plane, state, progress.skipped, new, found)
        elif lean:
            return new._replace(apply=lambda: self._apply(state, sums))
        if new.metrics is not None:
            self._add_digest(new.state, new.metrics)
        return new

    def _counted_on(self, state: Committed) -> Committed:
        """The state after the next step, but for its leaves."""
        samples = self._target.batch(state.cursor)
        return state._replace(step=state.step + 1, cursor=state.cursor + samples)

    def _is_mixed(self, progress: Progress) -> bool:
        """Whether nobody can say which shard it was that is not finite, as long as it is one sum.

        Of several shards at once the gradient is one, and a shard without weight may have spoilt
        it. So the next block takes the step again, shard by shard: the next one, since a cancelled
        collective may show anything to one member alone, and the barrier must speak first (R1).
        """
        return self._programs.at_once > 1 and not progress.one_by_one

    def _apply(self, state: Committed, sums: Buffers) -> tuple[Committed, dict[str, Any]]:
        """The committed step's state and metrics; `state` is gone afterwards."""
        self._beat.phase("update")
        begun = self._programs.update(state, sums, self._target.batch(state.cursor))
        metrics, bad = self._programs.applied(begun)
        if bad:
            raise LeanUpdateError(
                f"step {begun.state.step}: update made nan or infinite values of finite gradients, "
                "and with commit=lean the state before it is gone; the newest snapshot continues. "
                "Look at optimizer() and update(), or set commit: ahead, which can skip such steps"
            )
        self._add_digest(begun.state, metrics)
        return begun.state, metrics

    def _add_digest(self, state: Committed, metrics: dict[str, Any]) -> None:
        if self.digest_due(state.step):
            metrics["digest"] = self._digests(state).hex()

    def drop_ahead(self) -> None:
        """Lets go of what was begun ahead and will not be used, and of the memory that it holds."""
        self._ahead = None

    def digest_due(self, step: int) -> bool:
        """Whether the members compare their digests of the state at that step."""
        every = self._config.digest_every_steps
        return bool(every) and step > 0 and step % every == 0

    def _own_sums(self, state: Committed, shards: list[int], one_by_one: bool) -> list[Buffers]:
        """This worker's part of a step's sums: one, or a node of the tree each."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.state is state and ahead.shards == shards:
            self._beat.phase("gradient")
            return ahead.sums
        self._beat.phase("data")
        batches = self._reader.shards(state.cursor, shards)
        self._compile_shorter(batches)
        self._beat.phase("gradient")
        return self._begin(state, batches, one_by_one)

    def _begin(
        self,
        state: Committed,
        batches: list[tuple[int, Batch | None]],
        one_by_one: bool = False,
    ) -> list[Buffers]:
        stop, programs = self._stop_requested(), self._programs
        if self._config.reduction == "fast":
            return [programs.gradients(state, batches, stop=stop, one_by_one=one_by_one)]
        return programs.nodes(state, batches, stop=stop)

    def _go_ahead(self, state: Committed, shards: list[int]) -> None:
        """Begins the gradients of the step after the one that would make `state`, if it is sure.

        Only from samples that are there: nothing slow, and no error of the next step's, may come
        between this step and its barrier.
        """
        whole = self._target.batch(state.cursor) == self._config.batch_size
        if self._target.reached(state.step, state.cursor) or not whole:
            return
        batches = self._reader.ready(state.cursor, shards)
        if batches is not None:
            self._beat.phase("gradient")
            self._ahead = _Ahead(state, shards, self._begin(state, batches))
            self._beat.phase("update")
            self._reader.read_ahead(state.cursor, shards)

    def _compile_shorter(self, batches: list[tuple[int, Batch | None]]) -> None:
        """The program of the run's last, shorter shard: by the one that has it, once it is due."""
        for _, batch in batches:
            if batch is not None and self._programs.lacks(batch):
                self._beat.phase("compile")
                self._programs.compile_for(batch, self._compile)

    def _begin_sum(self, plane: DataPlane, own: list[Buffers]) -> Summing:
        """What the shards of all members add up to, in the order that the config asks for."""

        def ready() -> None:
            self._beat.phase("reduce")

        if self._config.reduction == "fast":
            return plane.begin_sum(own[0], ready)
        return tree_sum(plane, own, self._config.batch_shards, ready)

    def _wait(self, summing: Summing) -> None:
        self._beat.phase("gradient")  # what is waited for first, where the sum is only queued
        summing.wait()
        self._beat.phase("update")

    def _not_finite(
        self, plane: DataPlane, state: Committed, before: int, new: Outcome, found: Nonfinite
    ) -> Outcome:
        """Instead of `new`: all stop without the step, or commit it with the state as it was.

        Of reduced values and the view alone, so that every member does and says the same. `before`:
        steps in a row, up to `state`, that were skipped.
        """
        shards, ranks = self._config.batch_shards, len(plane.workers)
        owners = {s: plane.workers[rank_of(s, ranks, shards)] for s in range(shards)}
        if self._config.on_nonfinite == "stop" or before >= SKIPS_IN_A_ROW:
            why = why_stopped(
                found,
                new.state.step,
                owners,
                lambda shard: self._reader.name(state.cursor, shard),
                self._config.reduce_dtype,
                before,
            )
            return Outcome(state, new.progress._replace(stopping=why, skipped=before))
        new.metrics["nonfinite"] = found.mark
        return Outcome(
            new.state._replace(leaves=state.leaves),
            new.progress._replace(skipped=before + 1),
            new.metrics,
            skipped={
                "shards": list(found.shards),
                "workers": sorted({owners[s] for s in found.shards}),
                "what": one_line(found, owners),
            },
        )

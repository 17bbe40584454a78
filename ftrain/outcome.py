"""What a worker has committed, and what a block will have done if the barrier says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ftrain.state import Committed


class Progress(NamedTuple):
    """What a view agrees on beside the state. Small and plain: it travels with the settle."""

    round: int = 0  # committed blocks; a member that is behind here is who the others wait for
    lineage: int = 0  # which history: a new one begins with a checkpoint or with nothing
    stopping: str = ""  # why the run ends before its target; "" if it does not
    evaluated: int = 0  # the last step that was evaluated
    eval_part: int = 0  # parts done of the evaluation of this step
    eval_sums: tuple[float, ...] = ()
    skipped: int = 0  # steps in a row, up to this one, that were not finite
    one_by_one: bool = False  # the next step's shards: it was not finite with several at once


@dataclasses.dataclass
class Replica:
    """What this worker has committed: by a commit, or by a verified sync (rules R1 and R6)."""

    state: Committed | None = None
    progress: Progress = Progress()
    compared_step: int = -1  # the last at which all members are known to have the same bits


class Outcome(NamedTuple):
    """What a block will have done if the barrier says so."""

    state: Committed | None
    progress: Progress
    metrics: dict[str, Any] | None = None  # a step's; None: no step is in it, but in `earlier`
    evaluated: dict[str, float] | None = None
    leave: bool = False
    differ: dict[int, bytes] | None = None  # the members' digests, if they are not equal
    skipped: dict[str, Any] | None = None  # what was not finite and whose it was, see `events`
    # Lean: makes state and metrics of a step, once it is committed and not before.
    apply: Callable[[], tuple[Committed, dict[str, Any]]] | None = None
    # The steps before this one that are committed with it, in order, their leaves let go.
    earlier: tuple[Outcome, ...] = ()

    @property
    def steps(self) -> list[Outcome]:
        """The training steps in it, in order."""
        return [step for step in (*self.earlier, self) if step.metrics is not None]

    def after(self, before: Outcome) -> Outcome:
        """This one, to be committed with the steps that `before` has."""
        if before.metrics is None:
            return self._replace(earlier=before.earlier)
        done = before._replace(state=before.state._replace(leaves=[]), earlier=())
        return self._replace(earlier=(*before.earlier, done))

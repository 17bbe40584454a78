"""What a view agrees on beside the state, and what a block will have done if it is committed."""

from __future__ import annotations

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


class Outcome(NamedTuple):
    """What a block will have done if the barrier says so."""

    state: Committed | None
    progress: Progress
    metrics: dict[str, Any] | None = None  # a step's
    evaluated: dict[str, float] | None = None
    leave: bool = False
    differ: dict[int, bytes] | None = None  # the members' digests, if they are not equal
    skipped: dict[str, Any] | None = None  # what was not finite and whose it was, see `events`
    # Lean: makes state and metrics of a step, once it is committed and not before.
    apply: Callable[[], tuple[Committed, dict[str, Any]]] | None = None

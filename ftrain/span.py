"""How many steps one barrier commits: `steps_per_commit`, or fewer. Pure.

All members have to end a span at the same step, since the others would be in the next sum while one
waits in the barrier. So what ends it follows from what they have agreed on, and from sums. If one
of these was cancelled and shows something to one member alone, the barrier drops all that it has
led to (rule R1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftrain.outcome import Outcome
from ftrain.target import Target

if TYPE_CHECKING:
    from ftrain.config import Config


class Span(NamedTuple):
    """The steps that are committed together.

    Attributes:
      most: how many.
      every: numbers of steps after which something needs a committed state; 0: never.
      target: of the run.
    """

    most: int
    every: tuple[int, ...]
    target: Target

    def ends(self, new: Outcome) -> bool:
        """Whether `new` is to be committed before there is another step."""
        if new.metrics is None or new.progress.stopping:
            return True
        step, cursor = new.state.step, new.state.cursor
        is_due = any(every and step % every == 0 for every in self.every)
        return is_due or len(new.steps) >= self.most or self.target.reached(step, cursor)


def make_span(config: Config, target: Target, *, evaluates: bool) -> Span:
    """A run's, which evaluates or does not."""
    every = config.digest_every_steps, config.checkpoint.every_steps
    if evaluates:
        every += (config.eval.every_steps,)
    return Span(config.steps_per_commit, every, target)

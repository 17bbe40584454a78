"""`profile`: a trace of a few steps of one worker, by JAX's profiler, into `run_dir/profile`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from ftrain.beat import Beat
    from ftrain.config import Config


class Profiler:
    """Starts and stops the trace at step boundaries, in the worker that is the lowest at its first.

    A worker that dies meanwhile takes its trace with it: nothing of the run depends on it, and
    others begin one only in another attempt at that first step.
    """

    def __init__(self, config: Config, beat: Beat):
        self._first, self._end = config.profile.step, config.profile.step + config.profile.steps
        self._folder, self._beat = os.path.join(config.run_dir, "profile"), beat
        self._is_on = False

    def before(self, step: int | None, is_lowest: bool) -> None:
        """Call before each attempt at a step, with its number; None once there are no more."""
        if self._is_on and (step is None or not self._first <= step < self._end):
            self._beat.phase("profile")
            self._is_on = False
            jax.profiler.stop_trace()
        elif not self._is_on and step == self._first and is_lowest and self._first > 0:
            self._beat.phase("profile")
            jax.profiler.start_trace(self._folder)
            self._is_on = True

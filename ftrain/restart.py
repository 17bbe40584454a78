"""When a failed worker is started again, and when that is given up. Pure: no clock, no process."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from ftrain.errors import RestartLimitError

if TYPE_CHECKING:
    from ftrain.config import Restart

ATTEMPTS_IN_PLACE = 10  # failed attempts at one step with nobody dead: a crash loop


class RestartBudget:
    """Counts the failures of each worker in a row; commits of its own end the row."""

    def __init__(self, rules: Restart):
        self._rules = rules
        self._failures: collections.Counter[int] = collections.Counter()

    def delay_after_failure(
        self, worker: int, commits: int, cause: str, *, others_train: bool = False
    ) -> float:
        """Seconds until `worker` may be started again; its first restart is at once.

        Args:
          worker: which one failed.
          commits: how many steps it had committed since it was started.
          cause: what it died of, for the message.
          others_train: the run makes progress without it. Then a worker that has spent its budget
            is no reason to stop: it is in quarantine, tried again after the longest wait.

        Raises:
          RestartLimitError: it has failed too often in a row, and nobody trains meanwhile, or no
            failure was allowed at all.
        """
        if commits >= self._rules.renew_after_steps:
            self._failures[worker] = 0
        self._failures[worker] += 1
        failures = self._failures[worker]
        if self.in_quarantine(worker) and not (others_train and self._rules.max_failures):
            raise RestartLimitError(worker, failures, self._rules.max_failures, cause)
        if self.in_quarantine(worker):
            return self._rules.backoff_max_s
        if failures == 1:
            return 0.0
        return min(self._rules.backoff_s * 2 ** (failures - 2), self._rules.backoff_max_s)

    def in_quarantine(self, worker: int) -> bool:
        """Whether `worker` has failed more often in a row than it may."""
        return self._failures[worker] > self._rules.max_failures


class LocalErrors:
    """Tells a worker's bad luck from a crash loop of the user's code (rule R3).

    Args:
      workers: how many the run has.
      passing_steps: errors further apart than that are not told to be one.
    """

    def __init__(self, workers: int, passing_steps: int):
        self._workers, self._passing_steps = workers, passing_steps
        self._first: dict[str, str] = {}  # error -> first traceback
        # error -> where it came: (step, worker, attempts that the run had given up by then)
        self._came: dict[str, list[tuple[int, int, int]]] = collections.defaultdict(list)
        self._on: dict[str, dict[int, int]] = collections.defaultdict(dict)  # worker -> step

    def crash_loop(
        self, worker: int, step: int, attempt: int, error: str, traceback: str
    ) -> str | None:
        """Why the run must stop, with the first traceback last; None if the worker may try again.

        It must if the same error comes again at the same step, or has come on every worker within
        `passing_steps`. Two workers in one attempt are one time: what both met may have been
        passing. So may what each met in turn over a long run, a share that is away now and then.

        Args:
          worker: whose error.
          step: that it was at.
          attempt: how many attempts the run had given up before this one.
          error: its type and message.
          traceback: the user's part.
        """
        self._first.setdefault(error, traceback or error)
        again = any(step == s and (worker == w or attempt != a) for s, w, a in self._came[error])
        self._came[error].append((step, worker, attempt))
        self._on[error][worker] = step
        if again:
            why = f"the same error came again at step {step}"
        elif (
            1
            < self._workers
            == sum(abs(step - s) <= self._passing_steps for s in self._on[error].values())
        ):
            why = f"the same error came on all {self._workers} workers"
        else:
            return None
        return f"{why}; the first was\n{self._first[error]}"

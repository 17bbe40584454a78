"""How a run has ended: exit code and reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ftrain.errors import EXIT_GAVE_UP, EXIT_OK, EXIT_REFUSED, EXIT_TRY_AGAIN


class Verdict(NamedTuple):
    """The exit code of the run, and why in words; the first cause comes last in them."""

    exit_code: int
    reason: str


class Ending:
    """Where whoever finds that the run must end says so."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None

    def __call__(self, exit_code: int, reason: str) -> None:
        """Ends the run; what was said first counts."""
        if self.verdict is None:
            self.verdict = Verdict(exit_code, reason)


def by_agreement(reason: str, step: int, stop_signal: str) -> Verdict:
    """The workers have left together, and say why (rule R8)."""
    match reason:
        case "target":
            return Verdict(EXIT_OK, f"step {step} is reached and saved")
        case "stop":
            return Verdict(EXIT_TRY_AGAIN, f"{stop_signal or 'a request to stop'}, state saved")
        case "below_min_workers":
            return Verdict(
                EXIT_TRY_AGAIN, "fewer than min_workers for below_min_timeout_s, state saved"
            )
        case _:
            return Verdict(EXIT_GAVE_UP, reason)


def not_saved_in_time(stop_signal: str, grace_s: float, error: str) -> Verdict:
    """The time to stop is over, and the last state is not on disk.

    Args:
      stop_signal: what asked for it.
      grace_s: the config's.
      error: of the newest save, "" if it was only slow.
    """
    why = f"{stop_signal}, not saved within grace_s={grace_s:g}"
    if error:
        return Verdict(EXIT_GAVE_UP, f"{why}; the last save failed: {error}")
    return Verdict(EXIT_TRY_AGAIN, why)


def refused(records: Sequence[dict[str, Any]], workers: int) -> Verdict:
    """Nobody could start: told once for all, with the lowest worker's traceback."""
    first = records[0]
    same = sum(record["message"] == first["message"] for record in records)
    count = f"the same on {same} of {workers} workers" if workers > 1 else ""
    told = first["traceback"] or first["message"]
    return Verdict(EXIT_REFUSED, "\n".join(filter(None, [count, told])))

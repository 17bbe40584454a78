"""What a rule of `verify` finds in a run's records."""

from __future__ import annotations

from typing import NamedTuple

FAIL = "fail"  # the rule is broken
UNKNOWN = "unknown"  # the records cannot tell
NOTE = "note"  # the rule holds, and this is worth knowing


class Finding(NamedTuple):
    """One thing that a rule found.

    Attributes:
      rule: its name.
      severity: fail, unknown or note.
      message: complete: the values, and the rule they break.
      step: that it is about, if it is about one.
      worker: that it is about, if it is about one.
    """

    rule: str
    severity: str
    message: str
    step: int | None = None
    worker: int | None = None

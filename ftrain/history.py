"""Which snapshots belong to the history that the run's records tell. Pure.

A history begins where nobody has state: with a restore, or with nothing. On a run over several
hosts one host may have missed that, cut off or stopped, and its memory still holds what was given
up. So a snapshot carries the name of its history, `HOLDER.COORDINATOR.LINEAGE`, and each beginning
is in the records, as `history_began{history,step}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftrain.records import Records

Begun = Sequence[tuple[str, int]]  # (name, the step that it began with), in order


def begun_in(records: Records) -> list[tuple[str, int]]:
    """The histories of a run's records."""
    return [(e["history"], e["step"]) for e in records.events if e.name == "history_began"]


def belongs(name: str, step: int, begun: Begun) -> bool:
    """Whether a snapshot of that history and step is a state of the newest one's past."""
    for other, began in reversed(begun):
        if other == name:
            return True
        if step > began:
            return False
    return False

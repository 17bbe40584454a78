"""What a check of `ftrain doctor` has found, and how to mend it. No jax."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One line of the doctor."""

    check: str  # what was looked at, in a word or two
    level: Literal["ok", "warn", "fail"]  # warn: a run may suffer; fail: it cannot work
    found: str
    mend: str = ""  # what to do; "" where nothing is to be done


def shown_bytes(count: float) -> str:
    """`1.5 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"

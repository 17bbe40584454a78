"""What the kernel tells of processes: their age, CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

HERTZ = os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def started_at(pid: int) -> float:
    """Unix seconds, to 0.01."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(_stat(pid)[19]) / HERTZ
    return time.time() - age_s


def cpu_s(pid: int) -> float:
    """User and system time of all its threads, in seconds."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / HERTZ


def peak_mb(pid: int) -> float:
    """The most memory it has had resident, in MB; what it shares with others counts whole."""
    return _kb(f"/proc/{pid}/status", "VmHWM:") / 1000


def proportional_mb(pids: set[int]) -> float:
    """What they hold together now, in MB; what they share counts once."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += _kb(f"/proc/{pid}/smaps_rollup", "Pss:") / 1000
    return total


def with_children(pids: list[int]) -> set[int]:
    """These processes and all that descend from them."""
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
                waiting += [int(child) for child in children]
    return found


def _kb(file: str, name: str) -> int:
    line = next(row for row in Path(file).read_text().splitlines() if row.startswith(name))
    return int(line.split()[1])

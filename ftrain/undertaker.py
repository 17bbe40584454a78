"""The undertaker: what must be done when a supervisor has died without a chance to do it.

Beside the supervisor of a host that has no coordinator, which does the same on the head's. It
inherits the host's lock, and hears of process groups in lines: `group <pgid>`, and `group <pgid> -`
to forget it. When its control pipe closes it ends those that are left, so that nothing which user
code forked outlives the run, and then itself, which frees the lock.

`python -m ftrain.undertaker CONTROL_FD`
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def ignore_signals() -> None:
    """Ctrl-C and a group's SIGTERM reach this process too; its supervisor decides when it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def take_group(words: list[str], groups: set[int]) -> None:
    """Takes a line about a process group."""
    match words:
        case ["group", pgid]:
            groups.add(int(pgid))
        case ["group", pgid, "-"]:
            groups.discard(int(pgid))


def end_groups(groups: Iterable[int]) -> None:
    """Ends what is left of them."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Waits for the end of the supervisor."""
    ignore_signals()
    groups: set[int] = set()
    for line in os.fdopen(int(argv[0]), encoding="utf-8"):
        take_group(line.split(), groups)
    end_groups(groups)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

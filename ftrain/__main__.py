"""`ftrain`, and `python -m ftrain`: hears signals from its first moment on, then the command line.

Until the supervisor hears them a signal ends the process with exit code 75, since nothing has begun
that would have to be ended. As process 1 of a container too, where a signal that nobody hears is
lost.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

TRY_AGAIN = 75  # errors.EXIT_TRY_AGAIN, without the import


def stop_early(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing has begun yet."""
    sys.stderr.write(f"{signal.Signals(number).name}: stopped; the same command starts again\n")
    sys.exit(TRY_AGAIN)


def main() -> int:
    """Runs one command and returns its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN):  # nohup's
            signal.signal(number, stop_early)
    from ftrain.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

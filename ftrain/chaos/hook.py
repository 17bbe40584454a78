"""What a run does differently under chaos. Without the variable below none of this is loaded.

`ftrain chaos` starts the run with `FTRAIN_CHAOS`, JSON with

    pipe      a descriptor on which the supervisor hears which fault is injected next, for the
              record and the screen, as it alone writes events. At its end chaos is gone: the run
              stops, since nobody is there to heal it.
    cgroups   a folder in which each worker process enters a cgroup of its own, see `network`
    orders    true: workers take the faults that are placed in the run's folder, see `orders`
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrain.errors import ConfigError

if TYPE_CHECKING:
    from ftrain.ears import Ears

VARIABLE = "FTRAIN_CHAOS"


def told() -> dict[str, Any]:
    """What chaos wants of this process."""
    return json.loads(os.environ[VARIABLE])


class FaultFeed:
    """The supervisor's end of the pipe.

    Args:
      log: the run's event log.
      say: puts a line on the screen.

    Raises:
      ConfigError: the variable is set, and this is no run that chaos has started.
    """

    def __init__(self, ears: Ears, log: Callable[..., None], say: Callable[[str], None]):
        self._fd = told().get("pipe")
        if self._fd is None:
            return
        try:
            os.set_blocking(self._fd, False)
        except OSError:
            raise ConfigError(
                f"{VARIABLE} is set, and `ftrain chaos` did not start this run; unset it"
            ) from None
        self._rest, self._log, self._say, self._ears = b"", log, say, ears
        ears.watch(self._fd, self._read)

    def _read(self) -> None:
        data = os.read(self._fd, 1 << 16)
        if not data:
            self._ears.forget(self._fd)
            os.kill(os.getpid(), signal.SIGTERM)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            fault = json.loads(line)
            self._say(f"chaos: {fault.pop('text')}")
            self._log("fault_injected", **fault)


def enter_worker() -> None:
    """In a worker process, before its first connection."""
    wanted = told()
    if "cgroups" in wanted:
        own = Path(wanted["cgroups"], f"worker-{os.environ['FTRAIN_WORKER_ID']}", str(os.getpid()))
        own.mkdir()
        (own / "cgroup.procs").write_text(str(os.getpid()))
    if wanted.get("orders"):
        from ftrain.chaos.orders import obey_at_phases

        obey_at_phases()

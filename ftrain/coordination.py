"""The supervisor's end of the coordinator: started, told whom to fence, ended when it is deaf.

Each coordinator that is started is a generation: its death ends every worker, and histories of
steps begin anew with the next.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ftrain.local_host import LOOPBACK
from ftrain.processes import Child, Exit, launch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrain.config import Config
    from ftrain.ears import Ears
    from ftrain.events import EventLog
    from ftrain.headship import Headship
    from ftrain.slots import Slot
    from ftrain.story import Story
    from ftrain.worker_logs import Logs

EXIT_S = 5.0  # for it to end by itself
FENCE_TIMEOUT_S = 10.0  # to acknowledge a fence; it takes milliseconds


class Coordination:
    """The coordinator process of a run, if it lives.

    Args:
      config: the run's.
      platform: what workers compute on.
      slots: whose workers it fences.
      headship: where other hosts meet this one.
      lock_fd: held open by the coordinator too, so that a run's folder is free once it has ended.
      on_exit: called when it has died, with the step that was the newest as it was started.
    """

    def __init__(
        self,
        config: Config,
        platform: str,
        slots: Iterable[Slot],
        headship: Headship,
        lock_fd: int,
        *,
        ears: Ears,
        log: EventLog,
        logs: Logs,
        story: Story,
        on_exit: Callable[[int], None],
    ):
        self._config, self._platform, self._slots = config, platform, list(slots)
        self._headship, self._lock_fd = headship, lock_fd
        # What JAX has to know of workers that are away: from a head before, or once all were here.
        self._topology = headship.topology() if headship.after else ""
        # Whether workers can train with the next service although others have not been there.
        self.knows_all = bool(self._topology) and os.path.exists(self._topology)
        self._ears, self._log, self._logs, self._story = ears, log, logs, story
        self._on_exit = on_exit
        self.child: Child | None = None
        self.address = ""  # where workers reach it; "" until they may
        self.generation = 0
        self._began_at_step = 0

    def start(self, env: Mapping[str, str], step: int) -> None:
        """Starts one, the newest committed step being `step`. Workers are due once it is ready."""
        meeting, lease = self._headship.meeting, self._headship.lease
        number = self.generation + (lease.claim.generation if lease else 0)
        argv = [
            sys.executable,
            "-m",
            "ftrain.coordinator",
            "{control}",
            str(len(self._slots)),
            self._platform,
            str(self._config.cluster.heartbeat_timeout_s),
            self._topology if self.knows_all else "",
            meeting.address if meeting else LOOPBACK,
            *map(str, meeting.service_ports(number) if meeting else [0]),
        ]
        child = self.child = Child(lambda ends: launch(argv, env, ends, [self._lock_fd]))
        self._began_at_step = step
        self._ears.hear(child, "stdout", self._on_line)
        self._ears.hear(child, "stderr", self._logs.coordinator)
        self._ears.watch(child.pidfd, self._on_child_exit)

    def all_are_here(self) -> None:
        """Every worker has told the service of its devices: the next one need not wait for all."""
        lease = self._headship.lease
        if lease is not None and self.child is not None:
            self._topology, self.knows_all = self._headship.topology(), True
            part = os.path.join(lease.staging, os.path.basename(self._topology))
            self.child.send(f"keep {json.dumps([part, self._topology])}")

    def tell_groups(self, line: str) -> None:
        """Process groups to end should this supervisor die."""
        if self.child is not None:
            self.child.send(line)

    def fence(self, slot: Slot) -> None:
        """Has a worker counted as gone. Its process must have been reaped (rule R9)."""
        if self.child is not None:
            slot.fences, slot.fence_by = slot.fences + 1, time.monotonic() + FENCE_TIMEOUT_S
            self.child.send(f"fence {slot.worker}")

    def end_if_deaf(self, now: float) -> None:
        """One that is stopped or stuck ends its workers, and none could ever be replaced."""
        if self.child is not None and any(s.fencing and now > s.fence_by for s in self._slots):
            self._story.coordinator_is_deaf(FENCE_TIMEOUT_S)
            self.child.kill()

    def close(self) -> None:
        """Ends it."""
        if self.child is not None:
            self._ears.forget(self.child.pidfd)
            self.child.close_control()
            self.child.wait(EXIT_S)
            self.child.reap(kill=True)
            self._ears.hear_out(self.child)
            self.child = None

    def _on_line(self, line: str) -> None:
        match line.split():
            case ["ready", address]:
                self.address = address
                self._log("coordinator_started", pid=self.child.pid, address=address)
                for slot in self._slots:
                    slot.restart_at = time.monotonic()
            case ["fenced", worker]:
                self._slots[int(worker)].fences -= 1
                self._log("worker_fenced", worker=int(worker))
            case _:
                self._logs.coordinator(line)

    def _on_child_exit(self) -> None:
        """Without it no worker can go on: all come back, with state from the newest checkpoint."""
        child, self.child, self.address = self.child, None, ""
        self._ears.hear_out(child)
        self._ears.forget(child.pidfd)
        ended: Exit = child.reap()
        self._log("coordinator_exited", pid=child.pid, **ended.fields())
        self._story.coordinator_died(ended)
        for slot in self._slots:
            slot.fences, slot.restart_at = 0, None
            if slot.child is not None:
                slot.hung = "the coordinator's death"
                slot.child.kill()
        self._on_exit(self._began_at_step)

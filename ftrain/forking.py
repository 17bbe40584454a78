"""The supervisor's end of the template: started, asked for workers, renewed when files change."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from ftrain.processes import Child, Ends, launch

FORK_TIMEOUT_S = 5.0  # for the template's answer; a fork takes some 20 ms


class Template:
    """One template process.

    Attributes:
      pending: it has not said yet whether it may fork workers; worth waiting for.
      usable: it may.
      unfit: why it may not.
    """

    def __init__(self, trainer: str, base: str, env: Mapping[str, str]):
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(FORK_TIMEOUT_S)
        argv = [
            sys.executable,
            "-m",
            "ftrain.template",
            str(theirs.fileno()),
            trainer,
            base,
            str(os.getpid()),
        ]
        # BLAS threads would make it unsafe to fork; a value that the user has set is kept.
        env = {"OPENBLAS_NUM_THREADS": "1", **env}
        self.child = Child(lambda ends: launch(argv, env, ends, [theirs.fileno()]))
        theirs.close()
        self._files: dict[str, float] = {}
        self.pending, self.usable = True, False
        self.unfit = ""

    def fileno(self) -> int:
        """Readable when the template has something to say."""
        return self._ours.fileno()

    def take_ready(self) -> None:
        """Takes the template's word on whether it may fork workers."""
        self.pending = False
        with contextlib.suppress(OSError):
            answer = json.loads(self._ours.recv(1 << 20) or b"{}")
            self._files = answer.get("files", {})
            self.unfit = answer.get("unfit", "it ended")
            self.usable = not self.unfit

    def is_stale(self) -> bool:
        """Whether a file of the user's has changed since the template imported it."""
        try:
            return any(os.stat(file).st_mtime != at for file, at in self._files.items())
        except OSError:  # an editor puts another in its place
            return True

    def fork(
        self, job: Mapping[str, Any], env: Mapping[str, str], beat_fd: int, ends: Ends
    ) -> int | None:
        """A new worker's pid; None if the template cannot be asked any more."""
        order = json.dumps({"job": job, "env": env}).encode()
        try:
            socket.send_fds(self._ours, [order], [*ends, beat_fd])
            return int(self._ours.recv(64))
        except (OSError, ValueError):
            self.usable = False
            return None

    def end(self) -> None:
        """Ends it and whatever it was doing; workers that it forked go on. Its pipes remain."""
        self.usable = False
        self._ours.close()
        self.child.reap(kill=True)

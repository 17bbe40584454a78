"""Child processes of the supervisor: started, heard line by line, killed with all they forked, reaped."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Exit(NamedTuple):
    """How a process ended: one of the two is None."""

    exit_code: int | None
    signal: str | None  # a name, as SIGKILL

    def fields(self) -> dict[str, int | str]:
        """As an event has it: `exit_code` or `signal`."""
        if self.signal is not None:
            return {"signal": self.signal}
        return {"exit_code": self.exit_code or 0}


class Pipe:
    """The reading end of a pipe, cut into whole lines; bytes that are no UTF-8 are shown escaped."""

    def __init__(self, fd: int):
        self.fd = fd
        self.take: Callable[[str], None] = lambda line: None  # who hears its lines
        self._rest = b""
        os.set_blocking(fd, False)

    def lines(self) -> tuple[list[str], bool]:
        """The lines that have come, and whether the pipe has ended."""
        chunks, ended = [self._rest], False
        while True:
            try:
                chunk = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                ended = True
                break
            chunks.append(chunk)
        *whole, self._rest = b"".join(chunks).split(b"\n")
        return [line.decode("utf-8", "backslashreplace") for line in whole], ended

    def close(self) -> str:
        """Closes it; returns a last line that had no newline."""
        os.close(self.fd)
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "backslashreplace")


class Child:
    """A process in a session of its own, so that no terminal signal meant for us reaches it.

    Args:
      argv: the command; `{control}` in it is replaced by the control pipe's descriptor.
      env: its environment.
      records: whether it gets a pipe to write records to; `records_fd` is its number there.
      inherit: descriptors that it inherits as they are.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, records: bool,
                 inherit: Sequence[int] = ()):
        control_read, self._control = os.pipe()
        self.pipes: dict[str, Pipe] = {}
        write: dict[str, int] = {}
        for name in ("stdout", "stderr", *(["records"] if records else [])):
            read, write[name] = os.pipe()
            self.pipes[name] = Pipe(read)
        self.records_fd = write.get("records", -1)
        self._process = subprocess.Popen(
            [part.format(control=control_read) for part in argv], env=dict(env),
            stdin=subprocess.DEVNULL, stdout=write["stdout"], stderr=write["stderr"],
            pass_fds=[control_read, *inherit, *([self.records_fd] if records else [])],
            start_new_session=True)
        for fd in (control_read, *write.values()):
            os.close(fd)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def send(self, line: str) -> None:
        """Writes a line to its control pipe; a process that has just died hears nothing."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, (line + "\n").encode())

    def kill(self) -> None:
        """SIGKILL to it and to all in its process group, stopped or not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        """Waits until it has ended, but no longer than that."""
        select.select([self.pidfd], [], [], timeout_s)

    def reap(self, *, kill: bool = False) -> Exit:
        """How it ended. Blocks until it has, or kills it; kills what it forked.

        The group is killed while the process is still unreaped, so its number cannot be another's.
        """
        if kill:
            self.kill()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.kill()
        code = self._process.wait()
        if self._control >= 0:
            os.close(self._control)
        os.close(self.pidfd)
        if code < 0:
            return Exit(None, signal.Signals(-code).name)
        return Exit(code, None)

    def close_control(self) -> None:
        """Ends its control pipe, which tells it that it is no longer needed."""
        os.close(self._control)
        self._control = -1

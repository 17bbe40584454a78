"""The supervisor's child processes: started, heard line by line, killed with theirs, reaped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ftrain.tcp_sockets import TcpSocket, tcp_sockets

PR_SET_CHILD_SUBREAPER = 36


class Exit(NamedTuple):
    """How a process ended: one of the two is None."""

    exit_code: int | None
    signal: str | None  # a name, as SIGKILL

    def fields(self) -> dict[str, int | str]:
        """As an event has it: `exit_code` or `signal`."""
        if self.signal is not None:
            return {"signal": self.signal}
        return {"exit_code": self.exit_code or 0}


class Ends(NamedTuple):
    """The child's ends of its pipes."""

    control: int  # it reads lines here
    stdout: int
    stderr: int
    records: int


class Pipe:
    """The reading end of a pipe, as whole lines; bytes that are no UTF-8 are shown escaped."""

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
    """A child in a session of its own, so that no terminal signal meant for us reaches it.

    Args:
      start: makes the process, given its ends of the pipes; returns its pid. It must be a child of
        this process.
    """

    def __init__(self, start: Callable[[Ends], int]):
        control, self._control = os.pipe()
        self.pipes: dict[str, Pipe] = {}
        ends = {"control": control}
        for name in ("stdout", "stderr", "records"):
            read, ends[name] = os.pipe()
            self.pipes[name] = Pipe(read)
        self.records_fd = ends["records"]  # its number in a process that was launched
        try:
            self.pid = start(Ends(**ends))
        finally:
            for fd in ends.values():
                os.close(fd)
        self.pidfd = os.pidfd_open(self.pid)

    def send(self, line: str) -> None:
        """Writes a line to its control pipe; a process that has just died hears nothing."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, (line + "\n").encode())

    def is_stopped(self) -> bool:
        """Whether the kernel has stopped it, by SIGSTOP or a debugger."""
        with open(f"/proc/{self.pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] in "Tt"

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def sockets(self) -> list[TcpSocket]:
        """Its TCP connections."""
        return list(tcp_sockets(self.pid).values())

    def kill(self) -> None:
        """SIGKILL to it and to all in its process group, stopped or not."""
        # Itself first: a process that was only just forked may not lead its group yet.
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)

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
        _, status = os.waitpid(self.pid, 0)
        if self._control >= 0:
            os.close(self._control)
        os.close(self.pidfd)
        code = os.waitstatus_to_exitcode(status)
        return Exit(None, signal.Signals(-code).name) if code < 0 else Exit(code, None)

    def close_control(self) -> None:
        """Ends its control pipe, which tells it that it is no longer needed."""
        os.close(self._control)
        self._control = -1


def launch(
    argv: Sequence[str], env: Mapping[str, str], ends: Ends, inherit: Sequence[int] = ()
) -> int:
    """Starts a program with the pipes' ends; returns its pid. `{control}` in argv is replaced."""
    process = subprocess.Popen(
        [part.format(control=ends.control) for part in argv],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=ends.stdout,
        stderr=ends.stderr,
        pass_fds=[ends.control, ends.records, *inherit],
        start_new_session=True,
    )
    process.returncode = 0  # reaped by us; the object has nothing to warn of
    return process.pid


def adopt_orphans() -> None:
    """Processes whose parents below us end become our children (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def become_batch_work() -> None:
    """From here on this process and those it starts take no core from who computes for being woken.

    With more threads than cores, every message otherwise interrupts a program of the device: the
    policy SCHED_BATCH of sched(7). One that somebody chose, or a nice value, is theirs and stays.
    In the main thread, before any child.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER and os.nice(0) == 0:
        with contextlib.suppress(PermissionError):  # some sandboxes forbid the call
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def reap_strays(known: set[int]) -> None:
    """Reaps ended children that are not `known`: what workers' own children left behind."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in known:
                return
            os.waitpid(ended.si_pid, 0)


def kill_strays(known: set[int]) -> None:
    """Ends and reaps every child that is not `known`: user code may have left its group."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        strays = {int(pid) for pid in file.read().split()} - known
    for pid in strays:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

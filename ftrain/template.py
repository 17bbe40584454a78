"""The template: a process that has imported jax and the user's file, and forks workers on demand.

A worker's imports cost more than a second of CPU each time; forked from here it begins with them
done. Used only while it is safe to fork: one thread, no device open. Else, or if the user's file
fails to import here, workers start by themselves, and an error is told by them.

    supervisor ── socket ──> template ── fork ──> (ends at once) ── fork ──> worker

Forked twice, so that the worker becomes the supervisor's own child (it is their subreaper): it is
watched, reaped and ended with the supervisor like one that was started directly, and the template's
death means nothing to it.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
import warnings
from typing import Any, NoReturn

from ftrain.user_code import load_module
from ftrain.worker import end_with_parent, start
from ftrain.worker_pipes import Assignment, Control

MESSAGE_BYTES = 1 << 20


def main() -> None:
    """`python -m ftrain.template SOCKET_FD TRAINER BASE PARENT_PID`."""
    supervisor = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[4])
    end_with_parent(parent)
    supervisor.send(json.dumps(preload(sys.argv[2], sys.argv[3])).encode())
    # What exists now is shared with every worker: kept out of collections, its pages stay shared.
    gc.collect()
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(supervisor, MESSAGE_BYTES, 8)
        if not data:
            os._exit(0)
        supervisor.send(str(fork_worker(json.loads(data), fds, supervisor, parent)).encode())
        for fd in fds:
            os.close(fd)


def preload(trainer: str, base: str) -> dict[str, Any]:
    """Imports all that a worker needs before its first device.

    Returns:
      `files`: the user's files that were imported, with their modification times;
      `unfit`: why no worker may be forked from here, or "".
    """
    import ftrain.loop
    import ftrain.membership
    import ftrain.restore
    import ftrain.runtime
    import ftrain.saver
    import ftrain.saving
    import ftrain.trainer  # noqa: F401

    try:
        load_module(trainer, base)
    except BaseException as error:  # noqa: BLE001  the user's; workers fail likewise and tell it
        return {"files": {}, "unfit": f"{type(error).__name__}: {error}"}
    from ftrain.runtime import device_is_open

    threads = len(os.listdir("/proc/self/task"))
    unfit = (
        f"importing {trainer} left {threads} threads"
        if threads > 1
        else f"importing {trainer} opened a device"
        if device_is_open()
        else ""
    )
    return {"files": user_files(), "unfit": unfit}


def user_files() -> dict[str, float]:
    """The imported files that are the user's own, with their modification times."""
    from ftrain.user_code import is_users

    files = {getattr(m, "__file__", None) for m in list(sys.modules.values())}
    return {f: os.stat(f).st_mtime for f in files if f and is_users(f) and os.path.exists(f)}


def fork_worker(
    order: dict[str, Any], fds: list[int], supervisor: socket.socket, parent: int
) -> int:
    """Forks one worker, a child of the supervisor's; returns its pid."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # jax warns that it has threads when forked; it has none before a device is open (checked
        # in preload; jax 0.10.2 to 0.12.0.1).
        warnings.simplefilter("ignore")
        middle = os.fork()
    if middle == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            worker = os.fork()
        if worker == 0:
            os.close(read)
            os.close(write)
            supervisor.close()
            become_worker(order, fds, parent)
        os.write(write, str(worker).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    os.close(write)
    pid = int(os.read(read, 32))
    os.close(read)
    return pid


def become_worker(order: dict[str, Any], fds: list[int], parent: int) -> NoReturn:
    """In the forked process: its own session, pipes and environment; then the work.

    That of a worker, or of the saver, which has the same imports to do.
    """
    control, stdout, stderr, records, beat = fds
    os.setsid()
    while os.getppid() != parent:  # until the one between has ended: microseconds
        if not os.path.exists(f"/proc/{parent}"):
            os._exit(1)
        time.sleep(0.0005)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.environ.update(order["env"])
    import numpy as np

    np.random.seed()  # else every worker would draw what the template would have drawn
    if "saver" in order["job"]:
        from ftrain import saver

        # In place of the beat it is given the run's lock, to hold as long as it lives.
        saver.work(order["job"]["saver"], os.fdopen(control, encoding="utf-8"), records)
    job = Assignment(**{**order["job"], "records_fd": records, "beat_fd": beat})
    start(job, Control(os.fdopen(control, encoding="utf-8")))


if __name__ == "__main__":
    main()

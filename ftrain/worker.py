"""One worker process: from its assignment to its last barrier. `python -m ftrain.worker`.

Its end says how it went: 0 after the run's own end, else a code of `errors` with a report on the
pipe of records, or a signal. It never disconnects itself (rule R9); the supervisor fences it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from ftrain.beat import Beat
from ftrain.config import Config
from ftrain.errors import (
    WORKER_LOCAL_ERROR,
    WORKER_REFUSED,
    CheckpointUnreadableError,
    FtrainError,
    InitFromError,
    ReplicasDifferError,
    StateMismatchError,
    WorkerDiffersError,
)
from ftrain.preparing import prepare
from ftrain.user_code import user_traceback
from ftrain.worker_pipes import Assignment, Control, Reporter
from ftrain.worker_signals import leave_stop_to_supervisor


def keep_stdout_for_user_code() -> None:
    """What user code prints goes to the screen; what C++ libraries print only to the log.

    gloo writes to descriptor 1 whenever it connects (jaxlib 0.10.2 to 0.12.0.1).
    """
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)


def end_with_parent(parent: int) -> None:
    """This process is killed when the supervisor dies (Linux), however that happens."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def main() -> None:
    """Takes the assignment from the control pipe (descriptor given in argv) and works."""
    pipe = os.fdopen(int(sys.argv[1]), "r", encoding="utf-8")
    job = Assignment(**json.loads(pipe.readline()))
    start(job, Control(pipe))


def start(job: Assignment, control: Control) -> NoReturn:
    """Makes this process that worker, whether it was launched or forked."""
    end_with_parent(job.parent)
    keep_stdout_for_user_code()
    leave_stop_to_supervisor(control.stop_requested)
    beat = Beat(job.beat_fd)
    beat.keep_stacks()
    if "FTRAIN_CHAOS" in os.environ:  # only `ftrain chaos` sets it, and nothing is loaded without
        from ftrain.chaos import hook

        hook.enter_worker()
    work(job, Reporter(job.records_fd), beat, control)


def work(job: Assignment, report: Callable[..., None], beat: Beat, control: Control) -> NoReturn:
    """Prepares, takes part until the run is over, and ends the process."""
    config = Config.from_json(job.config)
    try:
        loop = prepare(
            job, config, report, beat, control, lambda error: local_error(report, beat, error)
        )
    except FtrainError as error:
        refuse(report, str(error), "")
    except BaseException as error:  # noqa: BLE001  the user's code: told once, with its traceback
        refuse(report, f"{type(error).__name__}: {error}", user_traceback(error))
    beat.phase("ready")
    spent = beat.take_spent()
    report("ready", cpu_s=time.process_time(), compile_s=spent.get("compile", 0.0))
    name, together = control.wait_for_go()
    try:
        loop.run(together, name)
    except BaseException as error:  # noqa: BLE001  outside a block: ends the process all the same
        local_error(report, beat, error)
    report("left", reason=loop.keys.finished(), step=loop.state.step if loop.state else None)
    os._exit(0)


def refuse(
    report: Callable[..., None], message: str, traceback: str, *, others_go_on: bool = False
) -> NoReturn:
    """The trainer or data cannot be used: reported, so that the supervisor tells it once."""
    report("refused", message=message, traceback=traceback, others_go_on=others_go_on)
    _exit(WORKER_REFUSED)


def local_error(report: Callable[..., None], beat: Beat, error: BaseException) -> NoReturn:
    """This worker's own error: reported, and the process ends before any barrier (R3)."""
    if isinstance(error, StateMismatchError | CheckpointUnreadableError | InitFromError):
        refuse(report, str(error), "")  # another try would find the same
    if isinstance(error, WorkerDiffersError):
        refuse(report, str(error), "", others_go_on=error.others_go_on)
    if isinstance(error, ReplicasDifferError):
        report("gave_up", reason=str(error))
    reading = beat.read()
    traceback = "" if isinstance(error, FtrainError) else user_traceback(error)
    report(
        "local_error",
        step=reading.step + 1,
        phase=reading.phase,
        traceback=traceback,
        error=f"{type(error).__name__}: {error}",
    )
    sys.stderr.write((traceback or str(error)) + "\n")
    _exit(WORKER_LOCAL_ERROR)


def _exit(code: int) -> NoReturn:
    # Not sys.exit: nothing of the runtime's clean-up may speak to the service (R9).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

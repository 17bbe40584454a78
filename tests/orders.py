"""Faults to order in workers of a live run: at a phase of the protocol, in one worker or in any.

A test places an order in the run directory; the trainer `Ordered` makes each of its processes look
for one at every change of phase (`beat.PHASES`) and in its data set. Whoever takes an order commits
the fault at that place, as itself: no signal from outside hits such a place.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import jax

from ftrain.beat import Beat
from ftrain.errors import AttemptFailedError

ANYBODY = "any"


def order(
    run_dir: str | Path, fault: str, at: str, worker: int | str = ANYBODY, **options: Any
) -> Path:
    """Places an order; returns the file that is there until a worker takes it.

    Args:
      run_dir: the run's folder; need not exist yet.
      fault: a name of `FAULTS`.
      at: a phase, or "dataset": in the thread that reads samples.
      worker: which one, or whoever comes first.
      options: for the fault; `incarnation` restricts who takes it, `after_step` from when on.
    """
    folder = Path(run_dir) / "orders"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{worker}-{at}"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"fault": fault, **options}))
    draft.rename(path)
    return path


def obey_at_phases() -> None:
    """Makes this process take orders at every phase that it enters from now on."""
    enter = Beat.phase

    def phase(self: Beat, name: str) -> None:
        enter(self, name)
        obey(name, self.step)

    Beat.phase = phase
    obey("start")  # where it is already


def obey(place: str, step: int = -1) -> None:
    """Takes an order for this place and this worker, if there is one, and commits the fault.

    Args:
      place: where this thread is.
      step: the newest that this worker has committed.
    """
    folder = Path(os.environ["FTRAIN_RUN_DIR"]) / "orders"
    for worker in (os.environ["FTRAIN_WORKER_ID"], ANYBODY):
        path = folder / f"{worker}-{place}"
        if not path.exists():
            continue
        with contextlib.suppress(FileNotFoundError):  # another was faster
            told = json.loads(path.read_text())
            me = int(os.environ["FTRAIN_INCARNATION"])
            if told.get("incarnation", me) != me or told.get("after_step", -1) > step:
                continue
            taken = folder / f"{path.name}.taken-{os.environ['FTRAIN_WORKER_ID']}"
            path.rename(taken)
            taken.write_text(str(time.time()))
            FAULTS[told["fault"]](told)


def _signal(number: int) -> Any:
    return lambda told: os.kill(os.getpid(), number)


def _raise(error: BaseException) -> Any:
    def fault(told: dict[str, Any]) -> NoReturn:
        raise error

    return fault


def _segfault(told: dict[str, Any]) -> None:
    ctypes.string_at(0)


def _spin(told: dict[str, Any]) -> None:
    ctypes.PyDLL(None).pause()  # PyDLL keeps the interpreter's lock; pause() waits for ever


def _device(told: dict[str, Any]) -> None:
    """A device program that does not end."""

    def wait(x: Any) -> Any:
        time.sleep(3600)
        return x

    shape = jax.ShapeDtypeStruct((), "float32")
    jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(wait, shape, x))(1.0))


def _kill_coordinator(told: dict[str, Any]) -> None:
    os.kill(told["pid"], signal.SIGKILL)
    time.sleep(3600)  # its own end comes with that


FAULTS = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "segfault": _segfault,
    "abort": lambda told: os.abort(),
    "bus": _signal(signal.SIGBUS),
    "leave": lambda told: os._exit(told.get("code", 0)),
    "exit": _raise(SystemExit(0)),
    "interrupt": _raise(KeyboardInterrupt()),
    "memory": _raise(MemoryError("cannot allocate 8 GiB")),
    "device_memory": _raise(
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes")
    ),
    "bug": _raise(RuntimeError("a bug of the user's")),
    "attempt": _raise(AttemptFailedError("ordered")),
    "sleep": lambda told: time.sleep(told["seconds"]),
    "spin": _spin,
    "device": _device,
    "coordinator": _kill_coordinator,
}
